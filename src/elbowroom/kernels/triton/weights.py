"""Weights, and bf16 ones with a residual or stochastic rounding: `reference/weights.py`."""

import triton
import triton.language as tl

from elbowroom.kernels.states import WEIGHTS
from elbowroom.kernels.triton.device import (
    bf16_nearest,
    bf16_value,
    load_float,
    store_float,
    whole_below,
)

NEAREST, SR, RESIDUAL = (tl.constexpr(how) for how in range(len(WEIGHTS)))
_MAGIC = tl.constexpr(12582912.0)
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def half_exponent(b_bits):
    return tl.maximum(((b_bits & 0x7FFFFFFF) >> 23) - 8, 1)


@triton.jit
def read_back(b_held, b_e, b_exponent):
    return b_held + (b_e * (1 / 127)) * (b_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def in_127ths(b_gap, b_inverse):
    return tl.minimum(tl.maximum(b_gap * b_inverse, -1.0), 1.0) * 127


@triton.jit
def weights_load(p_w, p_residual, o_x, m_e, KIND: tl.constexpr):
    b_w = load_float(p_w + o_x, m_e, KIND)
    if p_residual is not None:
        b_bits = b_w.to(tl.int32, bitcast=True)
        b_e = tl.load(p_residual + o_x, mask=m_e, other=0).to(tl.float32)
        b_more = read_back(b_w, b_e, half_exponent(b_bits))
        b_w = tl.where((b_bits & 0x7FFFFFFF) < _INFINITE, b_more, b_w)
    return b_w


@triton.jit
def weights_store(b_w, b_u, p_w, p_residual, o_x, m_e, HOW: tl.constexpr, KIND: tl.constexpr):
    """Inverse of `weights_load`; b_u: noise in (0, 1), for a way other than `nearest`."""
    if KIND != 1:
        store_float(p_w + o_x, b_w, m_e, KIND)
    else:
        b_held = bf16_nearest(b_w)
        if HOW == SR:
            b_bits = b_w.to(tl.int32, bitcast=True)
            b_drawn = (b_bits + (b_u * 65536).to(tl.int32)) >> 16
            b_held = tl.where((b_bits & 0x7FFFFFFF) < _INFINITE, b_drawn, b_held)
        tl.store(p_w + o_x, b_held.to(tl.int16), mask=m_e)
        if p_residual is not None:
            b_back = bf16_value(b_held)
            b_bits = b_back.to(tl.int32, bitcast=True)
            b_exponent = half_exponent(b_bits)
            b_inverse = ((254 - b_exponent) << 23).to(tl.float32, bitcast=True)
            b_near = (in_127ths(b_w - b_back, b_inverse) + _MAGIC) - _MAGIC
            b_more = in_127ths(b_w - read_back(b_back, b_near, b_exponent), b_inverse)
            b_e = whole_below((b_near + b_more) + b_u)
            b_e = tl.where((b_bits & 0x7FFFFFFF) < _INFINITE, b_e, 0.0)
            tl.store(p_residual + o_x, b_e.to(tl.int8), mask=m_e)
