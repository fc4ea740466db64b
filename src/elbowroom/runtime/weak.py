"""A reference to a storage that does not keep it alive.

The storage's address is not reused while the reference exists.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class WeakStorage:
    """Weak reference to the storage under a tensor."""

    __slots__ = ("_ref",)

    def __init__(self, x: Tensor) -> None:
        self._ref: Any = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]

    def expired(self) -> bool:
        return bool(self._ref.expired())

    def holders(self) -> int:
        """How many tensors share it, views and detached ones counted."""
        return 0 if self.expired() else self._count() - _counted_always()

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self._ref.cdata)

    def tensor(self, dtype: torch.dtype) -> Tensor | None:
        """An empty tensor of `dtype` on the storage (use `as_strided`); None if it is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


@cache
def _counted_always() -> int:
    """What this version of torch counts besides tensors: in 2.13, the storage's Python object."""
    x = torch.empty(1)
    return WeakStorage(x)._count() - 1
