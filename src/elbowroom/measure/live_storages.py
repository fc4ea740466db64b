"""Finds what is held before a step: all tensors that Python knows of, and when they die in it.

The profiler sees what a step takes, and not what was there before: weights, states, data.
"""

import gc
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from elbowroom.runtime.storage import WeakStorage, storage_nbytes

_SMALL = 16384  # bytes: of a batch norm's statistics a network may have thousands


class LiveStorages:
    """The storages under some tensors, for as long as they live.

    Storages of parameters live as long as their model, so they are not checked again. Small ones
    make no difference, and are not checked either.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found: dict[int, tuple[WeakStorage, int]] = {}
        staying: dict[int, int] = {}
        for x in tensors:
            nbytes = storage_nbytes(x) if x.layout is torch.strided and is_real(x) else 0
            if nbytes and (isinstance(x, nn.Parameter) or nbytes < _SMALL):
                staying[x.untyped_storage()._cdata] = nbytes
            elif nbytes:
                found.setdefault(x.untyped_storage()._cdata, (WeakStorage(x), nbytes))
        self._alive = [one for address, one in found.items() if address not in staying]
        self._staying_nbytes = sum(staying.values())

    def nbytes(self) -> int:
        """Bytes of those that are still alive."""
        if not self._alive:
            return self._staying_nbytes
        self._alive = [(weak, nbytes) for weak, nbytes in self._alive if not weak.expired()]
        return self._staying_nbytes + sum([nbytes for _, nbytes in self._alive])


def is_real(x: Tensor) -> bool:
    """Returns whether it has memory, which a compiler's fake tensor has not."""
    try:
        return x.untyped_storage().device.type != "meta"
    except (NotImplementedError, RuntimeError):
        return False


def all_tensors(device_type: str) -> list[Tensor]:
    """Every tensor on this type of device that Python knows of.

    A subclass is not asked by way of `__torch_function__`, which may refuse.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [
            one
            for one in gc.get_objects()
            if issubclass(type(one), Tensor) and one.device.type == device_type
        ]
