"""Scale and shift by channel under a bitmap (specification: `reference/affine.py`)."""

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
    values, kind = words(x)
    period = inner * scale.numel()  # elements after which the channels repeat
    args = values, scale, shift, bits, words(out)[0], x.numel(), inner, scale.numel()
    launch(_affine, tiles(x.numel()), *args, SHORT=period < 2**31 - TILE_SIZE, KIND=kind)


@triton.jit
def _affine(
    p_x,
    p_scale,
    p_shift,
    p_bits,
    p_out,
    N,
    inner,
    C,
    SHORT: tl.constexpr,
    KIND: tl.constexpr,
    R: tl.constexpr,
):
    i_t, n = program_tiles(N, R)
    i_t, n = i_t[:, None], n[:, None]
    o_e = tl.arange(0, TILE)[None, :]
    m_e = o_e < n  # [R, TILE]
    b_first = (i_t * TILE) % (tl.full([1, 1], inner, tl.int64) * C)  # in the tile's period
    if SHORT:  # a place in the period fits into 32 bits
        b_first = b_first.to(tl.int32)
    o_c = ((b_first + o_e) // inner) % C
    b_x = load_float(p_x + i_t * TILE + o_e, m_e, KIND)
    b_scale = tl.load(p_scale + o_c, mask=m_e, other=0)
    b_y = b_x * b_scale + tl.load(p_shift + o_c, mask=m_e, other=0)
    if p_bits is not None:
        b_byte = tl.load(p_bits + (i_t * TILE + o_e) // 8, mask=m_e, other=0).to(tl.int32)
        b_y = tl.where((b_byte >> (o_e % 8)) & 1 != 0, b_y, 0.0)
    store_float(p_out + i_t * TILE + o_e, b_y, m_e, KIND)
