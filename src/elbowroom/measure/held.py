"""What is held before a step: every tensor that Python knows of, and when it dies in the step.

The profiler sees what a step takes, and not what was there before: weights, states, data.
"""

import gc

import torch
from torch import Tensor

from elbowroom.runtime.handles.keep import storage_nbytes
from elbowroom.runtime.weak import WeakStorage


class Held:
    """The storages under all tensors that are alive when it is made, on one type of device."""

    def __init__(self, device_type: str) -> None:
        found: dict[int, tuple[WeakStorage, int]] = {}
        for one in gc.get_objects():
            if issubclass(type(one), Tensor) and one.device.type == device_type:
                nbytes = storage_nbytes(one) if one.layout is torch.strided else 0
                if nbytes:
                    found.setdefault(one.untyped_storage()._cdata, (WeakStorage(one), nbytes))
        self._alive = list(found.values())

    def nbytes(self) -> int:
        """Bytes of those that are still alive."""
        self._alive = [(weak, nbytes) for weak, nbytes in self._alive if not weak.expired()]
        return sum(nbytes for _, nbytes in self._alive)
