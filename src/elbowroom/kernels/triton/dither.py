"""Subtractive dither (specification: `reference/dither.py`)."""

import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import TILE as TILE_SIZE
from elbowroom.kernels.layout import tiles
from elbowroom.kernels.triton.affine import blank_unset, channels, is_short, mapped, scale_tile
from elbowroom.kernels.triton.device import (
    NAN_BF16,
    TILE,
    bf16_directed,
    bf16_value,
    codes_nbytes,
    extremes,
    group_elements,
    inverse,
    load_float,
    pack,
    program_tiles,
    store_restored,
    tile_key,
    uniform,
    unpack,
)
from elbowroom.kernels.triton.launch import launch, patterns, split_seed, words


def dither_quantize(
    x: Tensor,
    seed: int | Tensor,
    levels: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, ranges, bounds = outputs.dither(x, levels, group_size)
    source, kind = words(mapped(x, scale, shift, inner))
    args = source, codes, ranges, patterns(bounds), x.numel(), *split_seed(seed)
    launch(_quantize, tiles(x.numel()), *args, LEVELS=levels, S=group_size, KIND=kind)
    return codes, ranges, bounds


def dither_dequantize(
    codes: Tensor,
    ranges: Tensor,
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
) -> None:
    target, kind = words(out)
    by = channels(scale, shift, inner, mask, first * TILE_SIZE + out.numel())
    args = codes, ranges, patterns(bounds), target, out.numel(), first, *by, *split_seed(seed)
    constants = {"LEVELS": levels, "S": group_size, "KIND": kind, "SHORT": is_short(scale, inner)}
    launch(_dequantize, tiles(out.numel()), *args, **constants)


@triton.jit
def whole(b_v, UP: tl.constexpr):
    """floor or ceil of a value that is not NaN, within 0..255.

    `tl.ceil` takes subnormals for 0 on NVIDIA (3.7).
    """
    b_v = tl.minimum(tl.maximum(b_v, 0.0), 255.0)
    b_whole = b_v.to(tl.int32).to(tl.float32)
    return b_whole + (b_v > b_whole).to(tl.float32) if UP else b_whole


@triton.jit
def store_ranges(p_ranges, p_bounds, b_x, m_e, LEVELS: tl.constexpr):
    """Store the metadata of tiles b_x [R, G, S]; return low and 1 / step [R, G].

    They go to p_bounds [R] and p_ranges [R, G], and the place behind each. m_e [R, G, S] tells
    which elements exist. Nothing is stored for a tile or a group without any.
    """
    b_least, b_most, m_usable = extremes(b_x, m_e)  # [R, G]
    m_g = tl.max(m_e.to(tl.int32), axis=2) != 0
    m_t = tl.min((m_usable | ~m_g).to(tl.int32), axis=1) != 0  # [R]
    m_some = tl.max(m_g.to(tl.int32), axis=1) != 0
    b_lo = tl.min(tl.where(m_g, b_least, float("inf")), axis=1)
    b_hi = tl.max(tl.where(m_g, b_most, float("-inf")), axis=1)
    b_lo = bf16_directed(tl.where(m_some & m_t, b_lo, 0.0), UP=False)
    b_hi = bf16_directed(tl.where(m_some & m_t, b_hi, 0.0), UP=True)
    tl.store(p_bounds, tl.where(m_t, b_lo, NAN_BF16).to(tl.int16), mask=m_some)
    tl.store(p_bounds + 1, tl.where(m_t, b_hi, NAN_BF16).to(tl.int16), mask=m_some)

    b_lo = bf16_value(b_lo)[:, None]
    b_unit = bf16_value(b_hi)[:, None] * (1 / 255) - b_lo * (1 / 255)  # [R, 1]
    m_real = m_t[:, None] & m_g
    b_scale = inverse(b_unit)
    b_a = whole(tl.where(m_real, (b_least - b_lo) * b_scale, 0.0), UP=False)
    b_b = whole(tl.where(m_real, (b_most - b_lo) * b_scale, 0.0), UP=True)
    tl.store(p_ranges, b_a.to(tl.uint8), mask=m_g)
    tl.store(p_ranges + 1, b_b.to(tl.uint8), mask=m_g)
    return b_lo + b_a * b_unit, inverse((b_b - b_a) * b_unit * (1 / (LEVELS - 1)))


@triton.jit
def load_grid(p_ranges, p_bounds, m_g, m_t, LEVELS: tl.constexpr):
    """Loads the grid of each group: what code 0 decodes to before the dither, and the step."""
    b_lo = bf16_value(tl.load(p_bounds, mask=m_t, other=0))
    b_hi = bf16_value(tl.load(p_bounds + 1, mask=m_t, other=0))
    b_unit = b_hi * (1 / 255) - b_lo * (1 / 255)
    b_a = tl.load(p_ranges, mask=m_g, other=0).to(tl.float32)
    b_b = tl.load(p_ranges + 1, mask=m_g, other=0).to(tl.float32)
    b_step = (b_b - b_a) * b_unit * (1 / (LEVELS - 1))
    return (b_lo + b_a * b_unit) + b_step * 0.5, b_step


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _quantize(
    p_x, p_codes, p_ranges, p_bounds, N, seed_low, seed_high,
    LEVELS: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = TILE // S
    i_t, n = program_tiles(N, R)
    o_e = group_elements(S)
    m_e = o_e < n[:, None, None]  # [R, G, S]
    b_x = load_float(p_x + (i_t * TILE)[:, None, None] + o_e, m_e, KIND)
    p_ranges += 2 * ((i_t * G)[:, None] + tl.arange(0, G)[None, :])  # [R, G]
    b_low, b_scale = store_ranges(p_ranges, p_bounds + 2 * i_t, b_x, m_e, LEVELS)
    p_x += (i_t * TILE)[:, None]
    p_codes += (i_t * codes_nbytes(LEVELS, TILE))[:, None]
    b_key = tile_key(i_t, seed_low, seed_high)[:, None]
    pack(p_x, p_codes, n[:, None], b_key, b_low, b_scale, None, LEVELS, S, KIND)


@triton.jit(do_not_specialize=["first", "seed_low", "seed_high"])
def _dequantize(
    p_codes, p_ranges, p_bounds, p_out, N, first, p_scale, p_shift, p_mask, inner, C, share,
    seed_low, seed_high,
    LEVELS: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = TILE // S
    i_t, n = program_tiles(N, R)
    p_out += (i_t * TILE)[:, None, None]
    i_t += first  # in the whole tensor
    b_key = tile_key(i_t, seed_low, seed_high)[:, None, None]
    i_t, n = i_t[:, None, None], n[:, None, None]
    o_e = group_elements(S)
    m_e = o_e < n  # [R, G, S]
    o_g = tl.arange(0, G)[None, :, None]
    p_ranges += 2 * (i_t * G + o_g)  # [R, G, 1]
    b_low, b_step = load_grid(p_ranges, p_bounds + 2 * i_t, o_g * S < n, n > 0, LEVELS)
    b_code = unpack(p_codes + i_t * codes_nbytes(LEVELS, TILE), n, o_e, m_e, LEVELS)
    b_x = b_low + b_step * (b_code.to(tl.float32) - uniform(b_key, o_e))
    b_x = scale_tile(b_x, i_t, o_e, m_e, p_scale, p_shift, inner, C, share, SHORT)
    b_x = blank_unset(b_x, i_t, o_e, m_e, p_mask)
    store_restored(p_out + o_e, b_x, m_e, KIND)
