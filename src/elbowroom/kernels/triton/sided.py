"""Dither on either side of a threshold that a bitmap tells (specification: `reference/sided.py`).

The bitmap gives the sizes, whose sum the host reads, and waits for; `sided_quantize_into` is given
memory for the payload, and waits for nothing. One tile a program. x is read twice, the second time
from the cache; written are the payload and 8 bytes a tile.

Of a payload that is too short nothing beyond its end is read; the tiles that it cuts restore to
NaN.
"""

import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import TILE as TILE_SIZE
from elbowroom.kernels.layout import sided_tile_nbytes, tiles
from elbowroom.kernels.triton.affine import blank_unset, channels, is_short, mapped, scale_tile
from elbowroom.kernels.triton.bits import set_bits
from elbowroom.kernels.triton.device import (
    NAN_BF16,
    TILE,
    bf16_directed,
    bf16_value,
    extremes,
    inverse,
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


def sided_quantize(
    x: Tensor,
    bits: Tensor,
    seed: int | Tensor,
    upper: int,
    lower: int,
    group_size: int,
    fold: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor]:
    settings = {"UPPER": upper, "LOWER": lower, "S": group_size, "F": fold}
    starts = starts_of(_sizes, bits, x.numel(), x.numel(), **settings)
    payload = outputs.bytes_of(x, int(starts[-1]))  # the host waits
    x = mapped(x, scale, shift, inner)
    return payload, _filled(x, bits, starts, payload, None, seed, settings)


def sided_quantize_into(
    x: Tensor,
    bits: Tensor,
    seed: int | Tensor,
    upper: int,
    lower: int,
    group_size: int,
    fold: int,
    payload: Tensor,
    spill: Tensor,
    used: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> Tensor:
    settings = {"UPPER": upper, "LOWER": lower, "S": group_size, "F": fold}
    starts = starts_of(_sizes, bits, x.numel(), x.numel(), **settings)
    used.copy_(starts[-1:])
    x = mapped(x, scale, shift, inner)
    return _filled(x, bits, starts, payload, spill, seed, settings)


def _filled(
    x: Tensor,
    bits: Tensor,
    starts: Tensor,
    payload: Tensor,
    spill: Tensor | None,
    seed: int | Tensor,
    settings: dict[str, int],
) -> Tensor:
    """Fill the payload of x; return the bounds."""
    bounds = outputs.bounds(x, 2)
    source, kind = words(x)
    there = starts, payload, spill, payload.numel(), sided_tile_nbytes(*settings.values())
    args = source, bits, *there, patterns(bounds), x.numel(), *split_seed(seed)
    launch(_quantize, tiles(x.numel()), *args, **settings, KIND=kind, R=1)
    return bounds


def sided_dequantize(
    bits: Tensor,
    payload: Tensor,
    bounds: Tensor,
    seed: int | Tensor,
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
    n = first * TILE_SIZE + out.numel()
    settings = {"UPPER": upper, "LOWER": lower, "S": group_size, "F": fold}
    starts = starts_of(_sizes, bits, n, n, **settings)
    target, kind = words(out)
    by = channels(scale, shift, inner, mask, n)
    there = starts, payload, spill, payload.numel(), sided_tile_nbytes(*settings.values())
    sizes = out.numel(), first
    args = bits, *there, patterns(bounds), target, *sizes, *by, *split_seed(seed)
    constants = settings | {"KIND": kind, "SHORT": is_short(scale, inner)}
    launch(_dequantize, tiles(out.numel()), *args, **constants, R=1)


@triton.jit
def lower_nbytes(n, LEVELS: tl.constexpr, S: tl.constexpr, F: tl.constexpr):
    size = part_nbytes((n + F - 1) // F, LEVELS, S)
    return size + 2 * tl.minimum(n, 1) if F > 1 else size


@triton.jit
def _sizes(
    p_bits, p_starts, N,
    UPPER: tl.constexpr, LOWER: tl.constexpr, S: tl.constexpr, F: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    i_t, n = program_tiles(N, R)
    o_b = i_t[:, None] * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]  # [R, TILE / 8]
    b_b = tl.load(p_bits + o_b, mask=o_b < (N + 7) // 8, other=0).to(tl.int32)
    n_b = tl.minimum(tl.maximum(N - 8 * o_b, 0), 8).to(tl.int32)  # of its bits belong to elements
    b_b &= (1 << n_b) - 1
    n_up = tl.sum(set_bits(b_b), axis=1)  # [R]
    b_size = part_nbytes(n_up, UPPER, S) + lower_nbytes(n - n_up, LOWER, S, F)
    tl.store(p_starts + 1 + i_t, b_size.to(tl.int64), mask=n > 0)


@triton.jit(do_not_specialize=["N_PAYLOAD", "MOST", "seed_low", "seed_high"])
def _quantize(
    p_x, p_bits, p_starts, p_payload, p_spill, N_PAYLOAD, MOST, p_bounds, N, seed_low, seed_high,
    UPPER: tl.constexpr, LOWER: tl.constexpr, S: tl.constexpr, F: tl.constexpr, KIND: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    p_x += i_t * TILE
    o_e = tl.arange(0, TILE)
    m_x = i_t * TILE + o_e < N
    b_byte = tl.load(p_bits + i_t * (TILE // 8) + o_e // 8, mask=m_x, other=0).to(tl.int32)
    m_up = m_x & (((b_byte >> (o_e % 8)) & 1) != 0)
    b_key = tile_key(i_t, seed_low, seed_high)
    p_tile, _ = tile_payload(p_payload, p_spill, p_starts, i_t, i_t >= 0, N_PAYLOAD, MOST)
    n_up = tl.sum(m_up.to(tl.int32), axis=0)
    p_bounds += 4 * i_t
    encode_side(p_x, p_tile, p_bounds, m_up, 0, b_key, UPPER, S, 1, KIND)
    p_tile += part_nbytes(n_up, UPPER, S)
    encode_side(p_x, p_tile, p_bounds + 2, m_x & ~m_up, n_up, b_key, LOWER, S, F, KIND)


@triton.jit
def encode_side(
    p_x, p_part, p_bounds, m_side, o_u, b_key,
    LEVELS: tl.constexpr, S: tl.constexpr, F: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Ranges and codes of the elements of a tile where m_side [TILE] is set."""
    o_e = tl.arange(0, TILE)
    b_place, n = places(m_side)
    b_x = load_float(p_x + b_place, o_e < n, KIND)  # its values, in order
    p_zero = p_bounds + tl.arange(0, 2)
    tl.store(p_zero, tl.zeros([2], tl.int16), mask=tl.zeros([2], tl.int32) == n)
    p_bounds += tl.zeros([1], tl.int32)
    if F == 1:
        store_codes(p_x, p_part, p_bounds, b_x, b_place, n, o_u, b_key, LEVELS, S, KIND)
    else:
        b_mean = mean_of(b_x, o_e < n, n)
        p_head = p_part + tl.arange(0, 2)
        tl.store(
            p_head, (b_mean >> 8 * tl.arange(0, 2)).to(tl.uint8), mask=tl.zeros([2], tl.int32) < n
        )
        b_u = uniform(b_key, o_u + o_e)
        m_real = b_mean != NAN_BF16  # else one NaN, which poisons this side of the tile
        b_x = sign(b_u) * (b_x - bf16_value(b_mean))
        b_x = tl.where((o_e < n) & m_real, b_x, tl.where((o_e == 0) & (n > 0), float("nan"), 0.0))
        n = (n + F - 1) // F
        b_x = folded(b_x, n, F)
        store_codes(None, p_part + 2, p_bounds, b_x, b_x, n, o_u, b_key, LEVELS, S, KIND)


@triton.jit
def store_codes(
    p_x, p_part, p_bounds, b_x, b_place, n, o_u, b_key,
    LEVELS: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Ranges and codes of the first n of b_x; where they lie, or themselves, as for `pack`."""
    SIZE: tl.constexpr = b_x.shape[0]
    GROUP: tl.constexpr = S if S < SIZE else SIZE
    G: tl.constexpr = SIZE // GROUP
    p_ranges = p_part + 2 * tl.arange(0, G)[None, :]
    m_e = tl.reshape(tl.arange(0, SIZE) < n, [1, G, GROUP])
    b_low, b_scale = store_ranges(p_ranges, p_bounds, tl.reshape(b_x, [1, G, GROUP]), m_e, LEVELS)
    p_codes = p_part + 2 * ((n + S - 1) // S) + tl.zeros([1, 1], tl.int32)
    pack(p_x, p_codes, n, b_key, b_low, b_scale, b_place[None, :], LEVELS, GROUP, KIND, o_u)


@triton.jit
def mean_of(b_x, m_e, n):
    """The bits of the mean of the values in m_e as bf16, NaN where one of them is not usable."""
    b_least, b_most, m_usable = extremes(b_x[None, None, :], m_e[None, None, :])
    m_real = (tl.max(m_usable.to(tl.int32)) != 0) & (n > 0)
    b_lo = bf16_value(bf16_directed(tl.where(m_real, tl.max(b_least), 0.0), UP=False))
    b_hi = bf16_value(bf16_directed(tl.where(m_real, tl.max(b_most), 0.0), UP=True))
    b_unit = b_hi * (1 / 255) - b_lo * (1 / 255)
    b_each = tl.where(m_e & m_real, (b_x - b_lo) * inverse(b_unit) + 0.5, 0.0)
    b_each = tl.minimum(tl.maximum(b_each, 0.0), 255.0).to(tl.int32)
    b_mean = (tl.sum(tl.where(m_e, b_each, 0), axis=0) + n // 2) // tl.maximum(n, 1)
    b_mean = bf16_directed(b_lo + b_mean.to(tl.float32) * b_unit, UP=False)
    return tl.where(m_real, b_mean, NAN_BF16)


@triton.jit
def sign(b_u):
    """1 or -1 by the last bit of the noise."""
    return 1.0 - 2.0 * ((b_u * 65536).to(tl.int32) & 1).to(tl.float32)


@triton.jit
def folded(b_x, m, F: tl.constexpr):
    """[TILE / F] <- the sums of those that are m apart, in order; zeros stand behind the last."""
    o_z = tl.arange(0, TILE // F)
    b_z = tl.zeros([TILE // F], tl.float32)
    for j in tl.static_range(F):
        b_z += tl.where(o_z < m, tl.gather(b_x, tl.minimum(o_z + j * m, TILE - 1), 0), 0.0)
    return b_z


@triton.jit(do_not_specialize=["first", "N_PAYLOAD", "MOST", "seed_low", "seed_high"])
def _dequantize(
    p_bits, p_starts, p_payload, p_spill, N_PAYLOAD, MOST, p_bounds, p_out, N, first, p_scale,
    p_shift, p_mask, inner, C, share, seed_low, seed_high,
    UPPER: tl.constexpr, LOWER: tl.constexpr, S: tl.constexpr, F: tl.constexpr, KIND: tl.constexpr,
    SHORT: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, TILE)
    m_x = i_t * TILE + o_x < N
    p_out += i_t * TILE
    i_t += first  # in the whole tensor
    b_byte = tl.load(p_bits + i_t * (TILE // 8) + o_x // 8, mask=m_x, other=0).to(tl.int32)
    m_up = m_x & (((b_byte >> (o_x % 8)) & 1) != 0)
    n_up = tl.sum(m_up.to(tl.int32), axis=0)
    p_tile, m_t = tile_payload(p_payload, p_spill, p_starts, i_t, i_t >= 0, N_PAYLOAD, MOST)
    p_bounds += 4 * i_t
    b_key = tile_key(i_t, seed_low, seed_high)
    b_up = decode_side(p_tile, p_bounds, m_up, m_t, 0, b_key, UPPER, S, 1)
    p_tile += part_nbytes(n_up, UPPER, S)
    b_low = decode_side(p_tile, p_bounds + 2, m_x & ~m_up, m_t, n_up, b_key, LOWER, S, F)
    b_x = tl.where(m_t, tl.where(m_up, b_up, b_low), float("nan"))
    b_x = scale_tile(b_x, i_t, o_x, m_x, p_scale, p_shift, inner, C, share, SHORT)
    b_x = blank_unset(b_x, i_t, o_x, m_x, p_mask)
    store_restored(p_out + o_x, b_x, m_x, KIND)


@triton.jit
def decode_side(
    p_part, p_bounds, m_side, m_t, o_u, b_key,
    LEVELS: tl.constexpr, S: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """The values of the elements of a tile where m_side [TILE] is set; elsewhere anything."""
    b_count = tl.cumsum(m_side.to(tl.int32), axis=0)
    n = tl.max(b_count, axis=0)
    o_e = tl.where(m_side, b_count - 1, 0)  # place among its values
    m_g, b_mean, b_sign = tl.where(m_t, m_side, False), 0.0, 1.0
    if F > 1:
        p_byte = p_part + tl.zeros([1], tl.int32)
        m_some = tl.where(m_t, tl.zeros([1], tl.int32) < n, False)
        b_bits = tl.load(p_byte, mask=m_some, other=0).to(tl.int32)
        b_bits |= tl.load(p_byte + 1, mask=m_some, other=0).to(tl.int32) << 8
        b_mean, b_sign = bf16_value(b_bits), sign(uniform(b_key, o_u + o_e))
        p_part += 2
    n = (n + F - 1) // F
    o_e = o_e % tl.maximum(n, 1)
    b_low, b_step = load_grid(p_part + 2 * (o_e // S), p_bounds, m_g, n > 0, LEVELS)
    b_code = unpack(p_part + 2 * ((n + S - 1) // S), n, o_e, m_g, LEVELS)
    b_x = b_low + b_step * (b_code.to(tl.float32) - uniform(b_key, o_u + o_e))
    return b_sign * b_x + b_mean if F > 1 else b_x
