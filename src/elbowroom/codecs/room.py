"""Memory for payloads whose size depends on values, so that the host need not wait for that size.

On a GPU the host runs ahead of the device, by up to a whole step. When it allocates memory for a
code, the size of the code is not known yet; when it is, the tensor itself has long been freed. So
there must be memory for the largest possible payload. Only a part of it is memory of the device: as
much as payloads of this site have needed lately, and a little more (`capacity`). The rest, the
spill, is pinned host memory that the kernels can write to, and hardly ever do: no bit is lost or
changed (kernels/reference/spill.py).

Alternatives: to hold the tensor until its size is known would hold all tensors of a step, because
the host is ahead. To code the rest with fewer levels, or not at all, would break the error that a
codec promises. Device memory for the largest payload needs no spill, but takes up to twice as much;
it is used if the system gives no pinned memory.

A codec does not know where memory comes from: the runtime gives it a `PayloadRoom`
(`runtime/capacities.py`). Without one, and on a CPU, where nothing waits, payloads are exact.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Spill(Protocol):
    """Memory for the part of a payload that does not fit; freed with this object."""

    @property
    def memory(self) -> Tensor:
        """Bytes that the device can reach."""
        ...


class Space(NamedTuple):
    """Memory for one payload: its bytes, its spill, and [1] int64 for its size."""

    payload: Tensor
    spill: Spill
    used: Tensor


class PayloadRoom(Protocol):
    """Gives memory to the payloads of one site."""

    def space(self, max_nbytes: int, tile_nbytes: int, device: torch.device) -> Space | None:
        """Returns memory for a payload; None: no payload of this site has been seen yet.

        max_nbytes  upper bound of the payload
        tile_nbytes  upper bound of the payload of one tile
        """
        ...

    def first(self, payload: Tensor, max_nbytes: int) -> tuple[Tensor, Spill]:
        """Copies the first payload, whose size is known, to memory as later ones will get it."""
        ...
