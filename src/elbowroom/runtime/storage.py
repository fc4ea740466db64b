"""Storages of saved tensors: which may be changed, what they were computed by, and who saved them.

1. Identity is (storage, version). A tensor is packed once by every op that saves it, often as a
   view: all of these find one `Slot`. Addresses are compared under a weak reference, so that an
   address is not reused after a tensor was freed.
2. Parameters stay unchanged: leaves that require grad, their views, and results of a graph that has
   no other leaves (autocast's bf16 copy of a weight, weight_norm's product, a pruned weight). The
   latter are memory, and are counted.
3. A slot stands for a dense tensor that covers its storage: x, the base that x is a view of, or the
   storage as a flat run. A small window onto a large storage is kept: what plain autograd would do
   too.

WeakStorage             does not keep a storage alive; its address is not reused while this exists
version_of, counter_of  its version counter, which a change in place moves
untouchable, ...        whether a tensor may be changed, and what it is made of
note_changing, ...      parameters that are known to change before backward reads them
Storages                the storages that one context has seen, with their slots and origins
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elbowroom.errors import RestoreError

if TYPE_CHECKING:
    from elbowroom.runtime.fingerprints import Fingerprints
    from elbowroom.runtime.handles.rebuild import Ready, Recipe
    from elbowroom.runtime.slot import Slot

_WINDOW = 4  # a view of less than a fourth of its storage is a window
_DEEPEST_PARAMETER_GRAPH = 16
_PICKS = ("Embedding", "Index", "Gather", "Take")  # their results for a parameter are data
_SCALES = ("Mul", "Mv", "Vdot", "Dot")  # pruning masks and spectral_norm's vectors enter here

# Classes of tensors with plain memory, which may be changed: torch's own two, and in a dry run the
# class of stand-ins.
PLAIN: set[type] = {Tensor, nn.Parameter}
_taken_for_plain_lock = threading.Lock()


class WeakStorage:
    """Weak reference to the storage under a tensor, which has `address` as its `_cdata`."""

    __slots__ = ("address",)

    def __init__(self, x: Tensor) -> None:
        self.address: Any = x.untyped_storage()._weak_ref()  # typed otherwise, but an int

    def __del__(self, free: Callable[[Any], None] = torch.UntypedStorage._free_weak_ref) -> None:
        free(self.address)  # by a default: at the end of the process no module is left

    def expired(self) -> bool:
        return bool(torch.UntypedStorage._expired(self.address))

    def holders(self) -> int:
        """Returns the number of tensors that share the storage, views and detached ones counted."""
        return 0 if self.expired() else self._count() - _counted_always()

    def is_held_by_more(
        self, than: int, count: Callable[[Any], int] = torch._C._storage_Use_Count
    ) -> bool:
        """Returns whether more than `than` tensors share the storage. It is called very often."""
        return count(self.address) > than + _counted_always()

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self.address)

    def tensor(self, dtype: torch.dtype) -> Tensor | None:
        """An empty tensor of `dtype` on the storage (use `as_strided`); None if it is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.address)
        if storage is None:
            return None
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


@cache
def _counted_always() -> int:
    """Returns the number of owners besides tensors that torch counts: in 2.13, a Python object.

    It is the storage's.
    """
    x = torch.empty(1)
    return WeakStorage(x)._count() - 1


_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")  # which most share


def counter_of(x: Tensor) -> Tensor:
    """A tensor without memory that shares x's version counter.

    It shows in-place changes, and keeps nothing alive.
    """
    if x.dtype is torch.float32 and x.is_cpu and not torch._C._len_torch_dispatch_stack():
        return counted(x, _NOTHING)
    return counted(x, torch.empty(0, dtype=x.dtype, device=x.device))


def counted(counter: Tensor, x: Tensor) -> Tensor:
    """Returns x with the version counter of another tensor.

    So a Python backward that overwrites x is detected.
    """
    given = counter.detach()
    given.data = x
    return given


def check_version(x: Tensor, version: int) -> None:
    """Raises RestoreError if x was changed in place since `version`."""
    try:
        now = x._version
    except RuntimeError:  # as in `version_of`, which would be one more call
        now = 0
    if now != version:
        raise changed_in_place(tuple(x.shape), x.dtype, version, now)


def check_parameters(
    fixed: tuple[Tensor, ...], versions: tuple[int, ...], fingerprints: Fingerprints | None = None
) -> None:
    """Raises RestoreError if a parameter was changed since, or its memory freed."""
    for tensor, version in zip(fixed, versions, strict=True):
        if tensor.is_inference() or tensor._version != version:
            if version_of(tensor) != version:
                note_changing(tensor)
            check_version(tensor, version)
        if tensor.untyped_storage().nbytes() == 0 < tensor.numel():
            raise RestoreError(
                f"rebuilding needs a parameter of shape {tuple(tensor.shape)} whose memory was "
                "freed after forward (FSDP does so); use er.saving(..., rebuild=False)."
            )
    if fingerprints is not None:
        fingerprints.check(fixed)


def changed_in_place(
    shape: tuple[int, ...], dtype: torch.dtype, version: int, now: int
) -> RestoreError:
    """The error of a tensor that was saved at `version`, and is at `now`."""
    return RestoreError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {str(dtype).removeprefix('torch.')} {shape} was saved at "
        f"version {version} and is at version {now} now. Change a clone of it, or call "
        "backward() first."
    )


def version_of(x: Tensor) -> int:
    """The version counter; tensors made in inference mode have none, and never change."""
    try:
        return x._version
    except RuntimeError:  # an inference tensor: testing first would cost more than everything else
        return 0


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """The version counters of all of them, as `version_of` gives them."""
    try:
        return [x._version for x in tensors]
    except RuntimeError:
        return [version_of(x) for x in tensors]


def storage_nbytes(x: Tensor) -> int:
    """Bytes of the whole storage that x keeps alive.

    0 for a tensor that has none (sparse, wrapper subclass).
    """
    try:
        return x.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0


# --- What may be changed


def untouchable(x: Tensor) -> str:
    """Returns why x must be kept as it is, or "" if it is a plain dense tensor."""
    if type(x) not in PLAIN:
        return f"tensor subclass {type(x).__name__}"
    keys = _dispatch_keys(x).raw_repr()  # these decide: test once for each set
    why = _untouchable_keys.get(keys)
    if why is None:
        why = _untouchable_keys[keys] = _why_untouchable(x)
    return why


def is_touchable(x: Any) -> bool:
    """Returns whether x is a plain dense tensor."""
    return type(x) in PLAIN and not untouchable(x)


_dispatch_keys = torch._C._dispatch_keys  # it is asked many times for each examined op


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


# --- Parameters that change between the op that reads them and backward (`changing.py`)

_SMALL_PARAMETER = 1 << 16  # bytes
_changing: dict[int, WeakStorage] = {}
_changing_of: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
_changes = count(1)
_last_change = 0


def changes() -> int:
    """Returns how many parameters were found to change so far."""
    return _last_change


def note_change() -> None:
    """Notes that what was decided before does not know of a parameter that changes."""
    global _last_change
    _last_change = next(_changes)


def note_changing(x: Tensor) -> None:
    """Notes that the parameter that lies where x does is changed before backward reads it."""
    at = x.untyped_storage()._cdata
    if at not in _changing:
        _changing[at] = WeakStorage(x)
        note_change()


def changing_of(module: nn.Module | None) -> frozenset[int]:
    """Returns the indices of a module's parameters that are known to change before it runs again.

    None: the module is gone.
    """
    return frozenset() if module is None else _changing_of.get(module, frozenset())


def note_changing_of(module: nn.Module | None, i: int) -> None:
    """Notes that a parameter of a module is changed before the module runs again. i: its index."""
    known = changing_of(module)
    if module is not None and i not in known:
        _changing_of[module] = known | {i}
        note_change()


def is_changing(x: Tensor) -> bool:
    """Returns whether the parameter that lies where x does is known to change."""
    return bool(_changing) and x.untyped_storage()._cdata in _changing


def is_small(p: Tensor) -> bool:
    """Returns whether a parameter is copied before it is known to change: a bias, or a scale.

    Backward reads most others, so a change would be an error of plain autograd, too.
    """
    return p.dim() <= 1 and p.nbytes <= _SMALL_PARAMETER


# --- What a context has seen


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
        return None if self.recipe is None else self.recipe.root()


class Stored:
    """Slots and origins of one live storage, by version and dtype.

    A storage may be seen as another dtype (`view_as_real`), which has an origin of its own.

    is_lent  its memory was handed out (to NumPy, as `x.data`): no version shows all its changes
    """

    __slots__ = ("is_lent", "origins", "slots", "weak")

    def __init__(self, x: Tensor) -> None:
        self.weak, self.is_lent = WeakStorage(x), False
        self.slots: dict[tuple[int, torch.dtype], weakref.ref[Slot]] = {}
        self.origins: dict[tuple[int, torch.dtype], Origin] = {}


class Storages:
    """The storages that one context has seen."""

    def __init__(self) -> None:
        self._storages: dict[int, Stored] = {}
        self._purge_at = 256

    def slot(self, x: Tensor) -> Slot | None:
        """The slot of x's storage at its version, if an op has saved it already."""
        known = self._storages.get(x.untyped_storage()._cdata)
        found = None if known is None else known.slots.get((version_of(x), x.dtype))
        return None if found is None else found()

    def slots_of(self, tensors: Iterable[Tensor]) -> list[Slot]:
        """The slots of all of these."""
        touchable = filter(is_touchable, tensors)
        return [slot for x in touchable if (slot := self.slot(x)) is not None]

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
        if known is None or known.is_lent:  # which may have been changed since
            return None
        return known.origins.get((version_of(x) if version is None else version, x.dtype))

    def made(self, x: Tensor, origin: Origin) -> None:
        """Records the origin of x."""
        self.stored(x).origins[version_of(x), x.dtype] = origin

    def lend(self, x: Tensor) -> None:
        """Notes that the memory of x is handed out: nothing is rebuilt from it from now on."""
        known = self.stored(x)
        known.is_lent = True
        known.origins.clear()
        for ref in known.slots.values():
            if (slot := ref()) is not None:
                slot.is_lent = True

    def slots(self) -> list[Slot]:
        """All slots that are alive."""
        found = [ref() for known in self._storages.values() for ref in known.slots.values()]
        return [slot for slot in found if slot is not None]

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
