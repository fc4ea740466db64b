"""Values to integers on a grid and back, held to a bound (specification: `reference/comet.py`)."""

import numpy as np

from elbowroom.kernels.numba.compiled import f32, i32, inlined, jit, u8, u32
from elbowroom.kernels.numba.noise import draw, tile_key
from elbowroom.kernels.numba.rounding import bf16_nearest, bf16_value, half_nearest, half_value

LARGEST = f32(2.0**26)


@jit
def noise(i_t, key, random, u):
    """u [TILE] <- the noise of tile i_t, or 1/2. key: the two halves of the seed, and `random`."""
    if random:
        draw(tile_key(i_t, key[0], key[1]), u)
    else:
        u[:] = f32(0.5)


@inlined
def value_of(q, u, step, least):
    value = (f32(q) + (f32(0.5) - u)) * step
    return least if abs(value) < least else value


@inlined
def least_of(kind):
    return f32(2.0**-24) if kind == 2 else f32(2.0**-126)


@jit
def integers(values, kind, i_t, key, back_random, grid, u, back, q, flag, bad):
    """q [n] int32; flag: whether a value is not 0; bad: whether its bound does not hold.

    values [n] float32; u, back [TILE] are scratch.
    """
    n = values.shape[0]
    bound, step, inverse, least = grid[0], grid[1], grid[2], least_of(kind)
    noise(i_t, key, key[2] != u32(0), u)
    for o in range(n):
        v = min(max(values[o] * inverse + u[o], -LARGEST), LARGEST)
        q[o] = i32(np.floor(v))
    if not back_random:
        u[:] = f32(0.5)
    for o in range(n):
        back[o] = value_of(q[o], u[o], step, least)
    if kind == 1:
        for o in range(n):
            back[o] = bf16_value(bf16_nearest(back[o]))
    elif kind == 2:
        for o in range(n):
            back[o] = half_value(half_nearest(min(max(back[o], f32(-65504)), f32(65504))))
    for o in range(n):
        some = values[o] != f32(0)
        held = abs(back[o] - values[o]) <= bound
        flag[o] = u8(some)
        bad[o] = u8(some and not held)
        q[o] = q[o] if some and held else i32(0)


@jit
def restore_values(codes, flags, i_t, key, random, step, kind, u, values):
    """values [n] float32 <- x~ of q, and 0 where flags is 0."""
    noise(i_t, key, random, u)
    least = least_of(kind)
    for o in range(values.shape[0]):
        values[o] = value_of(codes[o], u[o], step, least)
    words = values.view(np.int32)
    for o in range(words.shape[0]):
        words[o] &= i32(flags[o])
