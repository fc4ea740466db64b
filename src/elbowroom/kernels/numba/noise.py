"""Uniform numbers from a counter (specification: `reference/noise.py`)."""

from elbowroom.kernels.numba.compiled import TILE, f32, i32, inlined, jit, u32
from elbowroom.kernels.numba.lanes import plus32, right32, times32, xor32


@inlined
def mix(x):
    x = times32(xor32(x, right32(x, u32(16))), u32(0x7FEB352D))
    x = times32(xor32(x, right32(x, u32(15))), u32(0x846CA68B))
    return xor32(x, right32(x, u32(16)))


@inlined
def tile_key(i_t, seed_low, seed_high):
    return mix(xor32(mix(xor32(mix(u32(i_t)), seed_low)), seed_high))


@inlined
def word_at(key, o):
    """The bits that two elements share; o is the place of the first."""
    return mix(plus32(key, times32(u32(o), u32(0x9E3779B9))))


@inlined
def low_uniform(word):
    """Returns a number in (0, 1) made of the lower half of the bits."""
    return f32(i32(word & u32(0xFFFF))) * f32(1 / 65536) + f32(0.5 / 65536)


@inlined
def high_uniform(word):
    return f32(i32(right32(word, u32(16)))) * f32(1 / 65536) + f32(0.5 / 65536)


@jit
def draw(key, u):
    """u [TILE] <- uniform numbers of this tile."""
    first, second = u[: TILE // 2], u[TILE // 2 :]
    for o in range(TILE // 2):
        word = word_at(key, o)
        first[o], second[o] = low_uniform(word), high_uniform(word)
