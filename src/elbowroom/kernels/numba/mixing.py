"""Hadamard transforms of runs of coefficients (specification: `reference/transform.py`)."""

import numpy as np

from elbowroom.kernels.numba.compiled import f32, jit, u64


@jit
def mix(z, spans, lanes, back):
    """z, flat [positions, lanes], is mixed in place, but for signs; `back`: the inverse.

    spans [n, 2]: start, size.
    """
    for s in range(spans.shape[0]):
        start, size = spans[spans.shape[0] - 1 - s if back else s]
        hadamard(z, start * lanes, size, lanes)


@jit
def hadamard(z, first, size, lanes):
    """z from `first` on <- the Walsh-Hadamard transform of `size` rows, two steps in one pass."""
    half, scale = 1, f32(np.float64(size) ** -0.5)
    while 2 * half < size:
        factor = scale if 4 * half == size else f32(1)
        for start in range(0, size, 4 * half):
            fours(z, first + start * lanes, half * lanes, factor)
        half *= 4
    if half < size:
        twos(z, first, half * lanes, scale)


@jit
def twos(z, at, run, factor):
    p_a, p_b = u64(at), u64(at + run)
    for o in range(u64(run)):
        a, b = z[p_a + o], z[p_b + o]
        z[p_a + o], z[p_b + o] = (a + b) * factor, (a - b) * factor


@jit
def fours(z, at, run, factor):
    p_a, p_b, p_c, p_d = u64(at), u64(at + run), u64(at + 2 * run), u64(at + 3 * run)
    for o in range(u64(run)):
        a, b, c, d = z[p_a + o], z[p_b + o], z[p_c + o], z[p_d + o]
        a, b, c, d = a + b, a - b, c + d, c - d
        z[p_a + o], z[p_b + o] = (a + c) * factor, (b + d) * factor
        z[p_c + o], z[p_d + o] = (a - c) * factor, (b - d) * factor
