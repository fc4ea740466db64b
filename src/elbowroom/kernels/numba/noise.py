"""Uniform numbers from a counter (specification: `reference/noise.py`)."""

from elbowroom.kernels.numba.compiled import TILE, f32, i32, inlined, jit, u32


@inlined
def mix(x):
    x = u32(x ^ (x >> u32(16)))
    x = u32(x * u32(0x7FEB352D))
    x = u32(x ^ (x >> u32(15)))
    x = u32(x * u32(0x846CA68B))
    return u32(x ^ (x >> u32(16)))


@inlined
def tile_key(i_t, seed_low, seed_high):
    return mix(u32(mix(u32(mix(u32(i_t)) ^ seed_low)) ^ seed_high))


@jit
def draw(key, u):
    """u [TILE] <- uniform numbers of this tile."""
    first, second = u[: TILE // 2], u[TILE // 2 :]
    for o in range(TILE // 2):
        word = mix(u32(key + u32(o) * u32(0x9E3779B9)))
        first[o] = f32(i32(word & u32(0xFFFF))) * f32(1 / 65536) + f32(0.5 / 65536)
        second[o] = f32(i32(word >> u32(16))) * f32(1 / 65536) + f32(0.5 / 65536)
