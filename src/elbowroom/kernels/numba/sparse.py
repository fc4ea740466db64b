"""A bitmap and the elements that are not zero (specification: `reference/sparse.py`).

Eight elements share a byte of the bitmap. Of a causal mask nearly all bytes are 0 or 255, so these
two have branches of their own; any other byte takes loops without branches.
"""

import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.layout import check_kept, tiles
from elbowroom.kernels.numba.bits import BELOW, COUNT, pack_bits, tile_counts
from elbowroom.kernels.numba.compiled import TILE, jit, u64
from elbowroom.kernels.numba.launch import array, parallel
from elbowroom.kernels.reference.spill import unite


def sparse_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    bits = pack_bits(x)
    starts = _starts(bits, x.numel())
    kept = torch.empty(int(starts[-1]), dtype=x.dtype)
    _pack(array(x), array(bits), array(starts), array(kept))
    return bits, kept


def sparse_unpack(
    bits: Tensor, kept: Tensor, spill: Tensor, out: Tensor, exact: bool = False
) -> None:
    starts = _starts(bits, out.numel())
    if spill.numel():
        kept = unite(kept, spill, starts.diff().tolist(), TILE)
    check_kept(kept, int(starts[-1]), exact=exact)
    _unpack(array(bits), array(starts), array(kept), array(out))


def _starts(bits: Tensor, numel: int) -> Tensor:
    """Returns where each tile's elements start, and the end of the last: [tiles + 1] int64."""
    starts = torch.zeros(tiles(numel) + 1, dtype=torch.int64)
    torch.cumsum(tile_counts(bits, tiles(numel)), 0, out=starts[1:])
    return starts


@jit
def _compact(x, bits, kept):
    """kept [n] <- the elements of x at which a bit is set, which are those that are not zero."""
    place, whole = u64(0), x.shape[0] // 8
    for o in range(whole):
        byte = bits[o]
        if byte == 0:
            continue
        eight = x[8 * o : 8 * o + 8]
        if byte == 255:
            there = kept[place : place + u64(8)]
            for k in range(8):
                there[k] = eight[k]
            place += u64(8)
            continue
        for k in range(8):
            if eight[k] != 0:
                kept[place] = eight[k]
                place += u64(1)
    for o in range(8 * whole, x.shape[0]):
        if x[o] != 0:
            kept[place] = x[o]
            place += u64(1)


@jit
def _expand(kept, bits, out):
    """out [n] <- the next of kept where a bit is set, else 0."""
    place, whole = u64(0), out.shape[0] // 8
    for o in range(whole):
        byte = bits[o]
        eight = out[8 * o : 8 * o + 8]
        if byte == 0:
            eight[:] = 0
            continue
        if byte == 255:
            there = kept[place : place + u64(8)]
            for k in range(8):
                eight[k] = there[k]
            place += u64(8)
            continue
        below, last = BELOW[byte], u64(kept.shape[0] - 1)
        for k in range(8):
            at = min(place + ((below >> u64(8 * k)) & u64(255)), last)
            eight[k] = kept[at] * ((byte >> k) & 1)
        place += COUNT[byte]
    for o in range(8 * whole, out.shape[0]):
        is_set = (bits[o >> 3] >> (o & 7)) & 1
        out[o] = kept[place] if is_set else 0
        place += u64(is_set)


@parallel
def _pack(x, bits, starts, kept):
    for i_t in prange(starts.shape[0] - 1):
        first, last = i_t * TILE, min(i_t * TILE + TILE, x.shape[0])
        _compact(
            x[first:last],
            bits[first // 8 : (last + 7) // 8],
            kept[starts[i_t] : starts[i_t + 1]],
        )


@parallel
def _unpack(bits, starts, kept, out):
    for i_t in prange(starts.shape[0] - 1):
        first, last = i_t * TILE, min(i_t * TILE + TILE, out.shape[0])
        _expand(
            kept[starts[i_t] : starts[i_t + 1]],
            bits[first // 8 : (last + 7) // 8],
            out[first:last],
        )
