"""Dither on either side of a threshold that a bitmap tells (specification: `reference/sided.py`).

One pass over x: the bitmap gives the payload's size before.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import check_payload, sided_tile_nbytes, tiles
from elbowroom.kernels.numba.affine import channels, map_restored, mask_array, scale_tile
from elbowroom.kernels.numba.bits import tile_counts
from elbowroom.kernels.numba.codes import SLACK, codes_nbytes, pack, unpack
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, i32, leaf, u8
from elbowroom.kernels.numba.dither import grid, ranges_of
from elbowroom.kernels.numba.fold import folded, mean_of, unfold
from elbowroom.kernels.numba.grids import dequantize, extremes, quantize
from elbowroom.kernels.numba.launch import array, parallel, patterns, split_seed, words
from elbowroom.kernels.numba.noise import draw, tile_key
from elbowroom.kernels.numba.rounding import bf16_value, from_restored, half_value
from elbowroom.kernels.numba.sides import HALF, divide, merge
from elbowroom.kernels.reference.spill import unite


def sided_quantize(
    x: Tensor,
    bits: Tensor,
    seed: int,
    upper: int,
    lower: int,
    group_size: int,
    fold: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor]:
    settings = upper, lower, group_size, fold
    counts, starts = _sizes(bits, x.numel(), *settings)
    payload, bounds = outputs.bytes_of(x, int(starts[-1])), outputs.bounds(x, 2)
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
    fold: int,
    out: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
    mask: Tensor | None = None,
    first: int = 0,
    spill: Tensor | None = None,
) -> None:
    n = first * TILE + out.numel()
    counts, starts = _sizes(bits[: -(-n // 8)], n, upper, lower, group_size, fold)
    if spill is not None:
        most = sided_tile_nbytes(upper, lower, group_size, fold)
        payload = unite(payload, spill, starts.diff().tolist(), most)
    check_payload(payload, int(starts[-1]), goes_on=8 * bits.numel() >= n + 8)
    source = array(bits), array(counts), array(starts), array(payload), patterns(bounds)
    settings = *split_seed(seed), upper, lower, group_size, fold
    by = *channels(scale, shift, inner, n), mask_array(mask)
    _dequantize(*source, *settings, *by, *words(out), first)


def _sizes(
    bits: Tensor, numel: int, upper: int, lower: int, group_size: int, fold: int
) -> tuple[Tensor, Tensor]:
    """Counts the bits set in each tile [tiles], and finds where its payload starts [tiles + 1].

    Both are int64. Bits beyond the last element do not count.
    """
    counts = tile_counts(bits, tiles(numel))
    if numel % 8:
        counts[-1] -= (int(bits[-1]) >> (numel % 8)).bit_count()
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    _add_up(array(counts), numel, upper, lower, group_size, fold, array(starts))
    return counts, starts


@leaf
def part_nbytes(n, levels, S):
    return 2 * ((n + S - 1) // S) + codes_nbytes(levels, n)


@leaf
def lower_nbytes(n, levels, S, fold):
    if fold == 1 or n == 0:
        return part_nbytes(n, levels, S)
    return 2 + part_nbytes((n + fold - 1) // fold, levels, S)


@leaf
def _add_up(counts, N, upper, lower, S, fold, starts):
    for i_t in range(counts.shape[0]):
        n = min(TILE, N - i_t * TILE)
        size = part_nbytes(counts[i_t], upper, S) + lower_nbytes(n - counts[i_t], lower, S, fold)
        starts[i_t + 1] = starts[i_t] + size


@leaf
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


@leaf
def decode_part(part, bounds, u, levels, S, b_code, b_low, b_step, kept):
    n = kept.shape[0]
    if n == 0:
        return
    G = (n + S - 1) // S
    unpack(part[2 * G :], levels, b_code[: n + SLACK])
    grid(part[: 2 * G].reshape(G, 2), bounds, levels, b_low, b_step)
    dequantize(b_code, u, S, b_low, b_step, kept)


@leaf
def encode_lower(
    kept, u, levels, S, fold, part, bounds, b_fold,
    b_least, b_most, b_low, b_scale, b_code, b_spare,
):  # fmt: skip
    if fold > 1 and kept.shape[0] > 0:
        mean, m = mean_of(kept, b_least, b_most), (kept.shape[0] + fold - 1) // fold
        part[0], part[1], part = u8(mean & 255), u8((mean >> 8) & 255), part[2:]
        folded(kept, u, bf16_value(mean), m, b_fold)
        kept = b_fold[:m]
    encode_part(kept, u, levels, S, part, bounds, b_least, b_most, b_low, b_scale, b_code, b_spare)


@leaf
def decode_lower(part, bounds, u, levels, S, fold, b_code, b_low, b_step, b_fold, kept):
    n = kept.shape[0]
    if fold == 1 or n == 0:
        decode_part(part, bounds, u, levels, S, b_code, b_low, b_step, kept)
        return
    sums = b_fold[: (n + fold - 1) // fold]
    decode_part(part[2:], bounds, u, levels, S, b_code, b_low, b_step, sums)
    unfold(sums, u, bf16_value(i32(part[0]) | (i32(part[1]) << i32(8))), kept)


@leaf
def load(source, kind, values):
    """values [n] <- words of a tensor as float32."""
    if kind == 0:
        floats = source.view(f32)
        for o in range(values.shape[0]):
            values[o] = floats[o]
    elif kind == 1:
        for o in range(values.shape[0]):
            values[o] = bf16_value(source[o])
    else:
        for o in range(values.shape[0]):
            values[o] = half_value(source[o])


@leaf
def store(values, kind, out):
    """Inverse of `load`, rounded."""
    if kind == 0:
        floats = out.view(f32)
        for o in range(values.shape[0]):
            floats[o] = values[o]
    else:
        from_restored(values, kind, out)


@leaf
def encode_tile(
    i_t, x, kind, scale, shift, runs, bits, n_up, seed_low, seed_high, upper, lower, S, fold,
    part, bounds, b_x, b_u, b_side, b_fold, b_least, b_most, b_low, b_scale, b_code, b_spare,
):  # fmt: skip
    first, last = i_t * TILE, min(i_t * TILE + TILE, x.shape[0])
    n = last - first
    values = b_x[:n]
    load(x[first:last], kind, values)
    scale_tile(values, first, scale, shift, runs)
    divide(values, bits[first // 8 : (last + 7) // 8], b_side)
    draw(tile_key(i_t, seed_low, seed_high), b_u)
    middle = part_nbytes(n_up, upper, S)
    encode_part(
        b_side[:n_up], b_u, upper, S, part[:middle], bounds[2 * i_t],
        b_least, b_most, b_low, b_scale, b_code, b_spare,
    )  # fmt: skip
    encode_lower(
        b_side[HALF : HALF + n - n_up], b_u[n_up:], lower, S, fold, part[middle:],
        bounds[2 * i_t + 1], b_fold, b_least, b_most, b_low, b_scale, b_code, b_spare,
    )  # fmt: skip


@leaf
def decode_tile(
    i_w, bits, n_up, part, bounds, seed_low, seed_high, upper, lower, S, fold,
    scale, shift, runs, mask, out, kind,
    b_x, b_u, b_side, b_fold, b_code, b_flag, b_low, b_step,
):  # fmt: skip
    """out [n] <- tile i_w of the whole tensor."""
    n, byte = out.shape[0], i_w * (TILE // 8)
    draw(tile_key(i_w, seed_low, seed_high), b_u)
    middle = part_nbytes(n_up, upper, S)
    decode_part(part[:middle], bounds[2 * i_w], b_u, upper, S, b_code, b_low, b_step, b_side[:n_up])
    decode_lower(
        part[middle:], bounds[2 * i_w + 1], b_u[n_up:], lower, S, fold,
        b_code, b_low, b_step, b_fold, b_side[HALF : HALF + n - n_up],
    )  # fmt: skip
    values = b_x[:n]
    merge(b_side, bits[byte : byte + (n + 7) // 8], values)
    map_restored(values, i_w * TILE, scale, shift, runs, mask, b_flag)
    store(values, kind, out)


@parallel
def _quantize(
    x, kind, scale, shift, runs, bits, counts, seed_low, seed_high, upper, lower, S, fold,
    starts, payload, bounds,
):  # fmt: skip
    T = (x.shape[0] + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u, b_side = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(2 * HALF, f32)
        b_code, b_spare = np.empty(TILE + SLACK, u8), np.empty(TILE + SLACK, u8)
        b_least, b_most = np.empty(TILE // 32, i32), np.empty(TILE // 32, i32)
        b_low, b_scale = np.empty(TILE // 32, f32), np.empty(TILE // 32, f32)
        b_fold = np.empty(TILE // 4, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            encode_tile(
                i_t, x, kind, scale, shift, runs, bits, counts[i_t], seed_low, seed_high,
                upper, lower, S, fold, payload[starts[i_t] : starts[i_t + 1]], bounds,
                b_x, b_u, b_side, b_fold, b_least, b_most, b_low, b_scale, b_code, b_spare,
            )  # fmt: skip


@parallel
def _dequantize(
    bits, counts, starts, payload, bounds, seed_low, seed_high, upper, lower, S, fold,
    scale, shift, runs, mask, out, kind, i_first,
):  # fmt: skip
    T = (out.shape[0] + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u, b_side = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(2 * HALF, f32)
        b_code, b_flag = np.empty(TILE + SLACK, u8), np.empty(TILE, np.int8)
        b_low, b_step = np.empty(TILE // 32, f32), np.empty(TILE // 32, f32)
        b_fold = np.empty(TILE // 4, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            i_w = i_first + i_t  # in the whole tensor
            decode_tile(
                i_w, bits, counts[i_w], payload[starts[i_w] : starts[i_w + 1]], bounds,
                seed_low, seed_high, upper, lower, S, fold, scale, shift, runs, mask,
                out[i_t * TILE : min(i_t * TILE + TILE, out.shape[0])], kind,
                b_x, b_u, b_side, b_fold, b_code, b_flag, b_low, b_step,
            )  # fmt: skip
