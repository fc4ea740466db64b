"""Dither for the non-zeros (specification: `reference/nonzero.py`).

Bits and the size of each tile's payload come first. `nonzero_quantize` makes a payload of the sum
of the sizes, for which the host waits; `nonzero_quantize_into` is given one, and waits for nothing.
One tile a program.

Whether a payload is as long as its bitmap calls for is not checked, for the host would wait: of
one that is too short nothing beyond its end is read, and the tiles that it cuts restore to NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import TILE as TILE_SIZE
from elbowroom.kernels.layout import nonzero_tile_nbytes, tiles
from elbowroom.kernels.triton.affine import blank_unset, channels, is_short, mapped, scale_tile
from elbowroom.kernels.triton.bits import pack_bits, set_bits
from elbowroom.kernels.triton.device import (
    TILE,
    load_float,
    pack,
    part_nbytes,
    places,
    program_tiles,
    store_restored,
    tile_key,
    tile_payload,
    uniform,
    unpack,
)
from elbowroom.kernels.triton.dither import load_grid, store_ranges
from elbowroom.kernels.triton.launch import launch, patterns, split_seed, starts_of, words


def nonzero_quantize(
    x: Tensor,
    seed: int | Tensor,
    levels: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    x = mapped(x, scale, shift, inner)
    bits = pack_bits(x)
    starts = _starts(bits, x.numel(), levels, group_size)
    payload = outputs.bytes_of(x, int(starts[-1]))  # the host waits
    return bits, payload, _filled(x, starts, payload, None, seed, levels, group_size)


def nonzero_quantize_into(
    x: Tensor,
    seed: int | Tensor,
    levels: int,
    group_size: int,
    payload: Tensor,
    spill: Tensor,
    used: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor]:
    x = mapped(x, scale, shift, inner)
    bits = pack_bits(x)
    starts = _starts(bits, x.numel(), levels, group_size)
    used.copy_(starts[-1:])
    return bits, _filled(x, starts, payload, spill, seed, levels, group_size)


def _filled(
    x: Tensor,
    starts: Tensor,
    payload: Tensor,
    spill: Tensor | None,
    seed: int | Tensor,
    levels: int,
    group_size: int,
) -> Tensor:
    """Fill the payload of x; return the bounds."""
    bounds = outputs.bounds(x)
    source, kind = words(x)
    most = nonzero_tile_nbytes(levels, group_size)
    there = starts, payload, spill, payload.numel(), most
    args = source, *there, patterns(bounds), x.numel(), *split_seed(seed)
    launch(_quantize, tiles(x.numel()), *args, LEVELS=levels, S=group_size, KIND=kind, R=1)
    return bounds


def nonzero_dequantize(
    bits: Tensor,
    payload: Tensor,
    bounds: Tensor,
    seed: int | Tensor,
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
    n = first * TILE_SIZE + out.numel()
    starts = _starts(bits, n, levels, group_size)
    target, kind = words(out)
    tiniest = max(2.0**-126, torch.finfo(out.dtype).tiny)
    sizes = out.numel(), first, tiniest
    by = channels(scale, shift, inner, mask, n)
    there = starts, payload, spill, payload.numel(), nonzero_tile_nbytes(levels, group_size)
    args = bits, *there, patterns(bounds), target, *sizes, *by, *split_seed(seed)
    constants = {"LEVELS": levels, "S": group_size, "KIND": kind, "SHORT": is_short(scale, inner)}
    launch(_dequantize, tiles(out.numel()), *args, **constants, R=1)


def _starts(bits: Tensor, numel: int, levels: int, group_size: int) -> Tensor:
    return starts_of(_sizes, bits, numel, bits.numel(), LEVELS=levels, S=group_size)


@triton.jit
def _sizes(p_bits, p_starts, N_BYTES, LEVELS: tl.constexpr, S: tl.constexpr, R: tl.constexpr):
    i_t, _ = program_tiles(0, R)
    o_b = i_t[:, None] * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]  # [R, TILE / 8]
    b_b = tl.load(p_bits + o_b, mask=o_b < N_BYTES, other=0).to(tl.int32)
    n = tl.sum(set_bits(b_b), axis=1)  # [R]
    tl.store(
        p_starts + 1 + i_t, part_nbytes(n, LEVELS, S).to(tl.int64), mask=i_t * (TILE // 8) < N_BYTES
    )


@triton.jit(do_not_specialize=["N_PAYLOAD", "MOST", "seed_low", "seed_high"])
def _quantize(
    p_x, p_starts, p_payload, p_spill, N_PAYLOAD, MOST, p_bounds, N, seed_low, seed_high,
    LEVELS: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = TILE // S
    i_t = tl.program_id(0).to(tl.int64)
    p_x += i_t * TILE
    o_e = tl.arange(0, TILE)
    b_x = load_float(p_x + o_e, i_t * TILE + o_e < N, KIND)  # [TILE]
    b_place, n = places(b_x != 0)
    b_x = load_float(p_x + b_place, o_e < n, KIND)  # the non-zeros, in order

    p_zero = p_bounds + 2 * i_t + tl.arange(0, 2)
    tl.store(p_zero, tl.zeros([2], tl.int16), mask=tl.zeros([2], tl.int32) == n)
    p_tile, _ = tile_payload(p_payload, p_spill, p_starts, i_t, i_t >= 0, N_PAYLOAD, MOST)
    p_ranges = p_tile + 2 * tl.arange(0, G)[None, :]
    p_bounds += 2 * i_t + tl.zeros([1], tl.int32)
    b_x, m_e = tl.reshape(b_x, [1, G, S]), tl.reshape(o_e < n, [1, G, S])
    b_low, b_scale = store_ranges(p_ranges, p_bounds, b_x, m_e, LEVELS)
    p_codes = p_tile + 2 * ((n + S - 1) // S) + tl.zeros([1, 1], tl.int32)
    b_key = tile_key(i_t, seed_low, seed_high)
    pack(p_x, p_codes, n, b_key, b_low, b_scale, b_place[None, :], LEVELS, S, KIND)


@triton.jit(do_not_specialize=["first", "N_PAYLOAD", "MOST", "seed_low", "seed_high"])
def _dequantize(
    p_bits, p_starts, p_payload, p_spill, N_PAYLOAD, MOST, p_bounds, p_out, N, first, tiniest,
    p_scale, p_shift, p_mask, inner, C, share, seed_low, seed_high,
    LEVELS: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, TILE)
    m_x = i_t * TILE + o_x < N
    p_out += i_t * TILE
    i_t += first  # in the whole tensor
    b_byte = tl.load(p_bits + i_t * (TILE // 8) + o_x // 8, mask=m_x, other=0).to(tl.int32)
    m_e = ((b_byte >> (o_x % 8)) & 1) != 0
    b_count = tl.cumsum(m_e.to(tl.int32), axis=0)
    n = tl.max(b_count, axis=0)
    o_e = tl.where(m_e, b_count - 1, 0)  # place among the non-zeros
    p_tile, m_t = tile_payload(p_payload, p_spill, p_starts, i_t, i_t >= 0, N_PAYLOAD, MOST)
    m_g = tl.where(m_t, m_e, False)
    b_low, b_step = load_grid(p_tile + 2 * (o_e // S), p_bounds + 2 * i_t, m_g, n > 0, LEVELS)
    b_code = unpack(p_tile + 2 * ((n + S - 1) // S), n, o_e, m_g, LEVELS)
    b_u = uniform(tile_key(i_t, seed_low, seed_high), o_e)
    b_x = b_low + b_step * (b_code.to(tl.float32) - b_u)
    b_x = tl.where(m_e, tl.where(m_t, b_x, float("nan")), 0.0)
    b_x = scale_tile(b_x, i_t, o_x, m_x, p_scale, p_shift, inner, C, share, SHORT)
    b_x = tl.where(m_e & (tl.abs(b_x) < tiniest), tiniest, b_x)
    b_x = blank_unset(b_x, i_t, o_x, m_x, p_mask)
    store_restored(p_out + o_x, b_x, m_x, KIND)
