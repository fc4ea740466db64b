"""Logarithms and powers to base 2 (specification: `reference/powers.py`)."""

from typing import Any

from numba import types
from numba.extending import intrinsic

from elbowroom.kernels.numba.compiled import f32, i32, inlined
from elbowroom.kernels.numba.rounding import as_bits, as_float
from elbowroom.kernels.states import EXP2, LOG2

_A0, _A1, _A2, _A3, _A4, _A5, _A6 = (f32(c) for c in LOG2)
_B0, _B1, _B2, _B3 = (f32(c) for c in EXP2)


@intrinsic
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@inlined
def log2_above(x, low):
    bits = as_bits(x)
    f = as_float((bits & i32(0x7FFFFF)) | i32(0x3F800000)) - f32(1)
    exponent = f32(i32(i32(bits >> i32(23)) - i32(127)))
    p = fma(fma(fma(_A6, f, _A5), f, _A4), f, _A3)
    p = fma(fma(fma(p, f, _A2), f, _A1), f, _A0)
    return fma(p, f, exponent - low)


@inlined
def _exp2(f):
    return fma(fma(fma(_B3, f, _B2), f, _B1), f, _B0)


@inlined
def exp2_from(z, part, whole):
    """`part` and `whole`: those of `low`, the part as a float32 below 1."""
    z = z + part
    n = i32(z)
    f = z - f32(n)
    return fma(_exp2(f), f, f32(1)) * power_of(i32(n + whole))


@inlined
def above_one(f):
    return _exp2(f) * f


@inlined
def power_of(exponent):
    return as_float(i32(exponent + i32(127)) << i32(23))


@inlined
def part_of(low, shift):
    return f32(i32(low & i32((i32(1) << i32(shift)) - i32(1)))) * f32(1 / (1 << shift))
