"""Error-bounded codes (specification: `reference/comet.py`).

Two passes over x, because where a tile's payload starts is the sum of the sizes before it: one for
headers and sizes, one for the codes. Both quantize; keeping the integers would take as much memory
as x. The neighbors that a prediction looks back to are quantized once more a work item.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import check_payload, tiles
from elbowroom.kernels.numba.bits import pack_bits, pack_flags
from elbowroom.kernels.numba.blocks import BLOCKS, SCRATCH, measure, write_tile
from elbowroom.kernels.numba.bounded import integers
from elbowroom.kernels.numba.comet_decode import decode, decode_maps
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, i32, u8, u32, u64
from elbowroom.kernels.numba.launch import array, parallel, split_seed, words
from elbowroom.kernels.numba.predict import residuals
from elbowroom.kernels.numba.rounding import to_float
from elbowroom.kernels.reference.spill import unite


def comet_quantize(
    x: Tensor,
    grid: Tensor,
    seed: int,
    rounding: str,
    aware: bool,
    rows: int,
    columns: int,
    inner: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = x.numel()
    bits, headers, sizes = outputs.comet(x, aware=aware)
    if aware:
        bits = pack_bits(x)
    starts = torch.zeros(tiles(n) + 1, dtype=torch.int64)
    key, back = _noise(seed, rounding)
    source = *words(x), array(x.view(torch.uint8)), array(grid), key, back
    settings = aware, rows, columns, inner, array(headers)
    _encode(*source, *settings, array(starts[1:]), np.empty(0, np.uint8), False)
    sizes.copy_(starts[1:])
    starts.cumsum_(dim=0)
    payload = outputs.bytes_of(x, int(starts[-1]))
    _encode(*source, *settings, array(starts), array(payload), True)
    return bits, headers, sizes, payload


def comet_dequantize(
    bits: Tensor,
    headers: Tensor,
    sizes: Tensor,
    payload: Tensor,
    grid: Tensor,
    seed: int,
    rounding: str,
    rows: int,
    columns: int,
    inner: int,
    out: Tensor,
    spill: Tensor | None = None,
) -> None:
    if spill is not None:
        payload = unite(payload, spill, sizes.tolist(), TILE * out.element_size())
    starts = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    torch.cumsum(sizes.clamp(min=0), dim=0, out=starts[1:])  # damaged ones may be anything
    check_payload(payload, int(starts[-1]))
    wrong = np.full(1, -1, np.int64)
    source = array(bits), array(headers), array(starts), array(payload), array(grid)
    settings = *_noise(seed, rounding), *words(out), array(out.view(torch.uint8)), wrong
    if rows:
        decode_maps(*source, rows, columns, inner, *settings)
    else:
        decode(*source, *settings)
    if wrong[0] >= 0:
        size = int(sizes[wrong[0]])
        raise ValueError(f"expected headers that call for the {size} bytes of a tile; got others")


def _noise(seed: int, rounding: str) -> tuple[np.ndarray, bool]:
    """The seed and whether the encoder draws noise [3] uint32; whether the decoder does."""
    key = np.array([*split_seed(seed), rounding != "nearest"], np.uint32)
    return key, rounding == "dither"


@parallel
def _encode(
    x, kind, source, grid, key, back, aware, rows, columns, inner, headers, starts, payload, final
):
    """Headers and sizes (into starts); or, with headers and starts in place, the payload."""
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    itemsize = 4 if kind == 0 else 2
    reach = (columns + 1) * inner if rows > 1 else inner * min(rows, 1)
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        start, stop = i_c * CHUNK * TILE, min((i_c + 1) * CHUNK * TILE, N)
        begin = max(start - reach, 0) // TILE * TILE
        b_q = np.empty(stop - begin if rows else 0, i32)  # predictions look back
        b_bad, b_flag = np.empty(TILE, u8), np.empty(TILE, u8)
        b_x, b_u, b_back = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, f32)
        b_r, b_kept, b_spare = np.empty(TILE, i32), np.empty(32, i32), np.empty(32, u8)
        b_top, b_every = np.empty(BLOCKS, i32), np.empty(BLOCKS, i32)
        b_part, b_even = np.empty(SCRATCH, u8), np.empty(TILE, u8)
        b_block, b_wrong = b_r.reshape(BLOCKS, 32), b_bad.view(u64).reshape(BLOCKS, 4)
        b_set = b_flag.reshape(BLOCKS, 32)
        b_bit = np.zeros(TILE // 8, u8)
        for first in range(begin, stop, TILE):
            last, i_t = min(first + TILE, N), first // TILE
            n = last - first
            values = to_float(x[first:last], kind, b_x[:n])
            q = b_q[first - begin : last - begin] if rows else b_r[:n]
            integers(values, kind, i_t, key, back, grid, b_u, b_back, q, b_flag, b_bad)
            if first < start:
                continue
            b_r[n:], b_bad[n:], b_flag[n:] = 0, 0, 0
            if rows:
                residuals(b_q[: last - begin], first, rows, columns, inner, b_r[:n])
                for o in range(TILE):
                    b_r[o] &= -i32(b_flag[o])
            pack_flags(b_flag, u8(255), b_bit, b_even)
            each, masks = headers[first // 32 : (last + 31) // 32], b_bit.view(u32)
            if final:
                bytes_of = source[first * itemsize : last * itemsize]
                write_tile(bytes_of, b_block, b_set, masks, n, each, aware, b_kept, b_spare, b_part)
                payload[starts[i_t] : starts[i_t + 1]] = b_part[: starts[i_t + 1] - starts[i_t]]
            else:
                starts[i_t] = measure(
                    b_block, b_wrong, masks, n, itemsize, aware, b_top, b_every, each
                )
