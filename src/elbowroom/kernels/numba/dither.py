"""Subtractive dither (specification: `reference/dither.py`)."""

import numpy as np
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.affine import (
    at_channels,
    channels,
    has_addresses,
    map_restored,
    mapped,
    mask_array,
    rows_at,
)
from elbowroom.kernels.numba.codes import SLACK, codes_nbytes, pack, unpack
from elbowroom.kernels.numba.compiled import CHUNK, TILE, counted, f32, i32, jit, u8, u32
from elbowroom.kernels.numba.grids import dequantize, extremes, finite, quantize
from elbowroom.kernels.numba.launch import (
    array,
    parallel,
    patterns,
    runs_serially,
    split_seed,
    words,
)
from elbowroom.kernels.numba.noise import draw, tile_key
from elbowroom.kernels.numba.rounding import (
    BOTTOM,
    TOP,
    as_float,
    bf16_directed,
    bf16_value,
    from_restored,
    inverse,
    order,
    target,
    to_float,
)


def dither_quantize(
    x: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, ranges, bounds = outputs.dither(x, levels, group_size)
    if runs_serially(x.numel()) and has_addresses(scale, shift):
        by_address = at_channels(scale, shift, inner, x.numel())
        there = codes.data_ptr(), codes.numel(), ranges.data_ptr(), bounds.data_ptr()
        _quantize_at(*words(x), *by_address, seed, levels, group_size, *there)
        return codes, ranges, bounds
    out = array(codes), array(ranges), patterns(bounds)
    by = channels(scale, shift, inner, x.numel())
    _quantize(*words(x), *by, *split_seed(seed), levels, group_size, *out)
    return codes, ranges, bounds


def dither_dequantize(
    codes: Tensor,
    ranges: Tensor,
    bounds: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    out: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
    mask: Tensor | None = None,
    first: int = 0,
) -> None:
    if runs_serially(out.numel()) and has_addresses(scale, shift):
        there = codes.data_ptr(), codes.numel(), ranges.data_ptr(), ranges.shape[0]
        by_address = at_channels(scale, shift, inner, first * TILE + out.numel())
        bits = (0, 0) if mask is None else (mask.data_ptr(), mask.numel())
        coded = bounds.data_ptr(), bounds.shape[0], seed, levels, group_size
        _dequantize_at(*there, *coded, *by_address, *bits, *words(out), first)
        return
    source = array(codes), array(ranges), patterns(bounds)
    settings = *split_seed(seed), levels, group_size
    by = *channels(scale, shift, inner, first * TILE + out.numel()), mask_array(mask)
    _dequantize(*source, *settings, *by, *words(out), first)


@jit
def ranges_of(least, most, levels, ranges, bounds, b_low, b_scale):
    """Per group: what is stored (ranges, bounds) and what it stands for (b_low, 1 / step)."""
    lowest, highest = TOP, BOTTOM
    for i_g in range(ranges.shape[0]):
        lowest, highest = min(lowest, least[i_g]), max(highest, most[i_g])
    if not finite(lowest, highest):
        bounds[0] = bounds[1] = 0x7FC0  # NaN
        ranges[:] = 0
        b_low[:] = b_scale[:] = f32(0)
        return
    bounds[0] = bf16_directed(as_float(order(lowest)), False)
    bounds[1] = bf16_directed(as_float(order(highest)), True)
    lo = bf16_value(bounds[0])
    unit = bf16_value(bounds[1]) * f32(1 / 255) - lo * f32(1 / 255)
    scale = inverse(unit)
    for i_g in range(ranges.shape[0]):
        a = np.floor((as_float(order(least[i_g])) - lo) * scale)
        b = np.ceil((as_float(order(most[i_g])) - lo) * scale)
        a, b = min(max(a, f32(0)), f32(255)), min(max(b, f32(0)), f32(255))
        ranges[i_g, 0], ranges[i_g, 1] = u8(a), u8(b)
        b_low[i_g] = lo + a * unit
        b_scale[i_g] = inverse((b - a) * unit * f32(1 / (levels - 1)))


@jit
def grid(ranges, bounds, levels, b_low, b_step):
    """b_low, b_step [groups] <- what code 0 decodes to before the dither is taken off; the step."""
    lo = bf16_value(bounds[0])
    unit = bf16_value(bounds[1]) * f32(1 / 255) - lo * f32(1 / 255)
    for i_g in range(ranges.shape[0]):
        a, b = f32(ranges[i_g, 0]), f32(ranges[i_g, 1])
        b_step[i_g] = (b - a) * unit * f32(1 / (levels - 1))
        b_low[i_g] = (lo + a * unit) + b_step[i_g] * f32(0.5)


@parallel
def _quantize(x, kind, scale, shift, runs, seed_low, seed_high, levels, S, out, ranges, bounds):
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
            part = ranges[start // S : start // S + (n + S - 1) // S]
            values = to_float(x[start : start + n], kind, b_x[:n])
            values = mapped(values, start, scale, shift, runs, b_x[:n])
            draw(tile_key(i_t, seed_low, seed_high), b_u)
            extremes(values, S, b_least, b_most)
            ranges_of(b_least, b_most, levels, part, bounds[i_t], b_low, b_scale)
            quantize(values, b_u, S, b_low, b_scale, i32(levels - 1), b_code)
            pack(b_code, n, levels, b_spare, out[i_t * P : i_t * P + codes_nbytes(levels, n)])


@parallel
def _dequantize(
    codes, ranges, bounds, seed_low, seed_high, levels, S, scale, shift, runs, mask, out, kind,
    first,
):  # fmt: skip
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    P, G = codes_nbytes(levels, TILE), TILE // S  # of a tile: bytes of codes, groups
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u = np.empty(TILE, f32), np.empty(TILE, f32)
        b_code, b_flag = np.empty(TILE + SLACK, u8), np.empty(TILE, np.int8)
        b_low, b_step = np.empty(TILE // 32, f32), np.empty(TILE // 32, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            start = i_t * TILE
            n = min(TILE, N - start)
            i_w = first + i_t  # in the whole tensor
            part = ranges[i_w * G : i_w * G + (n + S - 1) // S]
            y = target(out[start : start + n], kind, b_x[:n])
            draw(tile_key(i_w, seed_low, seed_high), b_u)
            unpack(codes[i_w * P : i_w * P + codes_nbytes(levels, n)], levels, b_code[: n + SLACK])
            grid(part, bounds[i_w], levels, b_low, b_step)
            dequantize(b_code, b_u, S, b_low, b_step, y)
            map_restored(y, i_w * TILE, scale, shift, runs, mask, b_flag)
            from_restored(y, kind, out[start : start + n])


_quantize_serial, _dequantize_serial = _quantize.serial, _dequantize.serial


@counted
def bounds_at(address, T):
    """The bf16 bounds [T, 2] of as many tiles, at an address."""
    return array_at(address, 2 * T, np.int16).reshape(T, 2)


@counted
def _quantize_at(
    x, kind, scale, shift, R, C, inner, row, seed, levels, S, codes, nbytes, ranges, bounds
):  # fmt: skip
    """The serial loop, with all but x by addresses: an array argument costs 1 us a call."""
    N = x.shape[0]
    G, T = (N + S - 1) // S, (N + TILE - 1) // TILE
    by = rows_at(scale, R, C), rows_at(shift, R, C), (inner, row)
    there = (
        array_at(ranges, 2 * G, u8).reshape(G, 2),
        array_at(bounds, 2 * T, np.int16).reshape(T, 2),
    )
    low, high = u32(seed & 0xFFFFFFFF), u32((seed >> 32) & 0xFFFFFFFF)
    _quantize_serial(x, kind, *by, low, high, levels, S, array_at(codes, nbytes, u8), *there)


@counted
def _dequantize_at(
    codes, nbytes, ranges, G, bounds, T, seed, levels, S, scale, shift, R, C, inner, row, mask,
    mask_nbytes, out, kind, first,
):  # fmt: skip
    there = (
        array_at(ranges, 2 * G, u8).reshape(G, 2),
        array_at(bounds, 2 * T, np.int16).reshape(T, 2),
    )
    by = rows_at(scale, R, C), rows_at(shift, R, C), (inner, row), array_at(mask, mask_nbytes, u8)
    low, high = u32(seed & 0xFFFFFFFF), u32((seed >> 32) & 0xFFFFFFFF)
    source = array_at(codes, nbytes, u8)
    _dequantize_serial(source, *there, low, high, levels, S, *by, out, kind, first)
