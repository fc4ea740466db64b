"""A bitmap and the elements that are not zero, also in memory of a fixed size (`spill.py`).

    x [N] integers --> bits [ceil(N / 8)] uint8, kept [C] of x's dtype: those of a tile after the
    other, and what does not fit in the spill, which is empty where C is their number

Floats are taken as integers of their size, so that -0.0 is no zero and NaN comes back as it was.
"""

import torch
from torch import Tensor

from elbowroom.kernels.layout import TILE, check_kept
from elbowroom.kernels.reference.bits import flags, pack_bits
from elbowroom.kernels.reference.spill import divide, unite


def sparse_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bits, and all elements that are not zero."""
    return pack_bits(x), x[x != 0]


def sparse_pack_into(x: Tensor, kept: Tensor, spill: Tensor, used: Tensor) -> Tensor:
    """Returns the bits; kept and spill are written, and used [1] int64 gets the bytes of both."""
    bits = pack_bits(x)
    whole = x[x != 0]
    divide(whole, _counts(bits, x.numel()), kept, spill, TILE)
    used.fill_(whole.numel() * whole.element_size())
    return bits


def sparse_unpack(
    bits: Tensor, kept: Tensor, spill: Tensor, out: Tensor, exact: bool = False
) -> None:
    """Inverse of both: out [N] is written.

    exact: kept has no room for more
    Raises ValueError if there is no spill, and kept is shorter than the bitmap says, or if it is
    exact and longer.
    """
    present = flags(bits, out.numel())
    counts = _counts(bits, out.numel())
    if not spill.numel():
        check_kept(kept, sum(counts), exact=exact)
    whole = unite(kept, spill, counts, TILE)
    out.zero_().masked_scatter_(present, whole)


def _counts(bits: Tensor, n: int) -> list[int]:
    return [int(tile.sum()) for tile in torch.split(flags(bits, n), TILE)] if n else []
