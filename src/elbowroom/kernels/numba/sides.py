"""A tile's values divided by the bits of a bitmap, and merged: by vectors, or without branches."""

import numpy as np

from elbowroom.kernels.numba.bits import COUNT
from elbowroom.kernels.numba.compiled import TILE, inlined, leaf, u16, u64
from elbowroom.kernels.numba.compress import HAS, WIDTH, compress, expand

# A tile's values by side: those whose bit is set from 0 on, the others from HALF on; behind either
# there is room for what a vector instruction writes or reads beyond its end.
HALF = TILE + WIDTH
_RANK = np.array(  # a byte of bits -> in byte k of the result, how many bits below k are like bit k
    [
        sum(sum((byte >> j & 1) == (byte >> k & 1) for j in range(k)) << (8 * k) for k in range(8))
        for byte in range(256)
    ],
    dtype=np.uint64,
)


@inlined
def place(byte, ranks, k, up, low):
    """Returns where the element of bit k goes; the next of either side goes to `up`, to `low`.

    It has no condition, which random bits would mispredict: with one, and the places counted one
    after the other, `divide` took 2.8 times as long, and `merge` 2.0 (one core with AVX-512).
    """
    chosen = u64(0) - ((u64(byte) >> u64(k)) & u64(1))  # all ones or all zeros
    return (low ^ ((low ^ up) & chosen)) + ((ranks >> u64(8 * k)) & u64(255))


@leaf
def divide_vectors(values, bits, sides):
    """`divide` of as many as fill vectors: how many these are, and where either side goes on."""
    up, low = 0, HALF
    for o in range(values.shape[0] // WIDTH):
        first, second = bits[2 * o], bits[2 * o + 1]
        mask = u16(first) | (u16(second) << u16(8))
        compress(values, o * WIDTH, mask, sides, up)
        compress(values, o * WIDTH, ~mask, sides, low)
        count = np.int64(COUNT[first] + COUNT[second])
        up, low = up + count, low + (WIDTH - count)
    return values.shape[0] // WIDTH * WIDTH, up, low


@leaf
def merge_vectors(sides, bits, values):
    up, low = 0, HALF
    for o in range(values.shape[0] // WIDTH):
        first, second = bits[2 * o], bits[2 * o + 1]
        mask = u16(first) | (u16(second) << u16(8))
        expand(sides, up, sides, low, mask, values, o * WIDTH)
        count = np.int64(COUNT[first] + COUNT[second])
        up, low = up + count, low + (WIDTH - count)
    return values.shape[0] // WIDTH * WIDTH, up, low


@leaf
def none_in_vectors(one, bits, other):
    return 0, 0, HALF


if not HAS:
    divide_vectors = merge_vectors = none_in_vectors


@leaf
def divide(values, bits, sides):
    """sides [2 * HALF] <- values [n], each on its side, in order."""
    done, up, low = divide_vectors(values, bits, sides)
    up, low = u64(up), u64(low)
    whole = values.shape[0] // 8
    for o in range(done // 8, whole):
        byte = bits[o]
        ranks, eight = _RANK[byte], values[8 * o : 8 * o + 8]
        for k in range(8):
            sides[place(byte, ranks, k, up, low)] = eight[k]
        up, low = up + COUNT[byte], low + (u64(8) - COUNT[byte])
    if whole < bits.shape[0]:
        byte = bits[whole]
        ranks, rest = _RANK[byte], values[8 * whole :]
        for k in range(rest.shape[0]):
            sides[place(byte, ranks, k, up, low)] = rest[k]


@leaf
def merge(sides, bits, values):
    """Inverse of `divide`: values [n] <- sides [2 * HALF]."""
    done, up, low = merge_vectors(sides, bits, values)
    up, low = u64(up), u64(low)
    whole = values.shape[0] // 8
    for o in range(done // 8, whole):
        byte = bits[o]
        ranks, eight = _RANK[byte], values[8 * o : 8 * o + 8]
        for k in range(8):
            eight[k] = sides[place(byte, ranks, k, up, low)]
        up, low = up + COUNT[byte], low + (u64(8) - COUNT[byte])
    if whole < bits.shape[0]:
        byte = bits[whole]
        ranks, rest = _RANK[byte], values[8 * whole :]
        for k in range(rest.shape[0]):
            rest[k] = sides[place(byte, ranks, k, up, low)]
