"""Host memory for offloaded bytes: a few large pinned pieces, cut into parts.

Pinning is slow (about 3 ms a call) and rounds up to powers of two, so it is done in slabs, kept and
used again. Pinned memory is scarce: beyond its budget, or if the system has no more, slabs are
pageable (slower, and copies no longer overlap with computation), and this is logged once.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elbowroom.runtime.tiers.extents import PAGE, Extents
from elbowroom.units import show_nbytes

_SLAB_NBYTES = 64 << 20


@dataclass(eq=False)
class _Slab:
    memory: Tensor
    parts: Extents
    pinned: bool


@dataclass(frozen=True, eq=False)
class SlabPart:
    """Some bytes of a slab."""

    flat: Tensor
    slab: _Slab
    offset: int


class Slabs:
    """Slabs of host memory, for one thread at a time: the tier has a lock.

    pinned_nbytes  the budget for pinned memory
    pin            makes pinned bytes; raises RuntimeError if there are none
    slab           the smallest slab, in bytes
    """

    def __init__(
        self,
        pinned_nbytes: int,
        pin: Callable[[int], Tensor] | None = None,
        slab: int = _SLAB_NBYTES,
    ) -> None:
        self.budget_nbytes = pinned_nbytes
        self._pin = _pinned if pin is None else pin
        self._slab_nbytes = slab
        self._slabs: list[_Slab] = []
        self._untold: str | None = ""

    @property
    def pinned_nbytes(self) -> int:
        return sum(slab.memory.numel() for slab in self._slabs if slab.pinned)

    @property
    def nbytes(self) -> int:
        return sum(slab.memory.numel() for slab in self._slabs)

    def take(self, nbytes: int) -> SlabPart:
        """Returns a part of this size. The free one that is pinned comes first."""
        part = self._free_part(nbytes, pinned=True) or self._free_part(nbytes)
        part = part or self.take_pinned(nbytes)
        if part is not None:
            return part
        size = self._size(nbytes)
        memory = torch.empty(size, dtype=torch.uint8)
        self._slabs.append(_Slab(memory, Extents(size), pinned=False))
        return self.take(nbytes)

    def take_pinned(self, nbytes: int) -> SlabPart | None:
        """A part of this size that is pinned; None: there is no room for it."""
        part = self._free_part(nbytes, pinned=True)
        if part is not None:
            return part
        size = self._size(nbytes)
        memory = self._pinned_within_budget(size)
        if memory is None:
            return None
        self._slabs.append(_Slab(memory, Extents(size), pinned=True))
        return self._free_part(nbytes, pinned=True)

    def give_back(self, part: SlabPart) -> None:
        """Frees a part. A pageable slab that is empty goes back to the system."""
        part.slab.parts.give_back(part.offset, part.flat.numel())
        if not part.slab.pinned and not part.slab.parts.end:
            self._slabs.remove(part.slab)

    def say_trouble(self) -> None:
        """Warn once if pinned memory did not suffice."""
        if self._untold:
            untold, self._untold = self._untold, None
            warnings.warn(untold, stacklevel=2)

    def _free_part(self, nbytes: int, *, pinned: bool = False) -> SlabPart | None:
        for slab in self._slabs:
            offset = slab.parts.take(nbytes) if slab.pinned or not pinned else None
            if offset is not None:
                return SlabPart(slab.memory[offset : offset + nbytes], slab, offset)
        return None

    def _size(self, nbytes: int) -> int:
        whole = 1 << (max(nbytes, PAGE) - 1).bit_length()  # torch rounds pinned memory up to it
        return max(self._slab_nbytes, whole)

    def _pinned_within_budget(self, size: int) -> Tensor | None:
        why = f"its budget of {show_nbytes(self.budget_nbytes)} is used up"
        if self.pinned_nbytes + size <= self.budget_nbytes:
            try:
                return self._pin(size)
            except RuntimeError as error:
                why = str(error).splitlines()[0]
                self.budget_nbytes = self.pinned_nbytes  # the system's limit: not tried again
        if self._untold == "":
            self._untold = (
                f"offload: no more pinned memory after {show_nbytes(self.pinned_nbytes)} ({why}). "
                "What goes to the host from now on is copied slower. "
                "er.saving('offload', tier='file') needs little of it."
            )
        return None


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
