"""Memory for a payload whose size depends on values, where the host would wait to read that size.

On a GPU the host is ahead of the device, up to a whole step. When it gives memory for a code, the
size is not known, and nothing that is learned later can help: the tensor itself is gone by then. So
what holds every value without waiting has room for the largest possible payload. Of that room
only what such tensors have needed lately, and a little more, is memory of the device (`capacity`).
The rest, the spill, is pinned host memory that the kernels can write to, and hardly ever do: no bit
is lost, and none is another one (kernels/reference/spill.py).

Other ways were weighed. To hold the tensor until its size is known would hold all tensors of a
step, for the host is ahead. To code the rest with fewer levels, or not at all, would break the
error that a codec promises. Memory of the device for the largest payload needs no spill, and holds
up to twice as much; it is what is left where the system gives no pinned memory.

A codec does not know where memory comes from: the runtime gives it a `Room`
(`runtime/capacities.py`). Without one, and on a CPU, where nothing waits, payloads are exact.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Spill(Protocol):
    """Part of a payload that does not fit; its memory is free again when this dies."""

    @property
    def memory(self) -> Tensor:
        """Bytes that the device can reach."""
        ...


class Space(NamedTuple):
    """Memory for one payload: bytes, what does not fit there, and [1] int64 for its size."""

    payload: Tensor
    spill: Spill
    used: Tensor


class Room(Protocol):
    """Gives memory to the payloads of one site."""

    def space(self, most_nbytes: int, tile_nbytes: int, device: torch.device) -> Space | None:
        """Memory for a payload; None: no payload of this site has been seen yet.

        most_nbytes: what it never exceeds; tile_nbytes: what the payload of a tile never does
        """
        ...

    def first(self, payload: Tensor, most_nbytes: int) -> tuple[Tensor, Spill]:
        """The first payload of this site, whose size was waited for, in memory as for the next."""
        ...
