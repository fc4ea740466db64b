"""Sources from which an op could be recomputed: a slot, a recipe, or an expected slot.

The op that computed a tensor is recorded as an `Origin` until the context ends (`storage.py`).
Where no op saves what a recipe needs, a small tensor is copied: a constant at once, another one
when it is first used (`LateCopy`).
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from elbowroom.codecs import BitMask
from elbowroom.codecs.base import memory_order
from elbowroom.errors import UnsupportedTensor
from elbowroom.kernels.fakes import has_values, would_wait
from elbowroom.runtime import modules
from elbowroom.runtime.handles.encode import EncodeHandle
from elbowroom.runtime.handles.rebuild import ExpectedSlot, Link, Op, Recipe, followed
from elbowroom.runtime.ledger import Entry, Ledger
from elbowroom.runtime.slot import CountedSlot, Geometry, Handle, KeepHandle, Slot
from elbowroom.runtime.storage import (
    Origin,
    Storages,
    WeakStorage,
    covering,
    storage_nbytes,
    untouchable,
    version_of,
)

if TYPE_CHECKING:
    from elbowroom.runtime.consumers import Call

Source: TypeAlias = Slot | Recipe | ExpectedSlot  # sources from which an op can be recomputed
EXPANDED = 8  # least size of a result relative to a copy of its source
# Multiplications of recomputed linear layers, as a share of forward's, which are a third of a
# step's; they are recomputed until the held bytes are smaller than plain autograd's by the second
# factor.
_AGAIN, _ENOUGH = 1 / 5, 1.75
_MAX_CONSTANTS = 8
_MIN_MASK_NBYTES, _SAMPLE = 1 << 14, 64
_MAX_SPARES = 4  # copies without a dependent recipe yet: queries, keys and values of edges


_Copies = dict[tuple[int, int], tuple[WeakStorage, Slot]]  # by address and version


class Sources(Storages):
    """The storages that one context has seen, as sources of recipes.

    ledger  counts copies of constants; None: there are to be none
    on_constant  is called with each constant that is requested, and the slot of its copy
    is_exact  no code adds errors, and no plan predicts when tensors are held: recipes may start
              from tensors that are saved later, and recompute linear layers
    codes_logits  attention's q and k may have codes, of which its softmax is made again
    products_again  linear layers may run again under a plan, too, if their input is made of none
    products  multiplications of linear layers and convolutions so far
    again     those of them that are recomputed in backward
    reordered copies that ops have made of their inputs, by what and where these were
    """

    def __init__(
        self, ledger: Ledger | None = None, *, is_exact: bool = False, products_again: bool = False
    ) -> None:
        super().__init__()
        self.is_exact, self.products_again = is_exact, products_again
        self.codes_logits = False
        self.reordered: dict[Any, tuple[WeakStorage, weakref.ref[Slot], Op]] = {}
        self.products = self.again = 0
        self.on_constant: Callable[[Slot, Tensor], None] | None = None
        self._ledger = ledger
        self._constants: _Copies = {}
        self._spares: _Copies = {}
        self._changes = 0

    # --- What an op could be run on again

    def source(self, call: "Call") -> "tuple[Source | None, Geometry]":
        """Returns the source for recomputing the call, and where in it the first argument lies.

        It is the argument as the call saved it, its recipe, a tensor that an earlier op saved, or
        one that a later op may save.
        """
        x = call.first
        seen = Geometry.of(x)
        held = self._held(x) if version_of(x) == call.version else None
        if held is not None and (held in call.saved or held.is_shared_now):
            return held, seen
        cast = call.cast if torch.is_autocast_enabled(x.device.type) else None
        if cast is not None and cast.dtype.is_floating_point and cast.base.shape == seen.shape:
            return cast, cast.base
        origin = self.origin(x, call.version)
        if origin is not None and origin.recipe is not None:
            return self._cheapest(origin.recipe, x, call.version), seen
        return (self.expected(x, call.version) if held is None else held), seen

    def operand(self, x: Tensor, call: "Call") -> "Source | None":
        """Returns the source of x: its slot, if this op saved it, else a recipe, or a slot.

        x is in its state after the op.
        """
        held, origin = self._held(x), self.origin(x)
        if held is not None and (held in call.saved or held.is_shared_now):
            return held
        if origin is None or origin.recipe is None:
            return held
        return self._cheapest(origin.recipe, x)

    def operand_or_spare(
        self, x: Tensor, call: "Call", out: Tensor, times: int = EXPANDED
    ) -> "Source | None":
        """Returns the source of x, or a copy of x if it cannot be rebuilt from held tensors.

        times: see `spare`
        """
        source = self.operand(x, call)
        if isinstance(source, Slot) or (source is not None and can_follow(source)):
            return source
        return self.spare(x, call.name, out, times) or source

    def is_held(self, y: Tensor) -> bool:
        """Returns whether y is held as a saved tensor, or is a parameter."""
        return type(y) is nn.Parameter or (not untouchable(y) and self._held(y) is not None)

    def expected(self, x: Tensor, version: int | None = None) -> ExpectedSlot | None:
        """Returns a link to what a later op may save of x, in contexts where that pays.

        version: of x as it was before an op that may have changed it in place
        """
        if not self.is_exact or type(x) is nn.Parameter or untouchable(x):
            return None
        if version is not None and version_of(x) != version:
            return None
        return self._link(x, version, None)

    def _held(self, x: Tensor) -> Slot | None:
        """The slot of x, if it holds a value."""
        slot = self.slot(x)
        return None if slot is None or slot.value is None else slot

    def _cheapest(self, recipe: Recipe, x: Tensor, version: int | None = None) -> "Source":
        """Returns x's recipe; if it is expensive or not ready, a saved tensor is preferred."""
        if not self.is_exact or not (recipe.op.products or not can_follow(recipe)):
            return recipe
        held = self._held(x) if version in (None, version_of(x)) else None
        return self._link(x, version, recipe) if held is None else held

    def _link(self, x: Tensor, version: int | None, recipe: Recipe | None) -> ExpectedSlot:
        """Returns a link to the slot that x may get; `recipe` is used if it gets none."""
        known = self.stored(x)
        key = version_of(x) if version is None else version, x.dtype
        return ExpectedSlot(known.slots, key, known.weak, recipe)

    def affords(self, products: int) -> bool:
        """Returns whether so many multiplications may be recomputed, by the bytes kept so far."""
        if self._ledger is None or self._ledger.times_less >= _ENOUGH:
            return False
        return self.again + products <= _AGAIN * self.products

    def changed(self, x: Tensor, made: Origin | None) -> None:
        """Forgets how a storage was computed, which a call has changed in place.

        The count of versions of x may be its own, as that of `y.data` is: y has still the old one.
        made: the origin that is the call's own
        """
        if untouchable(x):
            return
        at = x.untyped_storage()._cdata
        known = self._storages.get(at)
        if known is not None and known.origins:
            known.origins = {key: one for key, one in known.origins.items() if one is made}
        for key in [key for key in self.reordered if key[0] == at]:
            del self.reordered[key]
        self._changes -= 1  # copies stay for recipes that have them, under a version of none
        for copies in (self._constants, self._spares):
            moved = {(at, self._changes) if key[0] == at else key: copies[key] for key in copies}
            copies.clear()
            copies.update(moved)

    def constant(self, x: Tensor, op: str) -> Slot | None:
        """A slot with a copy of a tensor that no op saves, such as an additive mask.

        There is one for each version of a storage, of which x may be any view. The last ones are
        held, used or not: a tensor that is rebuilt with one may be saved a few ops later.
        """
        return self._copy(x, op, self._constants, _MAX_CONSTANTS)

    def spare(self, x: Tensor, op: str, out: Tensor, times: int = EXPANDED) -> Slot | None:
        """A slot for a copy of x, which no op saves; an op computed a much larger `out` from it.

        Examples are rows that are gathered many times, or a bias of two parts: the copy is no
        larger than a code of the result. x is copied when a recipe uses it, because most are never
        used. Only the last few are held until then.

        times: how many times larger than x its storage has to be, at the least
        """
        if untouchable(x) or storage_nbytes(x) * times > storage_nbytes(out):
            return None
        return self._copy(x, op, self._spares, _MAX_SPARES, out)

    def _copy(
        self, x: Tensor, op: str, held: _Copies, at_most: int, late_for: Tensor | None = None
    ) -> Slot | None:
        base = covering(x)
        if self._ledger is None or base is None or self.stored(x).is_lent:
            return None
        key = x.untyped_storage()._cdata, version_of(x)
        known = held.pop(key, None)
        if known is None or known[0].expired() or x.is_inference():  # which has no version
            while len(held) >= at_most:
                del held[next(iter(held))]
            entry = self._ledger.open(modules.current(), op, str(x.dtype).removeprefix("torch."), 0)
            slot: Slot
            if late_for is None or x.is_inference():
                slot = CountedSlot(base, entry)
                slot.hold(constant(base))
                entry.why = CONSTANT
            else:
                slot = LateCopy(x, base, entry, late_for)
            known = WeakStorage(x), slot
        held[key] = known
        if self.on_constant is not None:
            self.on_constant(known[1], x)
        return known[1]

    def clear(self) -> None:
        self._storages.clear()
        self._constants.clear()
        self._spares.clear()
        self.reordered.clear()
        self.on_constant = None


CONSTANT = "a constant: something is rebuilt with it"


def constant(base: Tensor) -> Handle:
    """Returns a handle with a copy of a dense tensor: one bit an element of a mask (0 and -inf).

    Its values are read, so not where the host would have to wait for them.
    """
    x = base.detach()
    if x.nbytes >= _MIN_MASK_NBYTES and has_values(x) and not would_wait(x):
        flat, _ = memory_order(x)
        if len(set(flat[:: len(flat) // _SAMPLE].tolist())) <= 2:  # before all of it is read
            with suppress(UnsupportedTensor):
                return EncodeHandle(BitMask().encode(x, 0), None)
    return KeepHandle(x.clone(), CONSTANT)


class LateCopy(CountedSlot):
    """Slot that copies a tensor when its value is first used, if the tensor is unchanged.

    A tensor that is gathered from x (the features of nodes, once for each edge) could be rebuilt
    from a copy of x. Usually no op saves x, and an immediate copy would be alive at the step's
    peak, beside the gathered tensor. So x is referred to weakly until a recipe uses it:

        x is there, unchanged         it is copied when it is asked for
        x dies before                 it is copied then, if what was gathered lives on
        x was changed in place        there is no copy, so nothing is rebuilt from it
    """

    def __init__(self, x: Tensor, base: Tensor, entry: Entry, out: Tensor) -> None:
        """base: a dense tensor that covers x's storage. out: the result computed from x."""
        super().__init__(base, entry)
        self._value: Handle | None = None
        self._storage: WeakStorage | None = WeakStorage(x)
        self._out = WeakStorage(out)
        self._version = x._version
        with torch._C.DisableTorchFunction():
            self._counter = x.detach()  # which shares the count of changes with x, and no memory
            self._counter.data = torch.empty(0, dtype=x.dtype, device=x.device)
        ours = weakref.ref(self)

        def died(_: object) -> None:
            slot = ours()
            if slot is not None:
                slot._copy(only_for_out=True)

        # If x is a view, its base exists as long as its memory; the view itself may be freed
        # immediately.
        self._owner = weakref.ref(x if x._base is None else x._base, died)

    @property
    def value(self) -> Handle | None:
        """The held copy, which is made now if it does not exist yet."""
        if self._value is None:
            self._copy()
        return self._value

    @value.setter
    def value(self, value: Handle | None) -> None:
        self._value, self._storage = value, None

    @property
    def is_pending(self) -> bool:
        """True if there is no copy yet, and there can be one."""
        return self._storage is not None and self._counter._version == self._version

    def _copy(self, *, only_for_out: bool = False) -> None:
        """Copies the tensor, the first time that it is called; else, it does nothing."""
        storage, self._storage = self._storage, None
        # A tensor is freed between two ops of the model, so this copy is not one of them.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            changed = self._counter._version != self._version
            if storage is None or changed or (only_for_out and self._out.expired()):
                return
            x = storage.tensor(self.dtype)
            if x is not None:
                self.hold(KeepHandle(x.as_strided(*self.base).clone(), CONSTANT))


def can_follow(link: Link) -> bool:
    """Returns whether a link has a target, without making a copy that can still be made."""
    if not waits_for_copy(link):
        return followed(link) is not None
    return not isinstance(link, Recipe) or all(map(can_follow, link.links))


def waits_for_copy(link: Link) -> bool:
    """Returns whether something that it leads to is copied only once that is asked for."""
    if isinstance(link, Recipe):
        return any(map(waits_for_copy, link.links))
    slot = link()
    return slot is not None and slot.is_pending
