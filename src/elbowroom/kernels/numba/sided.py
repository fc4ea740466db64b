"""Dither on either side of a threshold that a bitmap tells (specification: `reference/sided.py`).

One pass over x: the bitmap gives the payload's size before.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.layout import check_payload, tiles
from elbowroom.kernels.numba.affine import channels, map_restored, mapped, mask_array
from elbowroom.kernels.numba.bits import COUNT, tile_counts
from elbowroom.kernels.numba.codes import SLACK, codes_nbytes, pack, unpack
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, i32, inlined, jit, u8, u64
from elbowroom.kernels.numba.dither import grid, ranges_of
from elbowroom.kernels.numba.grids import dequantize, extremes, quantize
from elbowroom.kernels.numba.launch import array, parallel, patterns, split_seed, words
from elbowroom.kernels.numba.noise import draw, tile_key
from elbowroom.kernels.numba.rounding import from_restored, target, to_float


def sided_quantize(
    x: Tensor,
    bits: Tensor,
    seed: int,
    upper: int,
    lower: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor]:
    counts, starts = _sizes(bits, x.numel(), upper, lower, group_size)
    payload = torch.empty(int(starts[-1]), dtype=torch.uint8)
    bounds = torch.empty(2 * tiles(x.numel()), 2, dtype=torch.bfloat16)
    settings = upper, lower, group_size
    out = array(starts), array(payload), patterns(bounds)
    source = *words(x), *channels(scale, shift, inner, x.numel()), array(bits), array(counts)
    _quantize(*source, *split_seed(seed), *settings, *out)
    return payload, bounds


def sided_dequantize(
    bits: Tensor,
    payload: Tensor,
    bounds: Tensor,
    seed: int,
    upper: int,
    lower: int,
    group_size: int,
    out: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
    mask: Tensor | None = None,
    first: int = 0,
) -> None:
    n = first * TILE + out.numel()
    counts, starts = _sizes(bits[: -(-n // 8)], n, upper, lower, group_size)
    check_payload(payload, int(starts[-1]), goes_on=8 * bits.numel() >= n + 8)
    source = array(bits), array(counts), array(starts), array(payload), patterns(bounds)
    settings = *split_seed(seed), upper, lower, group_size
    by = *channels(scale, shift, inner, n), mask_array(mask)
    _dequantize(*source, *settings, *by, *words(out), first)


def _sizes(
    bits: Tensor, numel: int, upper: int, lower: int, group_size: int
) -> tuple[Tensor, Tensor]:
    """Of each tile how many bits are set [tiles], and where its payload starts [tiles + 1], int64.

    Bits beyond the last element do not count.
    """
    counts = tile_counts(bits, tiles(numel))
    if numel % 8:
        counts[-1] -= (int(bits[-1]) >> (numel % 8)).bit_count()
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    _add_up(array(counts), numel, upper, lower, group_size, array(starts))
    return counts, starts


@jit
def part_nbytes(n, levels, S):
    return 2 * ((n + S - 1) // S) + codes_nbytes(levels, n)


@jit
def _add_up(counts, N, upper, lower, S, starts):
    for i_t in range(counts.shape[0]):
        n = min(TILE, N - i_t * TILE)
        size = part_nbytes(counts[i_t], upper, S) + part_nbytes(n - counts[i_t], lower, S)
        starts[i_t + 1] = starts[i_t] + size


# A tile's values by side: those whose bit is set from 0 on, the others from HALF on.
HALF = TILE
_RANK = np.array(  # a byte of bits -> in byte k of the result, how many bits below k are like bit k
    [
        sum(sum((byte >> j & 1) == (byte >> k & 1) for j in range(k)) << (8 * k) for k in range(8))
        for byte in range(256)
    ],
    dtype=np.uint64,
)


@inlined
def place(byte, ranks, k, up, low):
    """Where the element of bit k goes; the next of either side goes to `up`, to `low`.

    Without a condition, which random bits would mispredict: with it, and the places counted one
    after the other, `divide` took 2.8 times as long, and `merge` 2.0 (one core with AVX-512).
    """
    chosen = u64(0) - ((u64(byte) >> u64(k)) & u64(1))  # all ones or all zeros
    return (low ^ ((low ^ up) & chosen)) + ((ranks >> u64(8 * k)) & u64(255))


@jit
def divide(values, bits, sides):
    """sides [2 * TILE] <- values [n], each on its side, in order."""
    up, low = u64(0), u64(HALF)
    whole = values.shape[0] // 8
    for o in range(whole):
        byte = bits[o]
        ranks, eight = _RANK[byte], values[8 * o : 8 * o + 8]
        for k in range(8):
            sides[place(byte, ranks, k, up, low)] = eight[k]
        up, low = up + COUNT[byte], low + (u64(8) - COUNT[byte])
    if whole < bits.shape[0]:
        byte = bits[whole]
        ranks, rest = _RANK[byte], values[8 * whole :]
        for k in range(rest.shape[0]):
            sides[place(byte, ranks, k, up, low)] = rest[k]


@jit
def merge(sides, bits, values):
    """The inverse: values [n] <- sides [2 * TILE]."""
    up, low = u64(0), u64(HALF)
    whole = values.shape[0] // 8
    for o in range(whole):
        byte = bits[o]
        ranks, eight = _RANK[byte], values[8 * o : 8 * o + 8]
        for k in range(8):
            eight[k] = sides[place(byte, ranks, k, up, low)]
        up, low = up + COUNT[byte], low + (u64(8) - COUNT[byte])
    if whole < bits.shape[0]:
        byte = bits[whole]
        ranks, rest = _RANK[byte], values[8 * whole :]
        for k in range(rest.shape[0]):
            rest[k] = sides[place(byte, ranks, k, up, low)]


@jit
def encode_part(kept, u, levels, S, part, bounds, b_least, b_most, b_low, b_scale, b_code, b_spare):
    n = kept.shape[0]
    bounds[:] = 0
    if n == 0:
        return
    G = (n + S - 1) // S
    extremes(kept, S, b_least, b_most)
    ranges_of(b_least, b_most, levels, part[: 2 * G].reshape(G, 2), bounds, b_low, b_scale)
    quantize(kept, u, S, b_low, b_scale, i32(levels - 1), b_code)
    pack(b_code, n, levels, b_spare, part[2 * G :])


@jit
def decode_part(part, bounds, u, levels, S, b_code, b_low, b_step, kept):
    n = kept.shape[0]
    if n == 0:
        return
    G = (n + S - 1) // S
    unpack(part[2 * G :], levels, b_code[: n + SLACK])
    grid(part[: 2 * G].reshape(G, 2), bounds, levels, b_low, b_step)
    dequantize(b_code, u, S, b_low, b_step, kept)


@parallel
def _quantize(
    x, kind, scale, shift, runs, bits, counts, seed_low, seed_high, upper, lower, S,
    starts, payload, bounds,
):  # fmt: skip
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u, b_side = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(2 * TILE, f32)
        b_code, b_spare = np.empty(TILE + SLACK, u8), np.empty(TILE + SLACK, u8)
        b_least, b_most = np.empty(TILE // 32, i32), np.empty(TILE // 32, i32)
        b_low, b_scale = np.empty(TILE // 32, f32), np.empty(TILE // 32, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            n, p = last - first, counts[i_t]
            values = to_float(x[first:last], kind, b_x[:n])
            values = mapped(values, first, scale, shift, runs, b_x[:n])
            divide(values, bits[first // 8 : (last + 7) // 8], b_side)
            draw(tile_key(i_t, seed_low, seed_high), b_u)
            start = starts[i_t]
            middle, end = start + part_nbytes(p, upper, S), starts[i_t + 1]
            encode_part(
                b_side[:p], b_u, upper, S, payload[start:middle], bounds[2 * i_t],
                b_least, b_most, b_low, b_scale, b_code, b_spare,
            )  # fmt: skip
            encode_part(
                b_side[HALF : HALF + n - p], b_u[p:], lower, S, payload[middle:end],
                bounds[2 * i_t + 1], b_least, b_most, b_low, b_scale, b_code, b_spare,
            )  # fmt: skip


@parallel
def _dequantize(
    bits, counts, starts, payload, bounds, seed_low, seed_high, upper, lower, S,
    scale, shift, runs, mask, out, kind, i_first,
):  # fmt: skip
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u, b_side = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(2 * TILE, f32)
        b_code, b_flag = np.empty(TILE + SLACK, u8), np.empty(TILE, np.int8)
        b_low, b_step = np.empty(TILE // 32, f32), np.empty(TILE // 32, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            i_w = i_first + i_t  # in the whole tensor
            n, p, byte = last - first, counts[i_w], i_w * (TILE // 8)
            draw(tile_key(i_w, seed_low, seed_high), b_u)
            start = starts[i_w]
            middle, end = start + part_nbytes(p, upper, S), starts[i_w + 1]
            decode_part(
                payload[start:middle], bounds[2 * i_w], b_u, upper, S,
                b_code, b_low, b_step, b_side[:p],
            )  # fmt: skip
            decode_part(
                payload[middle:end], bounds[2 * i_w + 1], b_u[p:], lower, S,
                b_code, b_low, b_step, b_side[HALF : HALF + n - p],
            )  # fmt: skip
            values = target(out[first:last], kind, b_x[:n])
            merge(b_side, bits[byte : byte + (n + 7) // 8], values)
            map_restored(values, i_w * TILE, scale, shift, runs, mask, b_flag)
            from_restored(values, kind, out[first:last])
