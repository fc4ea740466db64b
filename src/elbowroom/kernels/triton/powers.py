"""Logarithms and powers to base 2 (specification: `reference/powers.py`)."""

import triton
import triton.language as tl

from elbowroom.kernels import states

_POLYNOMIALS = {"log2": states.LOG2, "exp2": states.EXP2, "bend": states.BEND}


@triton.jit
def fma(b_a, b_b, b_c, FUSED: tl.constexpr):
    """a * b + c of float32, rounded once. In float64 but for FUSED: the interpreter has no fma."""
    if FUSED:
        return tl.fma(b_a, b_b, b_c)
    return (b_a.to(tl.float64) * b_b.to(tl.float64) + b_c.to(tl.float64)).to(tl.float32)


@triton.constexpr_function
def degree(name):
    return len(_POLYNOMIALS[name]) - 1


@triton.constexpr_function
def coefficient(name, k):
    return _POLYNOMIALS[name][k]


@triton.jit
def polynomial(b_f, NAME: tl.constexpr, FUSED: tl.constexpr):
    """c0 + c1 f + c2 f^2 ..."""
    b_p = tl.full(b_f.shape, coefficient(NAME, degree(NAME)), tl.float32)
    for k in tl.static_range(degree(NAME)):
        b_c = tl.full(b_f.shape, coefficient(NAME, degree(NAME) - 1 - k), tl.float32)
        b_p = fma(b_p, b_f, b_c, FUSED)
    return b_p


@triton.jit
def log2_above(b_x, b_low, FUSED: tl.constexpr):
    """log2 x - low; b_low broadcasts."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_f = ((b_bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    b_whole = ((b_bits >> 23) - 127).to(tl.float32) - b_low
    return fma(polynomial(b_f, "log2", FUSED), b_f, b_whole, FUSED)


@triton.jit
def exp2_from(b_z, b_low, FUSED: tl.constexpr):
    """2^(z + low / 256), z >= 0; b_low int32, broadcasts."""
    b_z += (b_low & 255).to(tl.float32) * (1 / 256)
    b_whole = b_z.to(tl.int32)
    b_f = b_z - b_whole.to(tl.float32)
    b_more = fma(polynomial(b_f, "exp2", FUSED), b_f, tl.full(b_f.shape, 1.0, tl.float32), FUSED)
    return b_more * power_of(b_whole + (b_low >> 8))


@triton.jit
def above_one(b_f, FUSED: tl.constexpr):
    """2^f - 1."""
    return polynomial(b_f, "exp2", FUSED) * b_f


@triton.jit
def power_of(b_exponent):
    return ((b_exponent + 127) << 23).to(tl.float32, bitcast=True)
