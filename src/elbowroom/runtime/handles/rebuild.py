"""Rebuild: nothing is held but the way back. The recipe holds the handles that it starts at."""

from math import prod
from typing import Self

import torch
from torch import Tensor

from elbowroom.codecs import Affine
from elbowroom.errors import RestoreError
from elbowroom.kernels import ops
from elbowroom.plan import Need
from elbowroom.runtime.handles.encode import EncodeHandle, Parts
from elbowroom.runtime.normal import flat_of
from elbowroom.runtime.recipes import Ready
from elbowroom.runtime.slot import Geometry, Slot


class RebuildHandle:
    """Holds a ready recipe, and the geometry of `base`, a dense view of all the recipe makes."""

    __slots__ = ("_base", "_dtype", "ready")

    label = "rebuild"
    nbytes = 0

    def __init__(self, ready: Ready, base: Tensor) -> None:
        self.ready = ready
        self._base, self._dtype = Geometry.of(base), base.dtype

    @classmethod
    def of(cls, ready: Ready, base: Tensor, need: Need) -> Self:
        """Hold a recipe in place of base; what it reads stays exact if it must."""
        if need is Need.EXACT or not ready.works_lossy:
            ready.pin()
        for slot in ready.slots:
            slot.is_source = True
        return cls(ready, base)

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

        None where some of what is made again cannot be made in parts.
        """
        mapped = self.ready.mapped_source() if self.ready.made == self._base else None
        if mapped is None:
            return None
        source, affine, bits = mapped
        if isinstance(source.value, EncodeHandle) and source.value.is_needed():
            return source.value.parts(affine, bits)
        if affine.scale.dim() > 1 or not _repeats(affine, self._base):
            return None
        flat = flat_of(source.restore_value())

        def part(start: int, n: int) -> Tensor:
            """Returns elements start ..

            start + n. They begin with a sample: with the first channel, and with a whole byte of
            bits.
            """
            out = torch.empty(n, dtype=flat.dtype, device=flat.device)
            own = None if bits is None else bits[start // 8 : -(-(start + n) // 8)]
            ops.affine(flat[start : start + n], *affine, own, out)
            return out

        return part

    def restore(self, *, private: bool = False) -> Tensor:
        """Runs the recipe.

        It always gives fresh memory, or memory that its caller may overwrite.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                x = self.ready.make()
        else:
            x = self.ready.make()
        if x.dtype is not self._dtype:
            raise RestoreError(
                f"rebuilding gave {_name(x.dtype)} where {_name(self._dtype)} was saved. "
                "Please report it; er.saving(..., rebuild=False) avoids it."
            )
        base = self._base
        return x.as_strided(base.shape, base.stride, base.offset + x.storage_offset())


def _repeats(affine: Affine, base: Geometry) -> bool:
    """Returns whether each sample begins with the first channel.

    The channels of a group norm are counted per sample.
    """
    each = prod(base.shape[1:])
    return each % (len(affine.scale) * affine.inner) == 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
