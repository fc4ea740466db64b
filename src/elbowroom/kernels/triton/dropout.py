"""Dropout by counter (specification: `reference/dropout.py`), in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels.layout import drop_below, tiles
from elbowroom.kernels.triton.device import (
    TILE,
    load_float,
    mix,
    program_tiles,
    store_float,
    tile_key,
)
from elbowroom.kernels.triton.launch import launch, split_seed, words


def dropout(x: Tensor, seed: int | Tensor, p: float, out: Tensor) -> None:
    source, kind = words(x)
    below = drop_below(p)
    signed = below - (below >> 31 << 32)  # one type for all p
    args = source, words(out)[0], x.numel(), *split_seed(seed), signed, 1 / (1 - p)
    launch(_dropout, tiles(x.numel()), *args, KIND=kind)


@triton.jit
def _dropout(p_x, p_out, N, seed_low, seed_high, below, scale, KIND: tl.constexpr, R: tl.constexpr):
    i_t, n = program_tiles(N, R)
    o_e = tl.arange(0, TILE)[None, :]
    m_e = o_e < n[:, None]  # [R, TILE]
    b_key = tile_key(i_t, seed_low, seed_high)[:, None]
    b_word = mix(b_key + o_e.to(tl.uint32) * 0x9E3779B9)
    o_x = (i_t * TILE)[:, None] + o_e
    b_x = load_float(p_x + o_x, m_e, KIND)
    b_y = tl.where(b_word >= below.to(tl.uint32), b_x * scale, 0.0)
    store_float(p_out + o_x, b_y, m_e, KIND)
