"""A reference to a storage that does not keep it alive.

The storage's address is not reused while the reference exists.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


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
