"""Values that share a code: their sum with random signs (specification: `reference/sided.py`)."""

import numpy as np

from elbowroom.kernels.numba.compiled import TILE, f32, i32, inlined, leaf
from elbowroom.kernels.numba.grids import extremes, finite
from elbowroom.kernels.numba.rounding import as_float, bf16_directed, bf16_value, inverse, order


@leaf
def mean_of(kept, b_least, b_most):
    """The bits of the mean as bf16."""
    extremes(kept, TILE, b_least, b_most)
    if not finite(b_least[0], b_most[0]):
        return i32(0x7FC0)  # NaN
    lo = bf16_value(bf16_directed(as_float(order(b_least[0])), False))
    hi = bf16_value(bf16_directed(as_float(order(b_most[0])), True))
    unit = hi * f32(1 / 255) - lo * f32(1 / 255)
    scale, total = inverse(unit), i32(0)
    for o in range(kept.shape[0]):
        total += min(max(i32((kept[o] - lo) * scale + f32(0.5)), i32(0)), i32(255))
    return bf16_directed(lo + f32((total + kept.shape[0] // 2) // kept.shape[0]) * unit, False)


@inlined
def sign(u):
    """1 or -1 by the last bit of the noise: u * 32768 ends in a fourth, or in three."""
    half = u * f32(32768)
    return f32(-4) * (half - np.floor(half) - f32(0.5))


@leaf
def folded(kept, u, mean, m, sums):
    """sums [m] <- of kept [n] those that are m apart, with their signs."""
    sums[:m] = f32(0)
    for first in range(0, kept.shape[0], m):
        last = min(first + m, kept.shape[0])
        b_x, b_u, b_sum = kept[first:last], u[first:last], sums[: last - first]
        for o in range(last - first):
            b_sum[o] += sign(b_u[o]) * (b_x[o] - mean)


@leaf
def unfold(sums, u, mean, kept):
    """Inverse of `folded`, on average: kept [n] <- mean + sign * sum [m]."""
    n, m = kept.shape[0], sums.shape[0]
    for first in range(0, n, m):
        last = min(first + m, n)
        b_x, b_u, b_sum = kept[first:last], u[first:last], sums[: last - first]
        for o in range(last - first):
            b_x[o] = sign(b_u[o]) * b_sum[o] + mean
