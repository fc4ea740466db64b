"""Logarithms and powers to base 2 that every backend computes to the same bits.

    log2_above(x, low)      log2 x - low            error 1.6e-6
    exp2_from(z, low)       2^(z + low), z >= 0     relative error 3.4e-6 and rounding
    above_one(f)            2^f - 1, f in [0, 1)    the same

From the bits of a float32 and a polynomial in its fraction, by fused multiply-adds (`fma`): no
library function, whose last bit differs between machines. `low` is an integer in
units of 1 / 2^`shift`; its whole part goes into the exponent and costs no precision.
"""

import torch
from torch import Tensor

from elbowroom.kernels.states import EXP2, LOG2

_FRACTION, _ONE = 0x7FFFFF, 0x3F800000


def log2_above(x: Tensor, low: Tensor | float) -> Tensor:
    """x float32, normal and positive; low: a multiple of 1/256, exact in float32."""
    bits = x.view(torch.int32)
    f = ((bits & _FRACTION) | _ONE).view(torch.float32) - 1
    exponent = ((bits >> 23) - 127).float()
    return fma(polynomial(LOG2, f), f, exponent - low)


def exp2_from(z: Tensor, low: Tensor, shift: int) -> Tensor:
    """z float32 >= 0; low int32, in units of 1 / 2^shift. The result must be a normal float32."""
    z = z + (low & ((1 << shift) - 1)).float() * (1 / (1 << shift))
    whole = z.to(torch.int32)
    f = z - whole.float()
    return fma(polynomial(EXP2, f), f, torch.ones_like(f)) * power_of(whole + (low >> shift))


def above_one(f: Tensor) -> Tensor:
    """2^f - 1, float32."""
    return polynomial(EXP2, f) * f


def power_of(exponent: Tensor) -> Tensor:
    """2^exponent, int32 from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def polynomial(coefficients: tuple[float, ...], f: Tensor) -> Tensor:
    """c0 + c1 f + c2 f^2 ..., by fused multiply-adds."""
    value = torch.full_like(f, coefficients[-1])
    for c in coefficients[-2::-1]:
        value = fma(value, f, torch.full_like(f, c))
    return value


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32, rounded once, but where float64 rounds to a tie: one in 2^29."""
    return (a.double() * b.double() + c.double()).float()
