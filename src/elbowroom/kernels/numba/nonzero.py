"""Dither for the non-zeros (specification: `reference/nonzero.py`).

Two passes over x: bits and their counts, then, once the payload's size is known, the codes.
"""

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import check_payload, nonzero_tile_nbytes, tiles
from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.affine import (
    at_channels,
    blank_unset,
    channels,
    has_addresses,
    mapped,
    mask_array,
    rows_at,
    scale_tile,
)
from elbowroom.kernels.numba.bits import (
    BELOW,
    COUNT,
    blank,
    count,
    pack_bits,
    pack_flags,
    tile_counts,
    unpack_flags,
)
from elbowroom.kernels.numba.codes import SLACK, codes_nbytes, pack, unpack
from elbowroom.kernels.numba.compiled import (
    CHUNK,
    TILE,
    counted,
    f32,
    i32,
    jit,
    u8,
    u16,
    u32,
    u64,
)
from elbowroom.kernels.numba.compress import HAS, WIDTH, compress, nonzeros
from elbowroom.kernels.numba.compress import expand as spread
from elbowroom.kernels.numba.dither import bounds_at, grid, ranges_of
from elbowroom.kernels.numba.grids import dequantize, extremes, quantize
from elbowroom.kernels.numba.launch import (
    array,
    parallel,
    patterns,
    runs_serially,
    split_seed,
    words,
)
from elbowroom.kernels.numba.noise import draw, tile_key
from elbowroom.kernels.numba.rounding import TOP, from_restored, target, to_float
from elbowroom.kernels.reference.spill import unite


def nonzero_quantize(
    x: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    if runs_serially(x.numel()) and has_addresses(scale, shift):
        return _quantized_serially(x, seed, levels, group_size, scale, shift, inner)
    by = channels(scale, shift, inner, x.numel())
    bits = pack_bits(x) if scale is None else _mapped_bits(x, by)
    starts = _starts(bits, x.numel(), levels, group_size)
    payload, bounds = outputs.bytes_of(x, int(starts[-1])), outputs.bounds(x)
    out = array(starts), array(payload), patterns(bounds)
    _quantize(*words(x), *by, *split_seed(seed), levels, group_size, *out)
    return bits, payload, bounds


def nonzero_dequantize(
    bits: Tensor,
    payload: Tensor,
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
    spill: Tensor | None = None,
) -> None:
    n = first * TILE + out.numel()
    if spill is None and runs_serially(out.numel()) and has_addresses(scale, shift):
        there = bits.data_ptr(), -(-n // 8)
        nbytes = _payload_nbytes(*there, levels, group_size)
        check_payload(payload, nbytes, goes_on=8 * bits.numel() >= n + 8)
        buffers = *there, payload.data_ptr(), nbytes, bounds.data_ptr(), bounds.shape[0]
        of_mask = (0, 0) if mask is None else (mask.data_ptr(), mask.numel())
        by_address = *at_channels(scale, shift, inner, n), *of_mask
        smallest = max(2.0**-126, torch.finfo(out.dtype).tiny)
        coded = *buffers, seed, levels, group_size, smallest
        _dequantize_at(*coded, *by_address, *words(out), first)
        return
    starts = _starts(bits[: -(-n // 8)], n, levels, group_size)
    if spill is not None:
        most = nonzero_tile_nbytes(levels, group_size)
        payload = unite(payload, spill, starts.diff().tolist(), most)
    check_payload(payload, int(starts[-1]), goes_on=8 * bits.numel() >= n + 8)
    source = array(bits), array(starts), array(payload), patterns(bounds)
    tiniest = np.float32(max(2.0**-126, torch.finfo(out.dtype).tiny))
    settings = *split_seed(seed), levels, group_size, tiniest
    by = *channels(scale, shift, inner, n), mask_array(mask)
    _dequantize(*source, *settings, *by, *words(out), first)


def _quantized_serially(
    x: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    scale: Tensor | None,
    shift: Tensor | None,
    inner: int,
) -> tuple[Tensor, Tensor, Tensor]:
    by = channels(scale, shift, inner, x.numel())
    bits = pack_bits(x) if scale is None else _mapped_bits(x, by)
    there = bits.data_ptr(), bits.numel()
    payload = outputs.bytes_of(x, _payload_nbytes(*there, levels, group_size))
    bounds = outputs.bounds(x)
    buffers = *there, payload.data_ptr(), payload.numel(), bounds.data_ptr()
    by_address = at_channels(scale, shift, inner, x.numel())
    _quantize_at(*words(x), *by_address, seed, levels, group_size, *buffers)
    return bits, payload, bounds


def _mapped_bits(x: Tensor, by: tuple[Any, Any, tuple[int, int]]) -> Tensor:
    """The bits of what is not zero after scaling."""
    bits = outputs.bits(x)
    _pack_mapped(*words(x), *by, array(bits))
    return bits


def _starts(bits: Tensor, numel: int, levels: int, group_size: int) -> Tensor:
    """Returns where each tile's payload starts, and the end of the last: [tiles + 1] int64."""
    counts = tile_counts(bits, tiles(numel))
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    _sizes(array(counts), levels, group_size, array(starts))
    return starts


@jit
def _sizes(counts, levels, S, starts):
    for i_t in range(counts.shape[0]):
        n = counts[i_t]
        starts[i_t + 1] = starts[i_t] + 2 * ((n + S - 1) // S) + codes_nbytes(levels, n)


@counted
def _starts_of(bits, levels, S):
    """`_starts` of the bits of all elements up to the last byte."""
    T = (bits.shape[0] + TILE // 8 - 1) // (TILE // 8)
    counts, starts = np.empty(T, np.int64), np.zeros(T + 1, np.int64)
    for i_t in range(T):
        counts[i_t] = count(bits[i_t * (TILE // 8) : (i_t + 1) * (TILE // 8)])
    _sizes(counts, levels, S, starts)
    return starts


@counted
def _payload_nbytes(bits, nbytes, levels, S):
    """Returns the size of the payload of a bitmap, which is given by its address."""
    return _starts_of(array_at(bits, nbytes, u8), levels, S)[-1]


@jit
def compact_vectors(values, kept):
    """`compact` of as many as fill vectors; how many these are, and how many of them were kept."""
    n = 0
    for o in range(values.shape[0] // WIDTH):
        mask = nonzeros(values, o * WIDTH)
        compress(values, o * WIDTH, mask, kept, n)
        n += np.int64(COUNT[mask & u16(255)] + COUNT[mask >> u16(8)])
    return values.shape[0] // WIDTH * WIDTH, n


@jit
def expand_vectors(kept, bits, values):
    place = 0
    for o in range(values.shape[0] // WIDTH):
        first, second = bits[2 * o], bits[2 * o + 1]
        mask = u16(first) | (u16(second) << u16(8))
        spread(kept, place, kept, place, mask, values, o * WIDTH)
        place += np.int64(COUNT[first] + COUNT[second])
    return values.shape[0] // WIDTH * WIDTH, place


@jit
def none_compacted(values, kept):
    return 0, 0


@jit
def none_expanded(kept, bits, values):
    return 0, 0


if not HAS:
    compact_vectors, expand_vectors = none_compacted, none_expanded


@jit
def compact(values, kept):
    """kept [n] <- the non-zeros of values in order; returns n.

    Branchless: zeros are written too, then overwritten.
    """
    done, n = compact_vectors(values, kept)
    for o in range(done, values.shape[0]):
        kept[n] = values[o]
        n += 1 if values[o] != f32(0) else 0
    return n


@jit
def lift(values, tiniest, flags):
    """A restored value that came out as (nearly) 0 becomes the smallest positive number.

    Zeros are the bitmap's: values [n] stay as they are where flags [n] int8 is 0, not -1.
    """
    for o in range(values.shape[0]):
        near = abs(values[o]) < tiniest
        values[o] = tiniest if near & (flags[o] != 0) else values[o]


@jit
def expand(kept, bits, flags, values):
    """values [n] <- the next of kept where a bit is set, else +0; flags [TILE] int8 <- the bits.

    A table gives the places of eight elements at once, so that they do not wait for each other.
    Zeros are put in by a pass of their own: in one expression LLVM makes a branch of it, which
    random bits mispredict (3.1 ns an element against 0.7 at density 0.5; one core, CPU with
    AVX-512).
    """
    done, place = expand_vectors(kept, bits, values)
    place, whole = u64(place), values.shape[0] // 8
    for o in range(done // 8, whole):
        byte = bits[o]
        below = BELOW[byte]
        eight = values[8 * o : 8 * o + 8]
        for k in range(8):
            eight[k] = kept[place + ((below >> u64(8 * k)) & u64(255))]
        place += COUNT[byte]
    for o in range(8 * whole, values.shape[0]):
        values[o] = kept[place]
        place += (u64(bits[o >> 3]) >> u64(o & 7)) & u64(1)
    unpack_flags(bits, flags)
    blank(values, flags)


@parallel
def _pack_mapped(x, kind, scale, shift, runs, bits):
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_flag = np.empty(TILE, f32), np.empty(TILE, u8)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            values = to_float(x[first:last], kind, b_x[: last - first])
            values = mapped(values, first, scale, shift, runs, b_x[: last - first])
            part = bits[first // 8 : (last + 7) // 8]
            pack_flags(values.view(np.int32), TOP, part, b_flag)


@parallel
def _quantize(x, kind, scale, shift, runs, seed_low, seed_high, levels, S, starts, payload, bounds):
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u, b_kept = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE + WIDTH, f32)
        b_code, b_spare = np.empty(TILE + SLACK, u8), np.empty(TILE + SLACK, u8)
        b_least, b_most = np.empty(TILE // 32, i32), np.empty(TILE // 32, i32)
        b_low, b_scale = np.empty(TILE // 32, f32), np.empty(TILE // 32, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            values = to_float(x[first:last], kind, b_x[: last - first])
            values = mapped(values, first, scale, shift, runs, b_x[: last - first])
            n = compact(values, b_kept)
            bounds[i_t] = 0
            if n == 0:
                continue
            G = (n + S - 1) // S
            part = payload[starts[i_t] : starts[i_t + 1]]
            draw(tile_key(i_t, seed_low, seed_high), b_u)
            extremes(b_kept[:n], S, b_least, b_most)
            ranges_of(
                b_least, b_most, levels, part[: 2 * G].reshape(G, 2), bounds[i_t], b_low, b_scale
            )
            quantize(b_kept[:n], b_u, S, b_low, b_scale, i32(levels - 1), b_code)
            pack(b_code, n, levels, b_spare, part[2 * G :])


@parallel
def _dequantize(
    bits, starts, payload, bounds, seed_low, seed_high, levels, S, tiniest,
    scale, shift, runs, mask, out, kind, i_first,
):  # fmt: skip
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u, b_kept = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE + WIDTH, f32)
        b_code = np.empty(TILE + SLACK, u8)
        b_low, b_step = np.empty(TILE // 32, f32), np.empty(TILE // 32, f32)
        b_flag = np.empty(TILE, np.int8)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            i_w = i_first + i_t  # in the whole tensor
            start = i_w * TILE
            part = payload[starts[i_w] : starts[i_w + 1]]
            flags = bits[start // 8 : (start + last - first + 7) // 8]
            n = count(flags)
            if n > 0:
                G = (n + S - 1) // S
                draw(tile_key(i_w, seed_low, seed_high), b_u)
                unpack(part[2 * G :], levels, b_code[: n + SLACK])
                grid(part[: 2 * G].reshape(G, 2), bounds[i_w], levels, b_low, b_step)
                dequantize(b_code, b_u, S, b_low, b_step, b_kept[:n])
            b_kept[n] = f32(0)
            values = target(out[first:last], kind, b_x[: last - first])
            expand(b_kept, flags, b_flag, values)
            scale_tile(values, start, scale, shift, runs)
            lift(values, tiniest, b_flag)
            blank_unset(values, start, mask, b_flag)
            from_restored(values, kind, out[first:last])


_quantize_serial, _dequantize_serial = _quantize.serial, _dequantize.serial


@counted
def _quantize_at(
    x, kind, scale, shift, R, C, inner, row, seed, levels, S, bits, bits_nbytes, payload, nbytes,
    bounds,
):  # fmt: skip
    """The serial loop, with all but x by addresses: an array argument costs 1 us a call."""
    T = (x.shape[0] + TILE - 1) // TILE
    starts = _starts_of(array_at(bits, bits_nbytes, u8), levels, S)
    by = rows_at(scale, R, C), rows_at(shift, R, C), (inner, row)
    low, high = u32(seed & 0xFFFFFFFF), u32((seed >> 32) & 0xFFFFFFFF)
    out = array_at(payload, nbytes, u8), bounds_at(bounds, T)
    _quantize_serial(x, kind, *by, low, high, levels, S, starts, *out)


@counted
def _dequantize_at(
    bits, bits_nbytes, payload, nbytes, bounds, T, seed, levels, S, tiniest, scale, shift, R, C,
    inner, row, mask, mask_nbytes, out, kind, first,
):  # fmt: skip
    flags = array_at(bits, bits_nbytes, u8)
    source = array_at(payload, nbytes, u8), bounds_at(bounds, T)
    by = rows_at(scale, R, C), rows_at(shift, R, C), (inner, row), array_at(mask, mask_nbytes, u8)
    low, high = u32(seed & 0xFFFFFFFF), u32((seed >> 32) & 0xFFFFFFFF)
    settings = low, high, levels, S, f32(tiniest)
    starts = _starts_of(flags, levels, S)
    _dequantize_serial(flags, starts, *source, *settings, *by, out, kind, first)
