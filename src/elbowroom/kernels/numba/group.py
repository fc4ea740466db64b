"""Groups with their own range and stochastic rounding (specification: `reference/group.py`)."""

import numpy as np
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.numba.affine import channels, map_restored, mapped, mask_array
from elbowroom.kernels.numba.codes import SLACK, codes_nbytes, pack, unpack
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, i32, jit, u8
from elbowroom.kernels.numba.grids import dequantize, extremes, finite, quantize
from elbowroom.kernels.numba.launch import array, parallel, patterns, split_seed, words
from elbowroom.kernels.numba.noise import draw, tile_key
from elbowroom.kernels.numba.rounding import (
    as_float,
    bf16_directed,
    bf16_value,
    from_restored,
    inverse,
    order,
    target,
    to_float,
)


def group_quantize(
    x: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, step, low = outputs.group(x, levels, group_size)
    out = array(codes), patterns(step), patterns(low)
    by = channels(scale, shift, inner, x.numel())
    _quantize(*words(x), *by, *split_seed(seed), levels, group_size, *out)
    return codes, step, low


def group_dequantize(
    codes: Tensor,
    step: Tensor,
    low: Tensor,
    levels: int,
    group_size: int,
    out: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
    mask: Tensor | None = None,
    first: int = 0,
) -> None:
    source = array(codes), patterns(step), patterns(low)
    by = *channels(scale, shift, inner, first * TILE + out.numel()), mask_array(mask)
    _dequantize(*source, levels, group_size, *by, *words(out), first)


@jit
def ranges_of(least, most, levels, lows, steps, b_low, b_scale):
    """Per group: what is stored (lows, steps: bf16 bits) and what it means (b_low, 1 / step)."""
    for i_g in range(lows.shape[0]):
        lows[i_g], steps[i_g] = 0, 0x7FC0  # NaN
        b_low[i_g], b_scale[i_g] = f32(0), f32(0)
        if finite(least[i_g], most[i_g]):
            lows[i_g] = bf16_directed(as_float(order(least[i_g])), False)
            b_low[i_g] = bf16_value(lows[i_g])
            width = as_float(order(most[i_g])) - b_low[i_g]
            steps[i_g] = bf16_directed(width * f32(1 / (levels - 1)), True)
            b_scale[i_g] = inverse(bf16_value(steps[i_g]))


@parallel
def _quantize(x, kind, scale, shift, runs, seed_low, seed_high, levels, S, out, steps, lows):
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    P = codes_nbytes(levels, TILE)
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u = np.empty(TILE, f32), np.empty(TILE, f32)
        b_code, b_spare = np.empty(TILE + SLACK, u8), np.empty(TILE + SLACK, u8)
        b_least, b_most = np.empty(TILE // 32, i32), np.empty(TILE // 32, i32)
        b_low, b_scale = np.empty(TILE // 32, f32), np.empty(TILE // 32, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            start = i_t * TILE
            n = min(TILE, N - start)
            first, last = start // S, start // S + (n + S - 1) // S
            values = to_float(x[start : start + n], kind, b_x[:n])
            values = mapped(values, start, scale, shift, runs, b_x[:n])
            draw(tile_key(i_t, seed_low, seed_high), b_u)
            extremes(values, S, b_least, b_most)
            ranges_of(b_least, b_most, levels, lows[first:last], steps[first:last], b_low, b_scale)
            quantize(values, b_u, S, b_low, b_scale, i32(levels - 1), b_code)
            pack(b_code, n, levels, b_spare, out[i_t * P : i_t * P + codes_nbytes(levels, n)])


@parallel
def _dequantize(codes, steps, lows, levels, S, scale, shift, runs, mask, out, kind, first):
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    P, G = codes_nbytes(levels, TILE), TILE // S  # of a tile: bytes of codes, groups
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_zero = np.empty(TILE, f32), np.zeros(TILE, f32)
        b_code, b_flag = np.empty(TILE + SLACK, u8), np.empty(TILE, np.int8)
        b_low, b_step = np.empty(TILE // 32, f32), np.empty(TILE // 32, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            start = i_t * TILE
            n = min(TILE, N - start)
            i_w = first + i_t  # in the whole tensor
            unpack(codes[i_w * P : i_w * P + codes_nbytes(levels, n)], levels, b_code[: n + SLACK])
            for i_g in range((n + S - 1) // S):
                b_low[i_g], b_step[i_g] = (
                    bf16_value(lows[i_w * G + i_g]),
                    bf16_value(steps[i_w * G + i_g]),
                )
            values = target(out[start : start + n], kind, b_x[:n])
            dequantize(b_code, b_zero, S, b_low, b_step, values)
            map_restored(values, i_w * TILE, scale, shift, runs, mask, b_flag)
            from_restored(values, kind, out[start : start + n])
