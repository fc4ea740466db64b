"""Scale and shift by channel under a bitmap (specification: `reference/affine.py`).

Dequantizers do it in their own pass (`scale_tile`, `blank_unset`). Quantizers read x twice, the
second time in the order of the packed codes (`device.pack`): for them it is a pass of its own, in
float32 (`mapped`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels.layout import TILE as TILE_SIZE
from elbowroom.kernels.layout import tiles
from elbowroom.kernels.triton.device import TILE, load_float, program_tiles, store_float
from elbowroom.kernels.triton.launch import launch, words


def affine(
    x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: Tensor | None, out: Tensor
) -> None:
    (values, kind), (target, out_kind) = words(x), words(out)
    args = values, target, x.numel(), *channels(scale, shift, inner, bits, x.numel())
    launch(_affine, tiles(x.numel()), *args, SHORT=is_short(scale, inner), FROM=kind, TO=out_kind)


def mapped(x: Tensor, scale: Tensor | None, shift: Tensor | None, inner: int) -> Tensor:
    """x, or x * scale + shift as a float32 tensor of its own."""
    if scale is None or shift is None:
        return x
    y = torch.empty_like(x, dtype=torch.float32)
    affine(x, scale, shift, inner, None, y)
    return y


def channels(
    scale: Tensor | None, shift: Tensor | None, inner: int, bits: Tensor | None, n: int
) -> tuple[Any, ...]:
    """Returns what `scale_tile` and `blank_unset` take: scale, shift, mask, inner, C, share."""
    if scale is None:
        return None, None, bits, inner, 1, n
    channels = scale.shape[-1]
    return scale, shift, bits, inner, channels, max(n // (scale.numel() // channels), 1)


def is_short(scale: Tensor | None, inner: int) -> bool:
    """Returns whether the channels repeat all through.

    Places in their period must fit into 32 bits.
    """
    return scale is None or (scale.dim() == 1 and inner * scale.numel() < 2**31 - TILE_SIZE)


@triton.jit
def scale_tile(b_x, i_t, o_e, m_e, p_scale, p_shift, inner, C, share, SHORT: tl.constexpr):
    """b_x * scale + shift by channel, if there are any, for elements o_e of tile i_t.

    A row of C channels serves `share` elements. All arguments broadcast.
    """
    b_y = b_x
    if p_scale is not None:
        if SHORT:
            b_first = (i_t * TILE) % (tl.full([1], inner, tl.int64) * C)  # in the tile's period
            o_c = ((b_first.to(tl.int32) + o_e) // inner) % C
        else:
            b_at = tl.full([1], TILE, tl.int64) * i_t + o_e
            o_c = b_at // share * C + (b_at % share // inner) % C
        b_scale = tl.load(p_scale + o_c, mask=m_e, other=0)
        b_y = b_x * b_scale + tl.load(p_shift + o_c, mask=m_e, other=0)
    return b_y


@triton.jit
def blank_unset(b_x, i_t, o_e, m_e, p_mask):
    """0 where mask, if there is one, has no bit."""
    b_y = b_x
    if p_mask is not None:
        b_byte = tl.load(p_mask + (i_t * TILE + o_e) // 8, mask=m_e, other=0).to(tl.int32)
        b_y = tl.where((b_byte >> (o_e % 8)) & 1 != 0, b_x, 0.0)
    return b_y


@triton.jit
def _affine(
    p_x, p_out, N, p_scale, p_shift, p_mask, inner, C, share,
    SHORT: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    i_t, n = program_tiles(N, R)
    i_t, n = i_t[:, None], n[:, None]
    o_e = tl.arange(0, TILE)[None, :]
    m_e = o_e < n  # [R, TILE]
    b_x = load_float(p_x + i_t * TILE + o_e, m_e, FROM)
    b_x = scale_tile(b_x, i_t, o_e, m_e, p_scale, p_shift, inner, C, share, SHORT)
    b_x = blank_unset(b_x, i_t, o_e, m_e, p_mask)
    store_float(p_out + i_t * TILE + o_e, b_x, m_e, TO)
