"""A transform code of maps, one pass over x (specification: `reference/fdsr.py`).

A thread holds a tile: its B^2 numbers are as many tensors [R, L] (`transform.py`), so that sums are
taken in the reference's order, to the same bits. An element of 4 bytes costs 4 bytes read and
(P + 2 S) / (L B^2) written, for P bytes of payload and S scales of a group of L tiles; back, the
same read and 4 written. Beside that, edges that are repeated and the first element of each tile
(`load_first`) are read twice, the second time from the cache.

With `kept`, each tile of a residual also adds R + 1 numbers to a table of 256 rows, which a second
kernel turns into the codebook (`fdsr_reuse.py`); back, each reads its row.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.bands import WORDS, bands_of, tiles_of
from elbowroom.kernels.triton.device import bf16_value, inverse, tile_key
from elbowroom.kernels.triton.fdsr_codes import dequantize_run, load_run, pack_run, quantize_run
from elbowroom.kernels.triton.fdsr_reuse import finish_codebook, load_residual, store_residual
from elbowroom.kernels.triton.fdsr_stats import (
    band_weights,
    bounds,
    load_gains,
    load_scales,
    mean_grid,
    normalized,
    restored,
    store_gains,
    store_scales,
    zero_unusable,
)
from elbowroom.kernels.triton.fdsr_tables import (
    band_count,
    cell,
    payload_nbytes,
    run_count,
    run_levels,
    run_nbytes,
    scale_count,
)
from elbowroom.kernels.triton.launch import launch, patterns, split_seed, words
from elbowroom.kernels.triton.map_tiles import load_tiles, store_tiles
from elbowroom.kernels.triton.transform import coefficients, elements, mix

THREADS = 128  # of a program, at Triton's four warps


def fdsr_quantize(
    x: Tensor,
    seed: int | Tensor,
    maps: Sequence[int],
    block: int,
    levels: Sequence[int],
    kept: int,
    dither: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    b, count = bands_of(block, tuple(levels)), tiles_of(maps, block)
    payload, scales, codebook = outputs.fdsr(x, maps, block, levels, kept)
    groups = len(payload)
    source, kind = words(x)
    sums = codebook.new_zeros(WORDS, b.rest + 1, dtype=torch.int64) if kept else None
    args = source, payload, patterns(scales), sums, groups, count, *maps[1:], *split_seed(seed)
    how = {"BANDS": b, "B": block, "L": b.lanes, "KEPT": kept, "DITHER": dither, "KIND": kind}
    launch(_quantize, groups, *args, R=THREADS // b.lanes, **how)
    if sums is not None:
        launch(finish_codebook, WORDS, sums, codebook, WORDS, N=b.rest)
    return payload, scales, codebook


def fdsr_dequantize(
    payload: Tensor,
    scales: Tensor,
    codebook: Tensor,
    seed: int | Tensor,
    maps: Sequence[int],
    block: int,
    levels: Sequence[int],
    kept: int,
    dither: bool,
    out: Tensor,
) -> None:
    b, count, groups = bands_of(block, tuple(levels)), tiles_of(maps, block), len(payload)
    target, kind = words(out)
    stored = payload, patterns(scales), codebook
    args = *stored, target, groups, count, *maps[1:], *split_seed(seed)
    how = {"BANDS": b, "B": block, "L": b.lanes, "KEPT": kept, "DITHER": dither, "KIND": kind}
    launch(_dequantize, groups, *args, R=THREADS // b.lanes, **how)


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _quantize(
    p_x, p_payload, p_scales, p_sums, G, T, rows, columns, inner, seed_low, seed_high,
    BANDS: tl.constexpr, B: tl.constexpr, L: tl.constexpr, KEPT: tl.constexpr,
    DITHER: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    m_g = i_g < G
    b_key = tile_key(i_g, seed_low, seed_high)[:, None]
    p_payload += (i_g * payload_nbytes(BANDS, KEPT))[:, None]
    p_scales += i_g * scale_count(BANDS, KEPT)
    i_t = i_g[:, None] * L + tl.arange(0, L)[None, :]  # [R, L]
    b_y = coefficients(load_tiles(p_x, i_t, T, rows, columns, inner, B, KIND), B)
    b_y, b_absmax, m_usable = zero_unusable(b_y)

    b_low, b_high = bounds(b_y[0])
    b_weights = band_weights(b_y, b_absmax, BANDS, DITHER)
    store_scales(p_scales, b_low, b_high, b_weights, m_usable, m_g, BANDS)
    b_lo, b_step = mean_grid(b_low[:, None], b_high[:, None], run_levels(BANDS, 0))
    b_v = (b_y[0] - b_lo) * inverse(b_step)
    pack_run(p_payload, b_v[:, :, None], b_key, m_g, BANDS, 0, DITHER)
    p_payload += run_nbytes(BANDS, 0)

    b_z = normalized(b_y, b_weights, BANDS, DITHER)
    b_z = mix(b_z, BANDS, False) if DITHER else b_z
    b_gain = store_gains(p_payload, b_z, m_g, cell(BANDS))
    p_payload += L // cell(BANDS)
    for i_r in tl.static_range(1, run_count(BANDS)):
        quantize_run(p_payload, b_z, b_gain, b_key, m_g, BANDS, i_r, DITHER)
        p_payload += run_nbytes(BANDS, i_r)
    if KEPT > 0:
        p_scale = p_scales + 2 + band_count(BANDS)
        store_residual(p_payload, p_scale, p_sums, b_y, b_absmax, m_g, BANDS, KEPT)


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _dequantize(
    p_payload, p_scales, p_codebook, p_out, G, T, rows, columns, inner, seed_low, seed_high,
    BANDS: tl.constexpr, B: tl.constexpr, L: tl.constexpr, KEPT: tl.constexpr,
    DITHER: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    m_g = i_g < G
    b_key = tile_key(i_g, seed_low, seed_high)[:, None]
    p_payload += (i_g * payload_nbytes(BANDS, KEPT))[:, None]
    p_scales += i_g * scale_count(BANDS, KEPT)

    b_scales = load_scales(p_scales, m_g, BANDS, KEPT)
    b_lo, b_step = mean_grid(b_scales[0], b_scales[1], run_levels(BANDS, 0))
    b_q = load_run(p_payload, b_key, m_g, L, BANDS, 0, DITHER)
    b_z = ((b_lo + b_step * 0.5) + b_step * b_q[0],)
    p_payload += run_nbytes(BANDS, 0)

    b_gain = load_gains(p_payload, m_g, cell(BANDS), L)
    p_payload += L // cell(BANDS)
    for i_r in tl.static_range(1, run_count(BANDS)):
        b_z = b_z + dequantize_run(p_payload, b_gain, b_key, m_g, BANDS, i_r, DITHER)
        p_payload += run_nbytes(BANDS, i_r)
    b_z = mix(b_z, BANDS, True) if DITHER else b_z
    b_rest = ()
    if KEPT > 0:
        b_scale = bf16_value(b_scales[2 + band_count(BANDS)])
        b_rest = load_residual(p_payload, p_codebook, b_scale, m_g, L, BANDS, KEPT)
    b_y = restored(b_z, b_scales, b_rest, BANDS, DITHER)
    i_t = i_g[:, None] * L + tl.arange(0, L)[None, :]  # [R, L]
    store_tiles(p_out, elements(b_y, B), i_t, T, rows, columns, inner, B, KIND)
