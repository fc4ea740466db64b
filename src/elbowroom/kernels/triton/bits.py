"""One bit an element (specification: `reference/bits.py`)."""

from functools import lru_cache
from math import copysign

import torch
import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import tiles
from elbowroom.kernels.triton.device import TILE, program_tiles
from elbowroom.kernels.triton.launch import launch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_bits(x: Tensor) -> Tensor:
    bits = outputs.bits(x)
    words = x.view(_WORDS[x.element_size()])
    # Without its sign bit, -0.0 is zero.
    mask = torch.iinfo(words.dtype).max if x.is_floating_point() else -1
    launch(_pack, tiles(x.numel()), words, bits, x.numel(), MASK=mask)
    return bits


def unpack_bits(bits: Tensor, value: float, out: Tensor) -> None:
    words = _WORDS[out.element_size()]
    word = _word(value, copysign(1, value), out.dtype)
    launch(_unpack, tiles(out.numel()), bits, out.view(words), out.numel(), word)


@lru_cache
def _word(value: float, sign: float, dtype: torch.dtype) -> int:
    """The bits of a value, as a number; on the host, where nothing waits. sign: for -0.0."""
    return int(torch.tensor([value], dtype=dtype).view(_WORDS[dtype.itemsize]))


@triton.jit
def byte_elements(i_t):
    """Bytes [R, TILE / 8] and their elements [R, TILE / 8, 8] of tiles i_t."""
    o_b = i_t[:, None] * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]
    return o_b, o_b[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]


@triton.jit
def set_bits(b_byte):
    """Counts the bits that are set in each byte."""
    b_byte = (b_byte & 0x55) + ((b_byte >> 1) & 0x55)
    b_byte = (b_byte & 0x33) + ((b_byte >> 2) & 0x33)
    return (b_byte & 0x0F) + (b_byte >> 4)


@triton.jit
def _pack(p_x, p_bits, N, MASK: tl.constexpr, R: tl.constexpr):
    i_t, _ = program_tiles(N, R)
    o_b, o_x = byte_elements(i_t)
    b_x = tl.load(p_x + o_x, mask=o_x < N, other=0)
    if MASK != -1:
        b_x = b_x & MASK
    b_byte = tl.sum((b_x != 0).to(tl.int32) << tl.arange(0, 8)[None, None, :], axis=2)
    tl.store(p_bits + o_b, b_byte.to(tl.uint8), mask=o_b * 8 < N)


@triton.jit(do_not_specialize=["one"])
def _unpack(p_bits, p_out, N, one, R: tl.constexpr):
    i_t, _ = program_tiles(N, R)
    o_b, o_x = byte_elements(i_t)
    b_byte = tl.load(p_bits + o_b, mask=o_b * 8 < N, other=0).to(tl.int32)
    b_flag = (b_byte[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    tl.store(p_out + o_x, tl.where(b_flag != 0, one, 0).to(p_out.dtype.element_ty), mask=o_x < N)


def masked(x: Tensor, bits: Tensor, out: Tensor) -> None:
    words = _WORDS[x.element_size()]
    launch(_masked, tiles(x.numel()), x.view(words), bits, out.view(words), x.numel())


@triton.jit
def _masked(p_x, p_bits, p_out, N, R: tl.constexpr):
    i_t, _ = program_tiles(N, R)
    o_b, o_x = byte_elements(i_t)
    b_byte = tl.load(p_bits + o_b, mask=o_b * 8 < N, other=0).to(tl.int32)
    b_flag = (b_byte[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    b_x = tl.load(p_x + o_x, mask=(o_x < N) & (b_flag != 0), other=0)
    tl.store(p_out + o_x, b_x, mask=o_x < N)
