"""Weights and gradients of a group, bf16 ones with a residual or stochastic rounding.

Specification: `reference/weights.py`. Places as in `moments.py`.
"""

import numpy as np

from elbowroom.kernels.numba.compiled import f32, i32, inlined, leaf
from elbowroom.kernels.numba.rounding import (
    TOP,
    as_bits,
    as_float,
    bf16_nearest,
    half_nearest,
    half_value,
)
from elbowroom.kernels.states import WEIGHTS

NEAREST, SR, RESIDUAL = range(len(WEIGHTS))
_MAGIC = f32(12582912)
_INFINITE = i32(0x7F800000)


@inlined
def half_exponent(bits):
    return max(((bits & TOP) >> i32(23)) - i32(8), i32(1))


@inlined
def read_back(held, e, exponent):
    return held + (e * f32(1 / 127)) * as_float(exponent << i32(23))


@inlined
def in_127ths(gap, inverse):
    return min(max(gap * inverse, f32(-1)), f32(1)) * f32(127)


@leaf
def halves_load(words, kind, at, x, n):
    """x [n] <- words of bfloat16 (kind 1) or float16 (2)."""
    if kind == 1:
        for o in range(n):
            x[o] = as_float(i32(words[at + o]) << i32(16))
    else:
        for o in range(n):
            x[o] = half_value(words[at + o])


@leaf
def weights_load(param, kind, residual, at, w, n):
    """w [n] <- param, residual (of length 0: there is none)."""
    halves_load(param, kind, at, w, n)
    if residual.shape[0]:
        for o in range(n):
            bits = as_bits(w[o])
            more = read_back(w[o], f32(residual[at + o]), half_exponent(bits))
            w[o] = more if (bits & TOP) < _INFINITE else w[o]


@leaf
def weights_store(w, noise, how, param, kind, residual, at, n):
    """Inverse of `weights_load`; noise [n] in (0, 1), for all but `nearest`."""
    if kind == 2:
        for o in range(n):
            param[at + o] = half_nearest(w[o])
    elif how == SR:
        for o in range(n):
            bits = as_bits(w[o])
            rounded = (bits + i32(noise[o] * f32(65536))) >> i32(16)
            param[at + o] = rounded if (bits & TOP) < _INFINITE else bf16_nearest(w[o])
    else:
        for o in range(n):
            param[at + o] = bf16_nearest(w[o])
    if residual.shape[0]:
        for o in range(n):
            bits = i32(param[at + o]) << i32(16)
            held, exponent = as_float(bits), half_exponent(bits)
            inverse = as_float((i32(254) - exponent) << i32(23))
            near = (in_127ths(w[o] - held, inverse) + _MAGIC) - _MAGIC
            more = in_127ths(w[o] - read_back(held, near, exponent), inverse)
            code = i32(np.floor((near + more) + noise[o]))
            residual[at + o] = code if (bits & TOP) < _INFINITE else i32(0)
