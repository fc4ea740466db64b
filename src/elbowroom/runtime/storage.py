"""Weak access to a storage: whether it exists, whether it was changed, how large it is.

WeakStorage           does not keep it alive; its address is not reused while this exists
version_of, check_version, counter_of    its version counter, which a change in place moves
storage_nbytes        its size
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from elbowroom.errors import RestoreError


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

    def is_held_by_more(self, than: int) -> bool:
        """Returns whether more than `than` tensors share the storage. It is called very often."""
        return torch._C._storage_Use_Count(self.address) > than + _counted_always()

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
