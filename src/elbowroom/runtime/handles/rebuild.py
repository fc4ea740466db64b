"""Rebuild: how the output of an op can be recomputed from tensors that the op saves anyway.

    op          saved anyway             exact source x           encoded source x~
    ReLU        bits of its output       relu(x)                  x~ where the bit is set, else 0
    LeakyReLU   bits of its input        the same op              x~, times slope where no bit is
    GELU, SiLU  x                        the same op              the same op
    LayerNorm   x, mean, rstd            the same op              (x~ - mean) * rstd * weight + bias
    GroupNorm,  x, mean, rstd            the same op              x~ * scale + shift
    InstanceNorm                                                  by (sample, channel)
    BatchNorm   x, mean, rstd            the same op, mean, rstd  x~ * scale + shift by channel
    RMSNorm     x                        the same op              the same op
    dropout     noise {0, 1 / (1 - p)}   x * noise                x~ * noise
    product,    x, y, or a parameter y   the same op              x~ * y~, x~ + y~
    sum
    tanh, exp,  (nothing)                the same op              the same op
    power, ...
    cast        (nothing)                the same op              the same op
    moved copy  (nothing)                the same op              (none)

With an exact source the op itself runs again: same kernel, same bits. With an encoded source the
*saved* mean and rstd are used, never statistics of x~, and masks come from their own bitmap, never
from the sign of x~: so the result is linear in x~ and unbiased where x~ is (GELU, SiLU and RMSNorm
excepted), and ReLU's and dropout's backward stay exact.

Recipes chain: relu(batch_norm(x)), dropout(gelu(x)). A `Recipe` is created in forward and refers to
its sources weakly; it becomes `Ready`, with strong references, only when a tensor is dropped: a
`RebuildHandle` holds nothing else. All references point upstream, as the graph's own edges do, so
no cycle can form. (Facts: arXiv 2203.15980 for the idea of recomputing cheap ops.)
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from operator import call
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from elbowroom.codecs import Affine
from elbowroom.errors import RestoreError
from elbowroom.plan import Need
from elbowroom.runtime.fingerprints import Fingerprints
from elbowroom.runtime.handles.encode import Parts
from elbowroom.runtime.handles.from_codes import decoded, parts_of, replace_outside
from elbowroom.runtime.handles.lending import lend, with_copies
from elbowroom.runtime.kernel_settings import OF_OPS, kernels_as
from elbowroom.runtime.normal import OfNormal, flat_of
from elbowroom.runtime.slot import Geometry, KeepHandle, Slot, same_order
from elbowroom.runtime.storage import (
    WeakStorage,
    check_parameters,
    is_changing,
    version_of,
    versions_of,
)

# Ops in a chain, all of which run at every restore. Attention that is written out in Python takes a
# product of q and k, scales it, caps it (a quotient, a tanh, a product), adds a mask and takes the
# softmax.
_DEEPEST = 9
DEEPEST_READY = 11  # the same, through saved tensors that are rebuilt themselves
# Elements that the ops of a chain compute for each element of the result. Without a limit, each
# step of a loop would recompute a product over all time steps, to read its slice.
_MAX_WORK = 16
Link: TypeAlias = "Recipe | Callable[[], Slot | None]"  # a weak reference, or an `ExpectedSlot`
OTHER_SHAPE = "dropout's factor has another shape than its input; use er.saving(..., rebuild=False)"


class ExpectedSlot:
    """Link to the slot of a tensor that no op has saved yet, but a later op may save.

        0.5 * x * (1 + tanh(a * x + b * x**3))      0.5 * x comes first, and x**3 saves x

    slots, key  where the slot will be entered: those of its storage, by version and dtype
    storage     a weak reference, which reserves the address
    recipe      an expensive recipe of the tensor, if any: used where no op saves it
    """

    __slots__ = ("_key", "_slots", "_storage", "recipe")

    def __init__(
        self,
        slots: "dict[tuple[int, torch.dtype], weakref.ref[Slot]]",
        key: tuple[int, torch.dtype],
        storage: WeakStorage,
        recipe: "Recipe | None" = None,
    ) -> None:
        self._slots, self._key, self._storage = slots, key, storage
        self.recipe = recipe

    def __call__(self) -> Slot | None:
        """Returns the slot; None if no op has saved the tensor so far, or its value was dropped."""
        found = self._slots.get(self._key)
        slot = None if found is None else found()
        value = None if slot is None else slot.value
        return None if isinstance(value, KeepHandle) and value.was_changed else slot


class Product(NamedTuple):
    """The product of q and k, of which a softmax may follow (`logits.py`).

    spread  the variance of the error of its elements, times (levels - 1)^2; None: no values are
            read
    """

    spread: float | None


@dataclass(frozen=True)
class Op:
    """One op that can run again.

    exact(x)            the op on an exact x, which stays as it is
    lossy(x)            on a decoded x, which it may overwrite
    in_place(x)         `exact` in the memory of x, which nobody else reads; None: in fresh memory
    affine()            the same for an op that is one by channel, so that decoding does it
    of_normal           what a norm makes of its normalized input, so that decoding of that does it
    needs_bits          then 0, or `outside` of it, where bits [ceil(N / 8)] are not set
    fixed               parameters that both read: unchanged until backward, or RestoreError
    noise               dropout's factor, a saved tensor of its own
    others              further operands: saved tensors or recipes, and where in them they lie
    combine             what is done with all: (x, *others, out) -> the result, in `out` if given
    products            multiplications that it takes, where these are many (a linear layer)
    given, bound        tensors of this forward alone that its functions read, statistics, and what
                        makes the same op of those of another forward; None: nothing does
    of_given            `exact` of any forward's tensors: (x, *given) -> the result; None: it reads
                        none of them, only the forms for codes do
    equal_ops           ops of earlier calls that have made the same of the same
    is_extra            run again only where not enough is saved without
    is_unsure           what it made may have been changed unseen: compare before it is dropped
    any_size            its functions know no sizes but those of parameters and of arguments that
                        are no tensors: they are right for other numbers of rows, too
    is_exponential      an error of x becomes a factor of the result, of any size: of codes, x may
                        only be made of those of tails (`Slot.has_tails`), or of logits (`product`)
    slope               the largest factor by which an error of x grows; None: it is not known
    product             what is known of it as the logits of attention; None: it makes none
    """

    exact: Callable[[Tensor], Tensor]
    lossy: Callable[[Tensor], Tensor] | None = None
    in_place: Callable[[Tensor], Tensor] | None = None
    affine: Callable[[], Affine] | None = None
    of_normal: OfNormal | None = None
    needs_bits: bool = False
    outside: Callable[[Tensor], Tensor] | None = None
    fixed: tuple[Tensor, ...] = ()
    noise: "weakref.ref[Slot] | None" = None
    others: "tuple[tuple[Link, Geometry], ...]" = ()
    combine: Callable[..., Tensor] | None = None
    products: int = 0
    given: tuple[Tensor, ...] = ()
    bound: "Callable[..., Op] | None" = None
    of_given: Callable[..., Tensor] | None = None
    equal_ops: "tuple[Op, ...]" = ()
    is_unsure: bool = False
    is_extra: bool = False
    any_size: bool = False
    is_exponential: bool = False
    slope: float | None = None
    product: Product | None = None

    def changed(self, **fields: Any) -> "Op":
        """Returns the same op with other fields: `dataclasses.replace` in a tenth of its time."""
        made = object.__new__(Op)
        made.__dict__.update(self.__dict__, **fields)
        return made

    @property
    def works_lossy(self) -> bool:
        return self.lossy is not None or self.affine is not None

    @property
    def is_same_for_codes(self) -> bool:
        """True if the op itself runs on what is decoded, too."""
        return self.lossy is self.exact or self.lossy is self.in_place

    @property
    def is_norm(self) -> bool:
        """True if the op is a norm that can be fused with a ReLU above it."""
        return self.affine is not None and not self.needs_bits


@dataclass(frozen=True)
class Recipe:
    """op(source): the source is a saved tensor, the output of another recipe, or saved later.

    seen      where in the source the op's input lies: any view of it
    made      the geometry of what comes out: dense, a whole storage
    output    where its own bits lie
    versions  of the fixed parameters when the op ran
    of_input  those bits are of what the op has read, and the slot is not that of its result
    """

    op: Op
    source: "Link"
    seen: Geometry
    made: Geometry
    output: "weakref.ref[Slot] | None"
    versions: tuple[int, ...]
    of_input: bool = False

    @classmethod
    def of(
        cls,
        op: Op,
        source: "Slot | Link",
        seen: Geometry,
        out: Tensor,
        output: Slot | None,
        versions: tuple[int, ...] | None = None,
        *,
        of_input: bool = False,
    ) -> "Recipe | None":
        """Creates a recipe; None if the chain would be too long, or too much work."""
        link = link_to(source)
        links = (link, *(other for other, _ in op.others))
        if max(map(_depth_of_link, links)) >= _DEEPEST:
            return None
        if sum(map(_work_of_link, links)) > _MAX_WORK * out.numel():
            return None
        if any(isinstance(one, ExpectedSlot) for one in links):
            op = replace(op, is_extra=True)
        if versions is None:
            versions = tuple(version_of(tensor) for tensor in op.fixed)
        bits_of = None if output is None else weakref.ref(output)
        return cls(op, link, seen, Geometry.of(out), bits_of, versions, of_input)

    def root(self) -> Slot | None:
        """Returns the slot that the chain starts at, if it exists."""
        source = self.source
        while isinstance(source, Recipe):
            source = source.source
        return source()

    @property
    def links(self) -> "tuple[Link, ...]":
        """All that the op reads: its source, and the others."""
        return self.source, *(link for link, _ in self.op.others)

    @cached_property
    def depth(self) -> int:
        """Number of ops that run, one after the other, to make the tensor again."""
        return 1 + max(map(_depth_of_link, self.links))

    @cached_property
    def work(self) -> int:
        """Number of elements that its ops make."""
        return prod(self.made.shape) + sum(map(_work_of_link, self.links))

    @cached_property
    def of_product(self) -> bool:
        """True if a linear layer runs again to make it, or one of the saved tensors on the way."""
        return bool(self.op.products) or any(map(_is_of_product, self.links))

    def kept(self) -> Slot | None:
        """Returns the slot of the output, if that is kept as it is: nothing need run to make it.

        A ReLU whose output is kept has no bits, without which it makes nothing of a code.
        """
        slot = None if self.output is None or self.of_input else self.output()
        if slot is None or slot.waits or slot.is_lent or slot.base != self.made:
            return None
        kept = slot.value
        return slot if isinstance(kept, KeepHandle) and not kept.was_changed else None

    def _has_changed(self) -> bool:
        """Returns whether a parameter was changed since, or is known to be until backward."""
        fixed = self.op.fixed
        return any(map(is_changing, fixed)) or tuple(versions_of(fixed)) != self.versions

    def ready(self) -> "Ready | None":
        """Returns the recipe with strong references; None if one of its sources was freed."""
        source, fixed = followed(self.source), self.op.fixed
        if source is None or (fixed and self._has_changed()):
            return None
        noise = None if self.op.noise is None else self.op.noise()
        if self.op.noise is not None and (
            noise is None or noise.value is None or not noise.value.exact
        ):
            return None
        others = [followed(link) for link, _ in self.op.others]
        if None in others:
            return None
        given = tuple(one for one in others if one is not None)
        output = None if self.output is None else self.output()
        bits = output.bits if output is not None and self.op.needs_bits else None
        wheres = [slot.where for slot in (source, *given) if isinstance(slot, Slot)]
        if any(where is not None and not _same_memory(where, bits) for where in wheres):
            return None
        ready = Ready(self.op, source, self.seen, self.made, self.versions, bits, noise, given)
        usable = ready.depth <= DEEPEST_READY and (ready.exact or ready.works_lossy)
        return ready if usable else None


class InScript:
    """Facts of one recipe of a script, which hold in all forwards that follow it.

    is_exact  nothing in the script is lossy, so the recipe's sources are exact until backward
    deeper    the operands that are made before the source, in this order; None: no backward has
              asked yet
    """

    __slots__ = ("deeper", "is_exact")

    def __init__(self, *, is_exact: bool) -> None:
        self.is_exact = is_exact
        self.deeper: tuple[int, ...] | None = None


@dataclass(eq=False)  # frozen, each of a replayed step would take 1.2 us to make, and not 0.1
class Ready:
    """A recipe that holds its sources. It is never changed.

    copies  of the fixed parameters that may be changed until backward; of an examined forward alone
    samples  of those that are too large to be copied, likewise
    fingerprints  of them; script: what is known of the recipe; both of a replayed forward alone
    """

    op: Op
    source: "Slot | Ready"
    seen: Geometry
    made: Geometry
    versions: tuple[int, ...]
    bits: Tensor | None
    noise: Slot | None
    others: "tuple[Slot | Ready, ...]" = ()
    copies: "tuple[Tensor | None, ...]" = ()
    fingerprints: Fingerprints | None = None
    samples: tuple[int, ...] = ()
    script: InScript | None = None

    @property
    def exact(self) -> bool:
        """True if the sources are exact now. They may be encoded later, unless they are pinned."""
        if self.script is not None and self.script.is_exact:
            return True
        return self.source.exact and (not self.others or all(one.exact for one in self.others))

    @property
    def works_lossy(self) -> bool:
        """True if every op of the chain can also run on a decoded source."""
        return all(step._works_lossy for step in self.steps) and not any(
            slot.is_cut for slot in self.slots
        )

    @property
    def _works_lossy(self) -> bool:
        has_bits = self.bits is not None or not self.op.needs_bits
        if self.op.is_exponential and not all(map(self._is_fine, self.slots)):
            return False
        return self.noise is not None or (self.op.works_lossy and has_bits)

    @property
    def is_of_logits(self) -> bool:
        """True if the product of q and k is made again, or what is made of it."""
        return any(step.op.product is not None for step in self.steps)

    def _is_fine(self, slot: Slot) -> bool:
        """Returns whether an exponential may read what is made of a slot."""
        return slot.has_tails or (slot.has_logits and self.is_of_logits)

    @property
    def may_be_coded(self) -> bool:
        """True if a lossy policy may encode a source: one was decided on, and no op needs it exact.

        Then a recipe that works on exact sources alone is not used (`serving.py`).
        """
        return any(slot.sites and not slot.asked_exact for slot in self.slots)

    @property
    def steps(self) -> "list[Ready]":
        """The recipe, and those of its sources."""
        below = [one.steps for one in (self.source, *self.others) if isinstance(one, Ready)]
        return [self, *chain.from_iterable(below)]

    @property
    def depth(self) -> int:
        """Number of ops that run, one after the other, to make the tensor again."""
        return 1 + max(map(_depth_of, (self.source, *self.others)))

    @property
    def max_depth(self) -> int:
        """The depth if all saved tensors on the way were rebuilt, too, as a plan may decide."""
        return 1 + max(one.max_depth for one in (self.source, *self.others))

    @property
    def root(self) -> Slot:
        """The slot that the chain starts at."""
        source = self.source
        while isinstance(source, Ready):
            source = source.source
        return source

    @property
    def sole_source(self) -> Slot | None:
        """The slot that the chain starts at, if it has no other source."""
        if self.noise is not None or self.others:
            return None
        return self.source.sole_source if isinstance(self.source, Ready) else self.source

    @property
    def slots(self) -> "list[Slot]":
        """Slots that the recipe takes."""
        found = self.source.slots if isinstance(self.source, Ready) else [self.source]
        for one in self.others:
            found = [*found, *(one.slots if isinstance(one, Ready) else [one])]
        return found if self.noise is None else [*found, self.noise]

    @property
    def products(self) -> int:
        """Multiplications that the ops of the recipe take, where they take many."""
        return sum(step.op.products for step in self.steps)

    @property
    def is_extra(self) -> bool:
        """True if one of the ops is recomputed only where not enough memory is saved otherwise."""
        return any(step.op.is_extra for step in self.steps)

    @property
    def is_unsure(self) -> bool:
        """True if the result may have been changed without a change of its version."""
        return any(step.op.is_unsure for step in self.steps)

    def pin(self) -> None:
        """Makes the sources stay exact from now on."""
        self.source.pin()
        for other in self.others:
            other.pin()

    def make(self) -> Tensor:
        """The output with the geometry `made`, in memory that the caller may overwrite.

        Backward may run inside autocast, which would run other kernels than forward did.
        """
        lent = lend(self) if self.copies else ()
        try:
            if self.op.fixed and not lent:
                check_parameters(self.op.fixed, self.versions, self.fingerprints)
            if torch._C._is_any_autocast_enabled():
                with torch.autocast(self.root.device.type, enabled=False):
                    out = self._run()
            else:
                out = self._run()
        finally:
            for x, now in lent:
                x.data = now
        return laid_out(out, self.made)

    def _run(self) -> Tensor:
        exact, affine = self.exact, self.op.affine
        given = self._deeper_operands() if self.others else {}
        if isinstance(self.source, Ready):
            x, private, base = self.source.make(), True, self.source.made
        elif not exact and self.seen == self.source.base and (made := decoded(self)) is not None:
            return made
        else:
            base = self.source.base
            x, private = self.source.restore_operand(exact=exact)
        if self.seen != base:
            x = x.as_strided(
                self.seen.shape,
                self.seen.stride,
                self.seen.offset - base.offset + x.storage_offset(),
            )
            if not torch.ops.aten.is_non_overlapping_and_dense(x):
                # The same op on the same strides, for the same bits; but on a private copy where
                # the op overwrites.
                x, private = (x, False) if exact else (x.contiguous(), True)
        if self.noise is not None:
            noise = self._noise_like(x)
            return x.mul_(noise) if private else x * noise
        if self.others:
            return self._with_others(x, private, given)
        if exact:
            run = self.op.in_place if private else None
            return self.op.exact(x) if run is None else run(x)
        if affine is not None:
            x = x if private else x.clone()
            affine().in_place(flat_of(x), self.bits)
            return x
        assert self.op.lossy is not None
        if private:
            x = self.op.lossy(x)
        elif self.op.is_same_for_codes:
            x = self.op.exact(x)
        else:
            x = self.op.lossy(x.clone())
        if self.op.outside is not None and self.bits is not None:
            replace_outside(flat_of(x), self.bits, self.op.outside)
        return x

    def _deeper_operands(self) -> dict[int, Tensor]:
        """Returns the operands that take more ops than the source does, made before it.

        A residual stream is rebuilt from itself, one layer below, and of what the layer adds.
        Were that made first, each layer of the stream would hold it while those below are made.
        """
        deeper = None if self.script is None else self.script.deeper
        if deeper is None:
            depths = [_depth_of(one) for one in self.others]
            least = _depth_of(self.source)
            found = (i for i, depth in enumerate(depths) if depth > least)
            deeper = tuple(sorted(found, key=lambda i: -depths[i]))
            if self.script is not None:
                self.script.deeper = deeper
        return {i: self._operand(i) for i in deeper}

    def _operand(self, i: int) -> Tensor:
        one, (_, seen) = self.others[i], self.op.others[i]
        if isinstance(one, Ready):
            return seen.within(one.made, one.make())
        return seen.within(one.base, one.restore_source())

    def _with_others(self, x: Tensor, private: bool, known: dict[int, Tensor]) -> Tensor:
        """Returns the op's result for all operands, in x's memory if that is private and fits.

        known: operands that have been made, by index
        """
        assert self.op.combine is not None
        given = [known[i] if i in known else self._operand(i) for i in range(len(self.others))]
        fits = (
            private
            and x.shape == self.made.shape
            and all(torch.result_type(x, y) is x.dtype for y in given)
        )
        return self.op.combine(x, *given, out=x if fits else None)

    def _noise_like(self, x: Tensor) -> Tensor:
        assert self.noise is not None
        noise = self.noise.restore_source()
        if noise.shape != x.shape:
            raise RestoreError(OTHER_SHAPE)
        return noise


def laid_out(out: Tensor, made: Geometry) -> Tensor:
    """Returns the result of a recipe in the order of memory that it was made in.

    A product of matrices has the dimensions of its batch folded into one.
    """
    shape = made.shape
    if out.dim() != len(shape) and out.numel() == prod(shape) and out.is_contiguous():
        out = out.view(shape)
    if out.shape != shape:
        raise RestoreError(
            f"rebuilding gave shape {tuple(out.shape)} where {made.shape} was saved. "
            "Please report it; er.saving(..., rebuild=False) avoids it."
        )
    stride = out.stride()
    if stride == made.stride or same_order(made.shape, stride, made.stride):
        return out
    room = torch.empty_strided(made.shape, made.stride, dtype=out.dtype, device=out.device)
    return room.copy_(out)


def as_base(x: Tensor, base: Geometry, dtype: torch.dtype) -> Tensor:
    """Returns the dense view of a recipe's result that was saved."""
    if x.dtype is not dtype:
        raise RestoreError(
            f"rebuilding gave {_name(x.dtype)} where {_name(dtype)} was saved. "
            "Please report it; er.saving(..., rebuild=False) avoids it."
        )
    if x.stride() == base.stride and x.shape == base.shape and not base.offset:
        return x
    return x.as_strided(base.shape, base.stride, base.offset + x.storage_offset())


def link_to(source: "Slot | Link") -> "Link":
    """Returns a weak link from a recipe to its source."""
    return weakref.ref(source) if isinstance(source, Slot) else source


def followed(link: "Link") -> "Slot | Ready | None":
    """Returns the target of a link; None if that was freed, or is not saved."""
    if isinstance(link, Recipe):
        return link.kept() or link.ready()
    slot = link()
    if slot is not None and slot.value is not None:
        return None if slot.is_lent else slot
    recipe = getattr(link, "recipe", None)
    return None if recipe is None else recipe.ready()


def _is_of_product(link: Link) -> bool:
    if isinstance(link, Recipe):
        return link.of_product
    slot = link()
    return slot is not None and slot.of_product


def _depth_of_link(link: "Link") -> int:
    recipe = link if isinstance(link, Recipe) else getattr(link, "recipe", None)
    return 0 if recipe is None else recipe.depth


def _work_of_link(link: "Link") -> int:
    """Elements that are computed for it; a saved tensor is restored once for all of its readers."""
    recipe = link if isinstance(link, Recipe) else getattr(link, "recipe", None)
    return 0 if recipe is None else recipe.work


def _same_memory(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.data_ptr() == other.data_ptr()


def _depth_of(source: "Slot | Ready") -> int:
    """The depth of a recipe, also of one that rebuilds a saved tensor; else 0."""
    recipe: Any = source if isinstance(source, Ready) else source.value
    return getattr(recipe, "depth", 0)


class RebuildHandle:
    """Holds a ready recipe, and the geometry of `base`, a dense view of all the recipe makes."""

    __slots__ = ("_base", "_dtype", "_kernels", "ready")

    label = "rebuild"
    nbytes = 0

    def __init__(self, ready: Ready, base: Tensor) -> None:
        self.ready, self._kernels = ready, tuple(map(call, OF_OPS))
        self._base, self._dtype = Geometry.of(base), base.dtype

    @classmethod
    def of(cls, ready: Ready, base: Tensor, need: Need) -> Self:
        """Holds a recipe in place of base; its sources stay exact if necessary."""
        if need is Need.EXACT or not ready.works_lossy:
            ready.pin()
        for slot in ready.slots:
            slot.is_source = True
        reads = any(step.op.fixed for step in ready.steps)
        return cls(with_copies(ready) if reads else ready, base)

    @property
    def exact(self) -> bool:
        return self.ready.exact

    @property
    def depth(self) -> int:
        """Number of ops that run, one after the other, to make the tensor again."""
        return self.ready.depth

    @property
    def source(self) -> Slot:
        """The slot at the start of the recipe."""
        return self.ready.root

    def pin(self) -> None:
        """Makes the sources stay exact from now on."""
        self.ready.pin()

    def parts(self) -> Parts | None:
        """Returns a function that gives elements start .. start + n, flat [n].

        None where a recomputed tensor cannot be computed in parts.
        """
        return parts_of(self.ready, self._base)

    def restore(self, *, private: bool = False) -> Tensor:
        """Runs the recipe.

        The result is fresh memory, or memory that its caller may overwrite.
        """
        if torch.is_grad_enabled() or self._kernels != tuple(map(call, OF_OPS)):
            with torch.no_grad(), kernels_as(self._kernels):
                x = self.ready.make()
        else:
            x = self.ready.make()
        return as_base(x, self._base, self._dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
