"""Rebuild: nothing is held but the way back. The recipe holds the handles that it starts at."""

import torch
from torch import Tensor

from elbowroom.errors import RestoreError
from elbowroom.runtime.recipes import Ready


class RebuildHandle:
    """Holds a ready recipe, and the geometry of what it must make."""

    __slots__ = ("_device_type", "_dtype", "_ready", "_shape", "_stride")

    label = "rebuild"
    nbytes = 0

    def __init__(self, ready: Ready, base: Tensor) -> None:
        self._ready = ready
        self._device_type = base.device.type
        self._shape, self._stride, self._dtype = base.shape, base.stride(), base.dtype

    @property
    def exact(self) -> bool:
        return self._ready.exact

    def restore(self, *, private: bool = False) -> Tensor:
        """Run the recipe. What it gives is always fresh memory, or memory that its caller may overwrite."""
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False):
            x = self._ready.make()
        if x.dtype is not self._dtype or x.shape != self._shape:
            raise RestoreError(
                f"rebuilding gave {x.dtype} {tuple(x.shape)} where {self._dtype} {tuple(self._shape)} was saved. "
                "Please report it; er.saving(..., rebuild=False) avoids it."
            )
        if x.stride() != self._stride:
            x = torch.empty_strided(self._shape, self._stride, dtype=x.dtype, device=x.device).copy_(x)
        return x
