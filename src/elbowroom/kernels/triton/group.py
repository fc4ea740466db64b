"""Groups with their own range and stochastic rounding (specification: `reference/group.py`)."""

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
    unpack,
)
from elbowroom.kernels.triton.launch import launch, patterns, split_seed, words


def group_quantize(
    x: Tensor,
    seed: int | Tensor,
    levels: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, step, low = outputs.group(x, levels, group_size)
    source, kind = words(mapped(x, scale, shift, inner))
    args = source, codes, patterns(step), patterns(low), x.numel(), *split_seed(seed)
    launch(_quantize, tiles(x.numel()), *args, LEVELS=levels, S=group_size, KIND=kind)
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
    target, kind = words(out)
    by = channels(scale, shift, inner, mask, first * TILE_SIZE + out.numel())
    args = codes, patterns(step), patterns(low), target, out.numel(), first, *by
    constants = {"LEVELS": levels, "S": group_size, "KIND": kind, "SHORT": is_short(scale, inner)}
    launch(_dequantize, tiles(out.numel()), *args, **constants)


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _quantize(
    p_x, p_codes, p_step, p_low, N, seed_low, seed_high,
    LEVELS: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = TILE // S
    i_t, n = program_tiles(N, R)
    o_e = group_elements(S)
    m_e = o_e < n[:, None, None]  # [R, G, S]
    b_x = load_float(p_x + (i_t * TILE)[:, None, None] + o_e, m_e, KIND)
    b_least, b_most, m_usable = extremes(b_x, m_e)  # [R, G]
    b_lows = bf16_directed(b_least, UP=False)
    b_low = bf16_value(b_lows)
    b_steps = bf16_directed((b_most - b_low) * (1 / (LEVELS - 1)), UP=True)
    b_scale = tl.where(m_usable, inverse(bf16_value(b_steps)), 0.0)

    o_g = tl.arange(0, G)[None, :]
    m_g = o_g * S < n[:, None]
    o_out = (i_t * G)[:, None] + o_g
    tl.store(p_low + o_out, b_lows.to(tl.int16), mask=m_g)
    tl.store(p_step + o_out, tl.where(m_usable, b_steps, NAN_BF16).to(tl.int16), mask=m_g)
    p_x += (i_t * TILE)[:, None]
    p_codes += (i_t * codes_nbytes(LEVELS, TILE))[:, None]
    b_key = tile_key(i_t, seed_low, seed_high)[:, None]
    pack(p_x, p_codes, n[:, None], b_key, b_low, b_scale, None, LEVELS, S, KIND)


@triton.jit(do_not_specialize=["first"])
def _dequantize(
    p_codes, p_step, p_low, p_out, N, first, p_scale, p_shift, p_mask, inner, C, share,
    LEVELS: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = TILE // S
    i_t, n = program_tiles(N, R)
    i_t, n = i_t[:, None, None], n[:, None, None]
    p_out += i_t * TILE
    i_t += first  # in the whole tensor
    o_e = group_elements(S)
    m_e = o_e < n
    o_g = tl.arange(0, G)[None, :, None]
    m_g = o_g * S < n
    b_low = bf16_value(tl.load(p_low + i_t * G + o_g, mask=m_g, other=0))  # [R, G, 1]
    b_step = bf16_value(tl.load(p_step + i_t * G + o_g, mask=m_g, other=0))
    b_code = unpack(p_codes + i_t * codes_nbytes(LEVELS, TILE), n, o_e, m_e, LEVELS)
    b_x = b_low + b_step * b_code.to(tl.float32)
    b_x = scale_tile(b_x, i_t, o_e, m_e, p_scale, p_shift, inner, C, share, SHORT)
    b_x = blank_unset(b_x, i_t, o_e, m_e, p_mask)
    store_restored(p_out + o_e, b_x, m_e, KIND)
