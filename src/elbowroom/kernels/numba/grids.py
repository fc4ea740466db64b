"""A slice of groups onto their grids and back: what `group`, `dither` and `nonzero` share.

A group's grid is low, low + step, low + 2 step, ...; where low and step come from is theirs.
"""

import numpy as np

from elbowroom.kernels.numba.codes import SLACK
from elbowroom.kernels.numba.compiled import f32, i32, inlined, jit, u8
from elbowroom.kernels.numba.rounding import BOTTOM, HUGE, TOP, order


@jit
def extremes(values, S, least, most):
    """least, most [groups] <- the smallest and the largest of each group of S values [n].

    Both as `order` integers.
    """
    n, patterns = values.shape[0], values.view(np.int32)
    for i_g in range((n + S - 1) // S):
        group = patterns[i_g * S : min(i_g * S + S, n)]
        low, high = TOP, BOTTOM
        for o in range(group.shape[0]):
            place = order(group[o])
            low, high = min(low, place), max(high, place)
        least[i_g], most[i_g] = low, high


@inlined
def finite(least, most):
    """Returns whether all values between two `order` integers are finite, and within +-2^125."""
    return most < HUGE and least > order(i32(HUGE | BOTTOM))


@inlined
def code_of(x, u, low, scale, top):
    return u8(min(max(i32((x - low) * scale + u), i32(0)), top))


@jit
def quantize(values, u, S, low, scale, top, codes):
    """codes [n] <- clamp(floor((values - low) * scale + u), 0, top), with low and scale [groups].

    A NaN goes anywhere in 0..top. codes has room for SLACK more, which are set to 0.
    """
    n = values.shape[0]
    for i_g in range((n + S - 1) // S):
        first, last = i_g * S, min(i_g * S + S, n)
        b_x, b_u, b_code = values[first:last], u[first:last], codes[first:last]
        g_low, g_scale = low[i_g], scale[i_g]
        for o in range(last - first):
            b_code[o] = code_of(b_x[o], b_u[o], g_low, g_scale, top)
    codes[n : n + SLACK] = 0


@jit
def dequantize(codes, u, S, low, step, out):
    """out [n] float32 <- low + step * (codes - u), with low and step [groups]."""
    n = out.shape[0]
    for i_g in range((n + S - 1) // S):
        first, last = i_g * S, min(i_g * S + S, n)
        b_x, b_u, b_code = out[first:last], u[first:last], codes[first:last]
        g_low, g_step = low[i_g], step[i_g]
        for o in range(last - first):
            b_x[o] = g_low + g_step * (f32(i32(b_code[o])) - b_u[o])
