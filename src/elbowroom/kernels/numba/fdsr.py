"""A transform code of maps, one pass over x (specification: `reference/fdsr.py`)."""

from collections.abc import Sequence

import numpy as np
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.bands import LIMIT, WORDS, bands_of, tiles_of
from elbowroom.kernels.numba.codes import SLACK, pack, unpack
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, i32, jit, u8, u32, u64
from elbowroom.kernels.numba.fdsr_codes import (
    band_weights,
    energies,
    gain_values,
    gains_of,
    largest,
    mean_codes,
    mean_values,
    normalize,
    rms,
    run_codes,
    run_values,
    to_units,
    undo,
)
from elbowroom.kernels.numba.fdsr_reuse import add_members, codebook_of, restored
from elbowroom.kernels.numba.fdsr_tables import tables_of
from elbowroom.kernels.numba.launch import array, parallel, patterns, split_seed, words
from elbowroom.kernels.numba.mixing import mix
from elbowroom.kernels.numba.noise import draw, tile_key
from elbowroom.kernels.numba.rounding import as_bits, as_float, bf16_nearest, bf16_value
from elbowroom.kernels.numba.tiles import gather, locate, scatter
from elbowroom.kernels.numba.transform import coefficients, elements

STRANDS = 16  # with reuse, so many tables are summed apart, whatever the number of threads


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
    payload, scales, codebook = outputs.fdsr(x, maps, block, levels, kept)
    strands = STRANDS if kept else 0
    total = np.zeros((strands, WORDS, b.rest), np.int64)
    length = np.zeros((strands, WORDS), np.int64)
    source = *words(x), split_seed(seed), tuple(maps), count
    out = array(payload), patterns(scales), total, length
    _quantize(*source, tables, kept, dither, *out)
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
    stored = array(payload), patterns(scales), array(codebook)
    settings = split_seed(seed), tuple(maps), count, tables, kept, dither
    _dequantize(*stored, *settings, *words(out))


@parallel
def _quantize(x, kind, seed, maps, count, t, kept, dither, payload, scales, total, length):
    B, L, G = t.block, t.lanes, payload.shape[0]
    per = max(CHUNK, (G + STRANDS - 1) // STRANDS) if kept else CHUNK
    for i_c in prange((G + per - 1) // per):
        b_x, b_t, b_u = np.empty(TILE, f32), np.empty(TILE, f32), np.full(TILE, f32(0.5))
        b_y, b_z = np.empty((B * B, L), f32), np.empty((B * B, L), f32)
        b_q, energy = np.empty((B * B - t.coded, L), i32), np.empty(B * B, np.int64)
        b_code, b_spare = np.empty(TILE + SLACK, u8), np.empty(TILE + SLACK, u8)
        b_gain, b_scale, b_part = np.empty(L, f32), np.empty(L, f32), np.empty(L, u32)
        o_x, o_row, o_column = np.empty(L, u64), np.empty(L, np.int64), np.empty(L, np.int64)
        for i_g in range(i_c * per, min(i_c * per + per, G)):
            out, scale = payload[i_g], scales[i_g]
            whole = locate(maps, B, i_g * L, count, o_x, o_row, o_column)
            gather(x, kind, maps, B, o_x, o_row, o_column, whole, b_x)
            y = b_y.reshape(b_y.size)
            coefficients(b_x, t, b_t, y)
            most = largest(y[L:])
            usable = max(most, largest(y[:L])) < as_bits(f32(LIMIT))
            if not usable:
                y[:], most = f32(0), i32(0)
            if dither:
                draw(tile_key(i_g, seed[0], seed[1]), b_u)

            mean_codes(b_y[0], scale, t.runs[0, 2], b_u, b_code)
            pack_run(b_code, b_spare, L, t.runs[0], out)
            if not usable:
                scale[0] = scale[1] = 0x7FC0  # NaN

            absmax = as_float(most)
            energies(b_y, t.raster, t.pieces, absmax, b_part, energy)
            weights = scale[2 : 2 + t.bands]
            band_weights(energy, t.edges, L, absmax, dither, weights)
            if kept:
                ratio = rms(energy[t.coded :], L)
                to_units(b_y, t.raster, absmax, b_q)
                add_members(b_q, t.planes, kept, ratio, out[t.rest :], total[i_c], length[i_c])
                scale[2 + t.bands] = bf16_nearest(ratio * absmax)

            normalize(b_y, weights, t, dither, b_z)
            if dither:
                mix(b_z.reshape(b_z.size), t.spans, L, False)
            gains_of(b_z, t.coded, t.cell, out[t.gains : t.gains + L // t.cell], b_gain)
            for i_r in range(1, t.runs.shape[0]):
                start, stop, levels = t.runs[i_r, 0], t.runs[i_r, 1], t.runs[i_r, 2]
                run_codes(b_z, start, stop, b_gain, levels, b_u, b_scale, b_code)
                pack_run(b_code, b_spare, (stop - start) * L, t.runs[i_r], out)


@jit
def pack_run(codes, spare, n, run, out):
    codes[n : n + SLACK] = u8(0)
    pack(codes[: n + SLACK], n, run[2], spare, out[run[3] : run[3] + run[4]])


@parallel
def _dequantize(payload, scales, codebook, seed, maps, count, t, kept, dither, out, kind):
    B, L, G = t.block, t.lanes, payload.shape[0]
    for i_c in prange((G + CHUNK - 1) // CHUNK):
        b_x, b_t, b_u = np.empty(TILE, f32), np.empty(TILE, f32), np.full(TILE, f32(0.5))
        b_y, b_z = np.zeros((B * B, L), f32), np.empty((B * B, L), f32)
        b_code = np.empty(TILE + SLACK, u8)
        b_gain, b_step, b_low = np.empty(L, f32), np.empty(L, f32), np.empty(L, f32)
        o_x, o_row, o_column = np.empty(L, u64), np.empty(L, np.int64), np.empty(L, np.int64)
        for i_g in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, G)):
            source, scale = payload[i_g], scales[i_g]
            if dither:
                draw(tile_key(i_g, seed[0], seed[1]), b_u)
            unpack_run(source, t.runs[0], L, b_code)
            mean_values(b_code, scale, t.runs[0, 2], b_u, b_y[0])
            gain_values(source[t.gains : t.gains + L // t.cell], t.cell, b_gain)
            for i_r in range(1, t.runs.shape[0]):
                start, stop, levels = t.runs[i_r, 0], t.runs[i_r, 1], t.runs[i_r, 2]
                unpack_run(source, t.runs[i_r], (stop - start) * L, b_code)
                run_values(b_code, start, stop, b_gain, levels, b_u, b_step, b_low, b_z)
            if dither:
                mix(b_z.reshape(b_z.size), t.spans, L, True)
            undo(b_z, scale[2 : 2 + t.bands], t, dither, b_y)
            if kept:
                size = bf16_value(scale[2 + t.bands])
                restored(source[t.rest :], kept, size, codebook, t.raster[t.coded :], b_y)
            elements(b_y.reshape(b_y.size), t, b_t, b_x)
            whole = locate(maps, B, i_g * L, count, o_x, o_row, o_column)
            real = min(L, count - i_g * L)
            scatter(b_x, maps, B, o_x, o_row, o_column, real, whole, out, kind)


@jit
def unpack_run(source, run, n, codes):
    unpack(source[run[3] : run[3] + run[4]], run[2], codes[: n + SLACK])
