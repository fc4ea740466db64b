"""A transform code of maps, one pass over x (specification: `reference/fdsr.py`)."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.bands import (
    LIMIT,
    PLANES,
    SIGNS,
    UNITS,
    WORDS,
    Bands,
    bands_of,
    cosines,
    mixed,
    tiles_of,
)
from elbowroom.kernels.layout import codes_nbytes
from elbowroom.kernels.numba.codes import SLACK, pack, unpack
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, i32, jit, u8, u32, u64
from elbowroom.kernels.numba.fdsr_reuse import (
    add_members,
    codebook_of,
    gain_code,
    gain_value,
    restored,
)
from elbowroom.kernels.numba.launch import array, parallel, patterns, split_seed, words
from elbowroom.kernels.numba.noise import draw, tile_key
from elbowroom.kernels.numba.rounding import (
    TOP,
    as_bits,
    as_float,
    bf16_directed,
    bf16_nearest,
    bf16_value,
    inverse,
)
from elbowroom.kernels.numba.transform import coefficients, elements, gather, locate, mix, scatter

STRANDS = 16  # with reuse, so many tables are summed apart, whatever the number of threads


class Tables(NamedTuple):
    """`Bands` as arrays."""

    even: Any  # left halves of the even rows of D, float32
    odd: Any
    even_t: Any
    odd_t: Any
    at: Any  # [B, B]: row * B + column
    at_t: Any
    place: Any  # [B, B] position
    place_t: Any
    band: Any  # [B * B] position -> band
    edges: Any  # [bands + 1] the first position of each band
    runs: Any  # [runs, 5]: start, stop, levels, where its codes lie, and their bytes
    spans: Any  # [spans, 2]
    signs: Any  # [64] float32
    planes: Any  # [HASH_BITS, R] int32
    sizes: Any  # lanes, cell, coded, bands, where gains lie, where the residual does


@cache
def tables_of(block: int, levels: tuple[int, ...]) -> Tables:
    b: Bands = bands_of(block, levels)
    runs, end = [], 0
    for i, run in enumerate(b.runs):
        size = codes_nbytes(run.levels, (run.stop - run.start) * b.lanes)
        runs.append([*run, end, size])
        end += size + (b.lanes // b.cell if i == 0 else 0)
    c, half = np.array(cosines(block), np.float32), block // 2
    even, odd = c[::2, : block - half].copy(), c[1::2, :half].copy()
    at = np.arange(block**2, dtype=np.uint64).reshape(block, block)
    place = np.argsort(np.array(b.order)).astype(np.uint64).reshape(block, block)
    return Tables(
        even=even,
        odd=odd,
        even_t=even.T.copy(),
        odd_t=odd.T.copy(),
        at=at,
        at_t=at.T.copy(),
        place=place,
        place_t=place.T.copy(),
        band=np.array(b.band),
        edges=np.searchsorted(b.band, range(b.band[-1] + 2)),
        runs=np.array(runs),
        spans=np.array([s for run in b.runs[1:] for s in mixed(run)], np.int64).reshape(-1, 2),
        signs=np.array(SIGNS, np.float32),
        planes=np.array(PLANES, np.int32)[:, b.coded : block**2].copy(),
        sizes=np.array([b.lanes, b.cell, b.coded, b.bands, runs[0][4], end]),
    )


def fdsr_quantize(
    x: Tensor,
    seed: int,
    maps: Sequence[int],
    block: int,
    levels: Sequence[int],
    kept: int,
    dither: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    b, tables = bands_of(block, tuple(levels)), tables_of(block, tuple(levels))
    count = tiles_of(maps, block)
    groups = -(-count // b.lanes)
    payload = torch.empty(groups, b.nbytes(kept), dtype=torch.uint8)
    scales = torch.empty(groups, b.scales(kept), dtype=torch.bfloat16)
    codebook = torch.empty(WORDS if kept else 0, b.rest, dtype=torch.int8)
    strands = STRANDS if kept else 0
    total = np.zeros((strands, WORDS, b.rest), np.int64)
    length = np.zeros((strands, WORDS), np.int64)
    out = array(payload), patterns(scales), total, length
    flags = kept, int(dither)
    _quantize(*words(x), *split_seed(seed), np.array(maps), count, *tables, *flags, *out)
    if kept:
        codebook_of(total.sum(axis=0), length.sum(axis=0), array(codebook))
    return payload, scales, codebook


def fdsr_dequantize(
    payload: Tensor,
    scales: Tensor,
    codebook: Tensor,
    seed: int,
    maps: Sequence[int],
    block: int,
    levels: Sequence[int],
    kept: int,
    dither: bool,
    out: Tensor,
) -> None:
    tables, count = tables_of(block, tuple(levels)), tiles_of(maps, block)
    source = array(payload), patterns(scales), array(codebook)
    flags = kept, int(dither)
    _dequantize(*source, *split_seed(seed), np.array(maps), count, *tables, *flags, *words(out))


@jit
def largest(b_y):
    """The bits of the largest magnitude: an integer, largest for NaN and Inf."""
    patterns, most = b_y.view(np.int32), i32(0)
    for o in range(patterns.shape[0]):
        most = max(most, patterns[o] & TOP)
    return most


@jit
def to_units(b_y, absmax, b_q, energy):
    """b_q [positions, lanes] int32 <- b_y in units of absmax / UNITS, towards zero.

    energy [positions] int64: the sum of the squares. 32 of 2^26 at most fit 32 bits.
    """
    scale = inverse(absmax * f32(1 / UNITS))
    values, units = b_y.reshape(b_y.size), b_q.reshape(b_q.size)
    for o in range(values.shape[0]):
        units[o] = i32(values[o] * scale)
    per = b_q.shape[1] // 32
    rows = units.reshape(b_q.shape[0] * per, 32)
    energy[:] = 0
    for r in range(rows.shape[0]):
        part = u32(0)
        for o in range(32):
            part += u32(rows[r, o] * rows[r, o])
        energy[r // per] += np.int64(part)


@jit
def rms(energy, lanes):
    """Of positions whose sums of squares are given, as a share of absmax."""
    total, count = np.int64(0), energy.shape[0] * lanes
    for one in energy:
        total += one
    return np.sqrt(f32(max(total, count)) * f32(1 / count)) * f32(1 / UNITS)


@jit
def clear(b_y):
    for p in range(b_y.shape[0]):
        for o in range(b_y.shape[1]):
            b_y[p, o] = f32(0)


@jit
def weigh(b_y, scale, band, coded, divide):
    """Rows 1..coded-1 of b_y are multiplied by their weights, or divided; the rest is set to 0."""
    for p in range(1, coded):
        weight = bf16_value(scale[1 + band[p]])
        factor = inverse(weight) if divide else weight
        for o in range(b_y.shape[1]):
            b_y[p, o] *= factor
    for p in range(coded, b_y.shape[0]):
        for o in range(b_y.shape[1]):
            b_y[p, o] = f32(0)


@jit
def mean_codes(row, bounds, levels, b_u, b_code):
    least, most = row[0], row[0]
    for value in row:
        least, most = min(least, value), max(most, value)
    bounds[0], bounds[1] = bf16_directed(least, False), bf16_directed(most, True)
    lo = bf16_value(bounds[0])
    step = (bf16_value(bounds[1]) - lo) * f32(1 / (levels - 1))
    scale, top = inverse(step), i32(levels - 1)
    for o in range(row.shape[0]):
        b_code[o] = u8(min(max(i32((row[o] - lo) * scale + b_u[o]), i32(0)), top))


@jit
def gains_of(b_z, coded, cell, gains, b_gain):
    """gains [lanes / cell] and their values b_gain [lanes], from the largest of b_z."""
    b_most = b_gain.view(np.int32)
    b_pattern = b_z.view(np.int32)
    for o in range(b_most.shape[0]):
        b_most[o] = 0
    for p in range(1, coded):
        for o in range(b_most.shape[0]):
            b_most[o] = max(b_most[o], b_pattern[p, o] & TOP)  # bits order as magnitudes do
    for i in range(gains.shape[0]):
        most = i32(0)
        for o in range(i * cell, i * cell + cell):
            most = max(most, b_most[o])
        gains[i] = gain_code(as_float(most), (1 << 19) - 1)
        for o in range(i * cell, i * cell + cell):
            b_gain[o] = gain_value(gains[i])


@jit
def mean_values(b_code, lo, step, b_u, b_y):
    low = lo + step * f32(0.5)
    for o in range(b_y.shape[1]):
        b_y[0, o] = low + step * (f32(i32(b_code[o])) - b_u[o])


@jit
def gain_values(gains, cell, b_gain):
    for i in range(gains.shape[0]):
        value = gain_value(gains[i])
        for o in range(cell):
            b_gain[i * cell + o] = value


@jit
def run_codes(b_z, b_gain, levels, b_u, b_scale, b_code):
    """b_code [n, lanes] <- the codes of b_z, with noise b_u, like it."""
    n, top = b_gain.shape[0], i32(levels - 1)
    for o in range(n):
        b_scale[o] = inverse(b_gain[o] * f32(2 / (levels - 1)))
    for p in range(b_z.shape[0]):
        row, noise, code = b_z[p], b_u[p], b_code[p]
        for o in range(n):
            b_code_of = i32((row[o] + b_gain[o]) * b_scale[o] + noise[o])
            code[o] = u8(min(max(b_code_of, i32(0)), top))


@jit
def run_values(b_code, b_gain, levels, b_u, b_step, b_z):
    """The inverse: b_z [n, lanes] <- what the codes stand for."""
    n = b_gain.shape[0]
    for o in range(n):
        b_step[o] = b_gain[o] * f32(2 / (levels - 1))
    for p in range(b_z.shape[0]):
        row, noise, code = b_z[p], b_u[p], b_code[p]
        for o in range(n):
            low = b_step[o] * f32(0.5) - b_gain[o]
            row[o] = low + b_step[o] * (f32(i32(code[o])) - noise[o])


@parallel
def _quantize(
    x,
    kind,
    seed_low,
    seed_high,
    maps,
    count,
    even,
    odd,
    even_t,
    odd_t,
    at,
    at_t,
    place,
    place_t,
    band,
    edges,
    runs,
    spans,
    signs,
    planes,
    sizes,
    kept,
    dither,
    payload,
    scales,
    total,
    length,
):
    B, L, cell, coded, bands = at.shape[0], sizes[0], sizes[1], sizes[2], sizes[3]
    G = payload.shape[0]
    per = max(CHUNK, (G + STRANDS - 1) // STRANDS) if kept else CHUNK
    for i_c in prange((G + per - 1) // per):
        b_x, b_t = np.empty((B * B, L), f32), np.empty((B * B, L), f32)
        b_y, b_q = np.empty((B * B, L), f32), np.empty((B * B, L), i32)
        b_half, b_u = np.empty((B, L), f32), np.full(TILE, f32(0.5))
        b_code, b_spare = np.empty(TILE + SLACK, u8), np.empty(TILE + SLACK, u8)
        b_gain, b_scale = np.empty(L, f32), np.empty(L, f32)
        energy = np.empty(B * B, np.int64)
        o_x = np.empty(L, u64)
        o_row, o_column = np.empty(L, np.int64), np.empty(L, np.int64)
        for i_g in range(i_c * per, min(i_c * per + per, G)):
            out, scale = payload[i_g], scales[i_g]
            whole = locate(maps, B, i_g * L, count, o_x, o_row, o_column)
            gather(x, kind, maps, B, o_x, o_row, o_column, whole, b_x)
            coefficients(b_x, even, odd, at, at_t, place_t, b_half, b_t, b_y)
            usable = largest(b_y.reshape(b_y.size)) < as_bits(f32(LIMIT))
            if not usable:
                clear(b_y)
            if dither:
                draw(tile_key(i_g, seed_low, seed_high), b_u)

            levels, size = runs[0, 2], runs[0, 4]
            mean_codes(b_y[0], scale, levels, b_u[:L], b_code)
            b_code[L : L + SLACK] = u8(0)
            pack(b_code, L, levels, b_spare, out[:size])
            if not usable:
                scale[0] = scale[1] = 0x7FC0  # NaN

            absmax = as_float(largest(b_y[1:].reshape((B * B - 1) * L)))
            to_units(b_y, absmax, b_q, energy)
            for i_b in range(1, bands + 1):
                ratio = rms(energy[edges[i_b] : edges[i_b + 1]], L)
                scale[1 + i_b] = bf16_nearest((np.sqrt(ratio) if dither else ratio) * absmax)
            if kept:
                add_members(
                    b_q[coded:],
                    planes,
                    kept,
                    rms(energy[coded:], L),
                    out[sizes[5] :],
                    total[i_c],
                    length[i_c],
                )
                scale[2 + bands] = bf16_nearest(rms(energy[coded:], L) * absmax)

            weigh(b_y, scale, band, coded, True)
            if dither:
                mix(b_y[:coded], signs, spans, False)
            gains_of(b_y, coded, cell, out[sizes[4] : sizes[4] + L // cell], b_gain)
            for i_r in range(1, runs.shape[0]):
                start, stop, levels = runs[i_r, 0], runs[i_r, 1], runs[i_r, 2]
                begin, end = runs[i_r, 3], runs[i_r, 3] + runs[i_r, 4]
                n = (stop - start) * L
                noise, codes = b_u[start * L : stop * L], b_code[:n]
                run_codes(
                    b_y[start:stop],
                    b_gain,
                    levels,
                    noise.reshape(stop - start, L),
                    b_scale,
                    codes.reshape(stop - start, L),
                )
                b_code[n : n + SLACK] = u8(0)
                pack(b_code, n, levels, b_spare, out[begin:end])


@parallel
def _dequantize(
    payload,
    scales,
    codebook,
    seed_low,
    seed_high,
    maps,
    count,
    even,
    odd,
    even_t,
    odd_t,
    at,
    at_t,
    place,
    place_t,
    band,
    edges,
    runs,
    spans,
    signs,
    planes,
    sizes,
    kept,
    dither,
    out,
    kind,
):
    B, L, cell, coded, bands = at.shape[0], sizes[0], sizes[1], sizes[2], sizes[3]
    G = payload.shape[0]
    for i_c in prange((G + CHUNK - 1) // CHUNK):
        b_x, b_t = np.empty((B * B, L), f32), np.empty((B * B, L), f32)
        b_y = np.empty((B * B, L), f32)
        b_half, b_u = np.empty((B, L), f32), np.full(TILE, f32(0.5))
        b_code = np.empty(TILE + SLACK, u8)
        b_gain, b_step = np.empty(L, f32), np.empty(L, f32)
        o_x = np.empty(L, u64)
        o_row, o_column = np.empty(L, np.int64), np.empty(L, np.int64)
        for i_g in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, G)):
            source, scale = payload[i_g], scales[i_g]
            if dither:
                draw(tile_key(i_g, seed_low, seed_high), b_u)
            levels, size = runs[0, 2], runs[0, 4]
            unpack(source[:size], levels, b_code[: L + SLACK])
            lo = bf16_value(scale[0])
            step = (bf16_value(scale[1]) - lo) * f32(1 / (levels - 1))
            mean_values(b_code, lo, step, b_u, b_y)
            gain_values(source[sizes[4] : sizes[4] + L // cell], cell, b_gain)
            for i_r in range(1, runs.shape[0]):
                start, stop, levels = runs[i_r, 0], runs[i_r, 1], runs[i_r, 2]
                begin, end = runs[i_r, 3], runs[i_r, 3] + runs[i_r, 4]
                n = (stop - start) * L
                unpack(source[begin:end], levels, b_code[: n + SLACK])
                run_values(
                    b_code[:n].reshape(stop - start, L),
                    b_gain,
                    levels,
                    b_u[start * L : stop * L].reshape(stop - start, L),
                    b_step,
                    b_y[start:stop],
                )
            if dither:
                mix(b_y[:coded], signs, spans, True)
            weigh(b_y, scale, band, coded, False)
            if kept:
                restored(
                    source[sizes[5] :], kept, bf16_value(scale[2 + bands]), codebook, b_y[coded:]
                )
            elements(b_y, even_t, odd_t, at, at_t, place, b_half, b_t, b_x)
            whole = locate(maps, B, i_g * L, count, o_x, o_row, o_column)
            real = min(L, count - i_g * L)
            scatter(b_x, maps, B, o_x, o_row, o_column, real, whole, out, kind)
