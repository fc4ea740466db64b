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
    n = values.shape[0]
    patterns = values.view(np.int32)
    rows = patterns[: n - n % S].reshape(n // S, S)
    for i_g in range(n // S):
        low, high = TOP, BOTTOM
        for o in range(S):
            place = order(rows[i_g, o])
            low, high = min(low, place), max(high, place)
        least[i_g], most[i_g] = low, high
    if n % S:
        low, high = TOP, BOTTOM
        for place in patterns[n - n % S :]:
            low, high = min(low, order(place)), max(high, order(place))
        least[n // S], most[n // S] = low, high


@inlined
def finite(least, most):
    """Whether all values between two `order` integers are finite, and within +-2^125."""
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
    whole = n - n % S
    b_x, b_u, b_code = (
        values[:whole].reshape(n // S, S),
        u[:whole].reshape(n // S, S),
        codes[:whole].reshape(n // S, S),
    )
    for i_g in range(n // S):
        g_low, g_scale = low[i_g], scale[i_g]
        for o in range(S):
            b_code[i_g, o] = code_of(b_x[i_g, o], b_u[i_g, o], g_low, g_scale, top)
    if whole < n:  # slices again, which LLVM vectorizes
        g_low, g_scale = low[n // S], scale[n // S]
        r_x, r_u, r_code = values[whole:], u[whole:n], codes[whole:n]
        for o in range(n - whole):
            r_code[o] = code_of(r_x[o], r_u[o], g_low, g_scale, top)
    codes[n : n + SLACK] = 0


@jit
def dequantize(codes, u, S, low, step, out):
    """out [n] float32 <- low + step * (codes - u), with low and step [groups]."""
    n = out.shape[0]
    whole = n - n % S
    b_x, b_u, b_code = (
        out[:whole].reshape(n // S, S),
        u[:whole].reshape(n // S, S),
        codes[:whole].reshape(n // S, S),
    )
    for i_g in range(n // S):
        g_low, g_step = low[i_g], step[i_g]
        for o in range(S):
            b_x[i_g, o] = g_low + g_step * (f32(i32(b_code[i_g, o])) - b_u[i_g, o])
    if whole < n:
        g_low, g_step = low[n // S], step[n // S]
        r_x, r_u, r_code = out[whole:], u[whole:n], codes[whole:n]
        for o in range(n - whole):
            r_x[o] = g_low + g_step * (f32(i32(r_code[o])) - r_u[o])
