"""Identity of saved tensors: which may be changed, and which were saved before.

1. Identity is (storage, version). A tensor is packed once by every op that saves it, often as a
   view: all of these find one `Slot`. Addresses are compared under a weak reference, so that an
   address is not reused after a tensor was freed.
2. Parameters stay unchanged: leaves that require grad, their views, and results of a graph that has
   no other leaves (autocast's bf16 copy of a weight, weight_norm's product, a pruned weight). The
   latter are memory, and are counted.
3. A slot stands for a dense tensor that covers its storage: x, the base that x is a view of, or the
   storage as a flat run. A small window onto a large storage is kept: what plain autograd would do
   too.
4. The op that computed a tensor, and whether the tensor has exact zeros, is recorded as an `Origin`
   until the context ends. This gives the sources from which an op could be recomputed: a slot, a
   recipe, or an expected slot.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from elbowroom.runtime import modules
from elbowroom.runtime.handles.rebuild import Expected, Op, Ready, Recipe, can_follow
from elbowroom.runtime.late_copy import CONSTANT, LateCopy
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.slot import CountedSlot, Geometry, KeepHandle, Slot
from elbowroom.runtime.storage import WeakStorage, storage_nbytes, version_of

if TYPE_CHECKING:
    from elbowroom.runtime.consumers import Call

Source: TypeAlias = Slot | Recipe | Expected  # sources from which an op can be recomputed
_EXPANDED = 8  # least size of a result relative to a copy of its source
_WINDOW = 4  # a view of less than a fourth of its storage is a window
# Multiplications of recomputed linear layers, as a share of forward's, which are a third of a
# step's; they are recomputed until the held bytes are smaller than plain autograd's by the second
# factor.
_AGAIN, _ENOUGH = 1 / 5, 1.75
_MOST_CONSTANTS = 8
_MOST_SPARES = 4  # copies without a dependent recipe yet: queries, keys and values of edges
_DEEPEST_PARAMETER_GRAPH = 16
_PICKS = ("Embedding", "Index", "Gather", "Take")  # their results for a parameter are data
_SCALES = ("Mul", "Mv", "Vdot", "Dot")  # pruning masks and spectral_norm's vectors enter here


_Copies = dict[tuple[int, int], tuple[WeakStorage, Slot]]  # by address and version

# Classes of tensors with plain memory, which may be changed: torch's own two, and in a dry run the
# class of stand-ins.
PLAIN: set[type] = {Tensor, nn.Parameter}
_taken_for_plain_lock = threading.Lock()


@dataclass(frozen=True)
class Origin:
    """The op that computed a tensor, whether exact zeros matter in it, and how to rebuild it."""

    op: str
    has_zeros: bool = False
    recipe: Recipe | None = None

    def ready(self) -> Ready | None:
        """Returns how the tensor could be rebuilt now."""
        return None if self.recipe is None else self.recipe.ready()

    def root(self) -> Slot | None:
        """Returns the slot that the chain of recipes begins with, if there is one."""
        source = None if self.recipe is None else self.recipe.source
        while isinstance(source, Recipe):
            source = source.source
        return None if source is None else source()


class Stored:
    """Slots and origins of one live storage, by version and dtype.

    A storage may be seen as another dtype (`view_as_real`), which has an origin of its own.
    """

    __slots__ = ("origins", "slots", "weak")

    def __init__(self, x: Tensor) -> None:
        self.weak = WeakStorage(x)
        self.slots: dict[tuple[int, torch.dtype], weakref.ref[Slot]] = {}
        self.origins: dict[tuple[int, torch.dtype], Origin] = {}


class Identity:
    """The storages that one context has seen.

    ledger  counts copies of constants; None: there are to be none
    told    is called with each constant that is requested, and the slot of its copy
    is_exact  no code adds errors, and no plan predicts when tensors are held: recipes may start
              from tensors that are saved later, and recompute linear layers
    products  multiplications of linear layers and convolutions so far
    again     those of them that are recomputed in backward
    reordered copies that ops have made of their inputs, by what and where these were
    """

    def __init__(self, ledger: Ledger | None = None, *, is_exact: bool = False) -> None:
        self.is_exact = is_exact
        self.reordered: dict[Any, tuple[WeakStorage, weakref.ref[Slot], Op]] = {}
        self.products = self.again = 0
        self.told: Callable[[Slot, Tensor], None] | None = None
        self._ledger = ledger
        self._storages: dict[int, Stored] = {}
        self._constants: _Copies = {}
        self._spares: _Copies = {}
        self._purge_at = 256
        self._changes = 0

    def slot(self, x: Tensor) -> Slot | None:
        """The slot of x's storage at its version, if an op has saved it already."""
        known = self._storages.get(x.untyped_storage()._cdata)
        found = None if known is None else known.slots.get((version_of(x), x.dtype))
        return None if found is None else found()

    def slots_of(self, *values: Any) -> list[Slot]:
        """The slots of all tensors in these arguments."""
        tensors = filter(is_touchable, tensors_in(values))
        return [slot for x in tensors if (slot := self.slot(x)) is not None]

    def stored(self, x: Tensor) -> Stored:
        """Returns the record of x's storage, which is created if there is none."""
        at = x.untyped_storage()._cdata
        # A weakly held address is never reused: the storage at this address is still the same one.
        known = self._storages.get(at)
        if known is None:
            if len(self._storages) >= self._purge_at:
                self._purge()
            known = self._storages[at] = Stored(x)
        return known

    def origin(self, x: Tensor, version: int | None = None) -> Origin | None:
        """Returns the origin of x's storage at this version (default: x's own)."""
        known = self._storages.get(x.untyped_storage()._cdata)
        if known is None:
            return None
        return known.origins.get((version_of(x) if version is None else version, x.dtype))

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

    def operand_or_spare(self, x: Tensor, call: "Call", out: Tensor) -> "Source | None":
        """Returns the source of x, or a copy of x if it cannot be rebuilt from held tensors."""
        source = self.operand(x, call)
        if isinstance(source, Slot) or (source is not None and can_follow(source)):
            return source
        return self.spare(x, call.name, out) or source

    def is_held(self, y: Tensor) -> bool:
        """Returns whether y is held as a saved tensor, or is a parameter."""
        return type(y) is nn.Parameter or (not untouchable(y) and self._held(y) is not None)

    def expected(self, x: Tensor, version: int | None = None) -> Expected | None:
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

    def _link(self, x: Tensor, version: int | None, recipe: Recipe | None) -> Expected:
        """Returns a link to the slot that x may get; `recipe` is used if it gets none."""
        known = self.stored(x)
        key = version_of(x) if version is None else version, x.dtype
        return Expected(known.slots, key, known.weak, recipe)

    def affords(self, products: int) -> bool:
        """Returns whether so many multiplications may be recomputed, by the bytes kept so far."""
        if self._ledger is None or self._ledger.times_less >= _ENOUGH:
            return False
        return self.again + products <= _AGAIN * self.products

    def made(self, x: Tensor, origin: Origin) -> None:
        """Records the origin of x."""
        self.stored(x).origins[version_of(x), x.dtype] = origin

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

    def slots(self) -> list[Slot]:
        """All slots that are alive."""
        found = [ref() for known in self._storages.values() for ref in known.slots.values()]
        return [slot for slot in found if slot is not None]

    def constant(self, x: Tensor, op: str) -> Slot | None:
        """A slot with a copy of a tensor that no op saves, such as an additive mask.

        There is one for each version of a storage, of which x may be any view. The last ones are
        held, used or not: a tensor that is rebuilt with one may be saved a few ops later.
        """
        return self._copy(x, op, self._constants, _MOST_CONSTANTS)

    def spare(self, x: Tensor, op: str, out: Tensor) -> Slot | None:
        """A slot for a copy of x, which no op saves; an op computed a much larger `out` from it.

        Examples are rows that are gathered many times, or a bias of two parts: the copy is no
        larger than a code of the result. x is copied when a recipe uses it, because most are never
        used. Only the last few are held until then.
        """
        if untouchable(x) or storage_nbytes(x) * _EXPANDED > storage_nbytes(out):
            return None
        return self._copy(x, op, self._spares, _MOST_SPARES, out)

    def _copy(
        self, x: Tensor, op: str, held: _Copies, most: int, late_for: Tensor | None = None
    ) -> Slot | None:
        base = covering(x)
        if self._ledger is None or base is None:
            return None
        key = x.untyped_storage()._cdata, version_of(x)
        known = held.pop(key, None)
        if known is None or known[0].expired() or x.is_inference():  # which has no version
            while len(held) >= most:
                del held[next(iter(held))]
            entry = self._ledger.open(modules.current(), op, str(x.dtype).removeprefix("torch."), 0)
            slot: Slot
            if late_for is None or x.is_inference():
                slot = CountedSlot(base, entry)
                slot.hold(KeepHandle(base.detach().clone(), CONSTANT))
            else:
                slot = LateCopy(x, base, entry, late_for)
            known = WeakStorage(x), slot
        held[key] = known
        if self.told is not None:
            self.told(known[1], x)
        return known[1]

    def clear(self) -> None:
        self._storages.clear()
        self._constants.clear()
        self._spares.clear()
        self.reordered.clear()
        self.told = None

    def _purge(self) -> None:
        """Forgets freed storages now and then: a context around a whole training must not grow.

        It keeps those for which a code or a recipe is still held.
        """
        self._storages = {
            at: known
            for at, known in self._storages.items()
            if not known.weak.expired() or any(ref() is not None for ref in known.slots.values())
        }
        self._purge_at = max(256, 2 * len(self._storages))


def untouchable(x: Tensor) -> str:
    """Returns why x must be kept as it is, or "" if it is a plain dense tensor."""
    if type(x) not in PLAIN:
        return f"tensor subclass {type(x).__name__}"
    keys = torch._C._dispatch_keys(x).raw_repr()  # these decide: test once for each set
    why = _untouchable_keys.get(keys)
    if why is None:
        why = _untouchable_keys[keys] = _why_untouchable(x)
    return why


def is_touchable(x: Any) -> bool:
    """Returns whether x is a plain dense tensor."""
    return type(x) in PLAIN and not untouchable(x)


_untouchable_keys: dict[int, str] = {}


def _why_untouchable(x: Tensor) -> str:
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        return f"layout {str(x.layout).removeprefix('torch.')}"
    if x.device.type not in ("cpu", "cuda"):
        return f"device {x.device.type}"
    if x.is_conj() or x.is_neg():
        return "a lazy conjugate or negative view"
    if x._is_zerotensor():
        return "zeros without memory"
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x):
        return "inside a torch.func transform"
    return ""


def is_parameter(x: Tensor) -> bool:
    """Returns whether x is a parameter or another trainable leaf, or a view of one."""
    base = x._base
    owner = x if base is None else base
    kind = type(owner)
    if kind is nn.Parameter or (kind is not Tensor and isinstance(owner, nn.Parameter)):
        return True
    return owner.requires_grad and owner.grad_fn is None


def is_made_of_parameters(x: Tensor) -> bool:
    """Returns whether every path of x's graph ends in a trainable parameter.

    An edge to nowhere is data (a convolution of the input has one), except where it may be a
    constant that scales a parameter of x's size: a pruning mask, or the vectors of spectral_norm.
    """
    if x.grad_fn is None:
        return False
    waiting, seen, scaled, sizes = [x.grad_fn], 0, False, set()
    while waiting:
        if seen + len(waiting) > _DEEPEST_PARAMETER_GRAPH:
            return False
        node = waiting.pop()
        seen += 1
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            leaf = node.variable  # type: ignore[attr-defined]
            if not isinstance(leaf, nn.Parameter):
                return False  # an input that wants a gradient
            sizes.add(leaf.numel())
            continue
        edges = [below for below, _ in node.next_functions if below is not None]
        if not edges or name.startswith(_PICKS):
            return False
        if len(edges) < len(node.next_functions):
            if not name.startswith(_SCALES):
                return False
            scaled = True
        waiting += reversed(edges)  # data first: most graphs soon turn out to be too large
    return not scaled or x.numel() in sizes


def dense_base(x: Tensor) -> Tensor | None:
    """A dense tensor that covers x's storage; None if x is a window onto a much larger storage."""
    candidate = covering(x)
    if candidate is not None:
        return candidate
    nbytes = storage_nbytes(x)
    n = nbytes // x.element_size()
    if n * x.element_size() != nbytes or x.numel() * _WINDOW < n:
        return None
    return x.detach().as_strided((n,), (1,), 0)


def clone_with_storage(x: Tensor) -> Tensor:
    """Returns a clone of x that lies, as x does, in a clone of its whole storage.

    Views that start elsewhere in the storage can be restored from it, too.
    """
    n = storage_nbytes(x) // x.element_size()
    return x.as_strided((n,), (1,), 0).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def is_dense(x: Tensor) -> bool:
    """Returns whether x's elements fill a run of memory, each place once, in whatever order."""
    return x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x)


def covering(x: Tensor) -> Tensor | None:
    """Returns x, or what it is a view of, if that is dense and covers the storage.

    Where neither does, x's version does not cover some parts of the storage: the pieces of
    `unsafe_chunk` (a GRU's gates) share a storage, and each counts its own changes.
    """
    base, nbytes = x._base, storage_nbytes(x)
    if x.nbytes == nbytes and is_dense(x):
        return x
    if base is not None and base.dtype is x.dtype and base.nbytes == nbytes and is_dense(base):
        return base
    return None


@contextmanager
def taken_for_plain(kind: type[Tensor]) -> Iterator[None]:
    """Treats tensors of this class as plain ones inside this context; one thread at a time."""
    with _taken_for_plain_lock:
        PLAIN.add(kind)
        try:
            yield
        finally:
            PLAIN.discard(kind)
