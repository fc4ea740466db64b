"""Block means and a low-bit rest (specification: `reference/division.py`), in two passes over x.

First by strips of blocks: sums and extremes, columns side by side, and of each block its mean and
the edges of x - mean (min and max commute with the rounding of the difference). Then by tiles:
codes, with mean, low and 1 / scale spread over the tile.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.maps import blocks, ranges
from elbowroom.kernels.numba.codes import SLACK, codes_nbytes, pack, unpack
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, i32, jit, u8
from elbowroom.kernels.numba.launch import array, parallel, patterns, split_seed, words
from elbowroom.kernels.numba.maps import LEAST, MOST, fold, spread, sum_rows, up
from elbowroom.kernels.numba.noise import draw, tile_key
from elbowroom.kernels.numba.rounding import (
    bf16_directed,
    bf16_nearest,
    bf16_value,
    from_restored,
    inverse,
    target,
    to_float,
)

LARGEST = f32(2.0**125)
RUN = 2048  # elements of a row that are summed side by side
WORK = 65_536  # elements of a work item of the parallel loops, about


def division_quantize(
    x: Tensor, seed: int, levels: int, block: int, reach: int, maps: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    over_blocks, over_ranges = blocks(maps, block), ranges(maps, block, reach)
    codes, mean, scale, low = outputs.division(x, levels, block, reach, maps)
    if x.numel() == 0:
        return codes, mean, scale, low
    edges = array(torch.empty(2, over_blocks.entries))  # of x - mean, by block
    factor = array(torch.empty(over_ranges.entries))  # 1 / scale
    source = words(x)
    _means(*source, over_blocks, patterns(mean), edges)
    _ranges(edges, over_blocks, over_ranges, levels, patterns(scale), patterns(low), factor)
    made = patterns(mean), factor.view(np.int32), patterns(low)
    _quantize(*source, *split_seed(seed), levels, over_blocks, over_ranges, *made, array(codes))
    return codes, mean, scale, low


def division_dequantize(
    codes: Tensor,
    mean: Tensor,
    scale: Tensor,
    low: Tensor,
    seed: int,
    levels: int,
    block: int,
    reach: int,
    maps: list[int],
    dither: bool,
    out: Tensor,
) -> None:
    if out.numel() == 0:
        return
    over = blocks(maps, block), ranges(maps, block, reach)
    stored = array(codes), patterns(mean), patterns(scale), patterns(low)
    _dequantize(*stored, *split_seed(seed), levels, *over, dither, *words(out))


@jit
def cells(n, size):
    return (n + size - 1) // size


@jit
def finish(total, least, most, o, held, means, edges, i, inner):
    """A block's sums of `inner` channels at o -> at i its means, and the edges of x - mean.

    The edges are NaN where a value is not usable.
    """
    o, i = up(o), up(i)
    for e in range(up(inner)):
        means[i + e] = bf16_nearest(f32(total[o + e] / held))
        mean = bf16_value(means[i + e])
        low, high = least[o + e], most[o + e]
        usable = low > -LARGEST and high < LARGEST and total[o + e] == total[o + e]
        edges[0, i + e] = f32(low - mean) if usable else f32(np.nan)
        edges[1, i + e] = f32(high - mean) if usable else f32(np.nan)


@parallel
def _means(x, kind, over, means, edges):
    rows, columns, inner, high, wide = over.rows, over.columns, over.inner, over.high, over.wide
    down, across = cells(rows, high), cells(columns, wide)
    per = min(max(1, RUN // (wide * inner)), across)  # blocks side by side
    parts = cells(across, per)
    items = over.outer * down * parts
    W = per * wide * inner
    some = max(1, WORK // (high * W))
    part = f32(1.0 / (high * wide))
    for i_c in prange((items + some - 1) // some):
        b_x = np.empty(0 if kind == 0 else high * W, f32)
        b_total, b_least, b_most = np.empty(W, f32), np.empty(W, f32), np.empty(W, f32)
        for item in range(i_c * some, min(i_c * some + some, items)):
            strip = item // parts
            b = (item - strip * parts) * per
            count = min(per, across - b)
            i_o = strip // down
            r = (strip - i_o * down) * high
            tall = min(high, rows - r)
            start = ((i_o * rows + r) * columns + b * wide) * inner
            n = (min((b + count) * wide, columns) - b * wide) * inner
            step = columns * inner
            if kind == 0:
                sum_rows(x.view(f32), start, step, n, tall, part, b_total, b_least, b_most)
            else:
                for k in range(tall):
                    at = start + k * step
                    to_float(x[at : at + n], kind, b_x[k * n : k * n + n])
                sum_rows(b_x, 0, n, n, tall, part, b_total, b_least, b_most)
            fold(n, count * wide * inner, wide, inner, b_total, b_least, b_most)
            for k in range(count):
                held = f32(tall * min(wide, columns - (b + k) * wide)) * part
                o, i = k * wide * inner, (strip * across + b + k) * inner
                finish(b_total, b_least, b_most, o, held, means, edges, i, inner)


@jit
def widen(edges, i, least, most):
    """least, most [inner] <- with the edges of one more block, from i on; NaN stays."""
    i = up(i)
    for e in range(up(least.shape[0])):
        low, high = edges[0, i + e], edges[1, i + e]
        least[e] = least[e] if least[e] < low or least[e] != least[e] else low
        most[e] = most[e] if most[e] > high or most[e] != most[e] else high


@jit
def ranges_of(least, most, levels, scales, lows, factor, i):
    """Writes, from i on, the ranges as they are stored (scales, lows: bf16 bits), and 1 / scale."""
    i = up(i)
    for e in range(up(least.shape[0])):
        scales[i + e], lows[i + e], factor[i + e] = 0x7FC0, 0, f32(0)  # NaN
        if least[e] == least[e]:
            lows[i + e] = bf16_directed(least[e], False)
            width = most[e] - bf16_value(lows[i + e])
            scales[i + e] = bf16_directed(width * f32(1 / (levels - 1)), True)
            factor[i + e] = inverse(bf16_value(scales[i + e]))


@parallel
def _ranges(edges, over, over_ranges, levels, scales, lows, factor):
    inner = over.inner
    down, across = cells(over.rows, over.high), cells(over.columns, over.wide)
    tall, broad = cells(over_ranges.high, over.high), cells(over_ranges.wide, over.wide)
    lines, per = cells(down, tall), cells(across, broad)
    count = over.outer * lines * per
    some = max(1, WORK // (tall * broad * inner * 16))
    for i_c in prange((count + some - 1) // some):
        b_least, b_most = np.empty(inner, f32), np.empty(inner, f32)
        for i_r in range(i_c * some, min(i_c * some + some, count)):
            line = i_r // per
            first = (i_r - line * per) * broad
            i_o = line // lines
            top = (line - i_o * lines) * tall
            b_least[:], b_most[:] = LEAST, MOST
            for b in range(top, min(top + tall, down)):
                for k in range(first, min(first + broad, across)):
                    widen(edges, ((i_o * down + b) * across + k) * inner, b_least, b_most)
            ranges_of(b_least, b_most, levels, scales, lows, factor, i_r * inner)


@jit
def quantize(values, u, mean, low, factor, top, codes):
    """codes [n] <- clamp(floor(((values - mean) - low) * factor + u), 0, top), all by element.

    A NaN goes anywhere in 0..top. codes has room for SLACK more, which are set to 0.
    """
    n = values.shape[0]
    for o in range(n):
        v = ((values[o] - mean[o]) - low[o]) * factor[o] + u[o]
        codes[o] = u8(min(max(i32(v), i32(0)), top))
    codes[n : n + SLACK] = 0


@parallel
def _quantize(x, kind, seed_low, seed_high, levels, over, over_ranges, means, factor, lows, out):
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    P = codes_nbytes(levels, TILE)
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u = np.empty(TILE, f32), np.empty(TILE, f32)
        b_mean, b_low, b_factor = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, f32)
        b_code, b_spare = np.empty(TILE + SLACK, u8), np.empty(TILE + SLACK, u8)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            start = i_t * TILE
            n = min(TILE, N - start)
            values = to_float(x[start : start + n], kind, b_x[:n])
            draw(tile_key(i_t, seed_low, seed_high), b_u)
            spread(means, 16, start, over, b_mean[:n])
            spread(lows, 16, start, over_ranges, b_low[:n])
            spread(factor, 0, start, over_ranges, b_factor[:n])
            quantize(values, b_u, b_mean, b_low, b_factor, i32(levels - 1), b_code)
            pack(b_code, n, levels, b_spare, out[i_t * P : i_t * P + codes_nbytes(levels, n)])


@jit
def dequantize(codes, u, half, mean, low, step, out):
    """out [n] float32 <- mean + ((low + step * half) + step * (codes - u)), all by element."""
    for o in range(out.shape[0]):
        base = low[o] + step[o] * half
        out[o] = mean[o] + (base + step[o] * (f32(i32(codes[o])) - u[o]))


@parallel
def _dequantize(
    codes, means, scales, lows, seed_low, seed_high, levels, over, over_ranges, dither, out, kind
):
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    P = codes_nbytes(levels, TILE)
    half = f32(0.5) if dither else f32(0)
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u = np.empty(TILE, f32), np.zeros(TILE, f32)
        b_mean, b_low, b_step = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, f32)
        b_code = np.empty(TILE + SLACK, u8)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            start = i_t * TILE
            n = min(TILE, N - start)
            if dither:
                draw(tile_key(i_t, seed_low, seed_high), b_u)
            unpack(codes[i_t * P : i_t * P + codes_nbytes(levels, n)], levels, b_code[: n + SLACK])
            spread(means, 16, start, over, b_mean[:n])
            spread(lows, 16, start, over_ranges, b_low[:n])
            spread(scales, 16, start, over_ranges, b_step[:n])
            values = target(out[start : start + n], kind, b_x[:n])
            dequantize(b_code, b_u, half, b_mean, b_low, b_step, values)
            from_restored(values, kind, out[start : start + n])
