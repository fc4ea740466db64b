"""A bitmap and the elements that are not zero (specification: `reference/sparse.py`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels.layout import TILE as TILE_SIZE
from elbowroom.kernels.layout import tiles
from elbowroom.kernels.triton.bits import pack_bits, set_bits
from elbowroom.kernels.triton.device import TILE, program_tiles, tile_payload
from elbowroom.kernels.triton.launch import launch, starts_of


def sparse_pack_into(x: Tensor, kept: Tensor, spill: Tensor, used: Tensor) -> Tensor:
    bits = pack_bits(x)
    starts = starts_of(_sizes, bits, x.numel(), bits.numel())
    torch.mul(starts[-1:], x.element_size(), out=used)
    args = x, starts, kept, spill, kept.numel(), TILE_SIZE, x.numel()
    launch(_pack, tiles(x.numel()), *args, R=1)
    return bits


def sparse_unpack(
    bits: Tensor, kept: Tensor, spill: Tensor, out: Tensor, exact: bool = False
) -> None:
    # The host would wait for what the bitmap says: `codecs/sparse_lossless.py` compares.
    starts = starts_of(_sizes, bits, out.numel(), bits.numel())
    args = bits, starts, kept, spill, kept.numel(), TILE_SIZE, out, out.numel()
    launch(_unpack, tiles(out.numel()), *args, R=1)


@triton.jit
def _sizes(p_bits, p_starts, N_BYTES, R: tl.constexpr):
    i_t, _ = program_tiles(0, R)
    o_b = i_t[:, None] * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]  # [R, TILE / 8]
    b_b = tl.load(p_bits + o_b, mask=o_b < N_BYTES, other=0).to(tl.int32)
    n = tl.sum(set_bits(b_b), axis=1)
    tl.store(p_starts + 1 + i_t, n.to(tl.int64), mask=i_t * (TILE // 8) < N_BYTES)


@triton.jit(do_not_specialize=["N_KEPT", "MOST"])
def _pack(p_x, p_starts, p_kept, p_spill, N_KEPT, MOST, N, R: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, TILE)
    b_x = tl.load(p_x + i_t * TILE + o_x, mask=i_t * TILE + o_x < N, other=0)
    m_e = b_x != 0
    p_tile, _ = tile_payload(p_kept, p_spill, p_starts, i_t, i_t >= 0, N_KEPT, MOST)
    tl.store(p_tile + tl.cumsum(m_e.to(tl.int32), axis=0) - 1, b_x, mask=m_e)


@triton.jit(do_not_specialize=["N_KEPT", "MOST"])
def _unpack(p_bits, p_starts, p_kept, p_spill, N_KEPT, MOST, p_out, N, R: tl.constexpr):
    i_t = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, TILE)
    m_x = i_t * TILE + o_x < N
    b_byte = tl.load(p_bits + i_t * (TILE // 8) + o_x // 8, mask=m_x, other=0).to(tl.int32)
    m_e = m_x & (((b_byte >> (o_x % 8)) & 1) != 0)
    p_tile, _ = tile_payload(p_kept, p_spill, p_starts, i_t, i_t >= 0, N_KEPT, MOST)
    b_x = tl.load(p_tile + tl.cumsum(m_e.to(tl.int32), axis=0) - 1, mask=m_e, other=0)
    tl.store(p_out + i_t * TILE + o_x, b_x, mask=m_x)
