"""Codes of any width, a block at a time (specification: `pack_width` in `reference/comet.py`).

A byte each of eight codes is one word, and `extract` drops what does not count and closes up the
rest in one step. A word is stored whole, and what it has too much is written over by the next; so
`out` and `packed` are longer than a block by ROOM.
"""

from elbowroom.kernels.numba.bits import COUNT, SPREAD
from elbowroom.kernels.numba.compiled import i32, inlined, u8, u32, u64
from elbowroom.kernels.numba.fields import deposit, extract
from elbowroom.kernels.numba.unaligned import load8, store8

ROOM = 160  # the bytes of a block at the largest width, and a word


@inlined
def low_bits(r):
    """Returns the mask of the r lowest bits in each of eight bytes."""
    return ((u64(1) << r) - u64(1)) * u64(0x0101010101010101)


@inlined
def byte_of(mask, i):
    return (mask >> u32(8 * i)) & u32(255)


@inlined
def pack_width(codes, mask, width, spare, eights, out, at):
    """out from at <- those of codes [32] that mask has. spare [32] uint8 and eights are one."""
    whole = width & ~7
    for shift in range(0, whole, 8):
        for o in range(u64(spare.shape[0])):
            spare[o] = u8(codes[o] >> i32(shift))
        for i in range(4):
            byte = byte_of(mask, i)
            store8(out, at, extract(eights[i], SPREAD[byte]))
            at += COUNT[byte]
    for o in range(u64(spare.shape[0])):
        spare[o] = u8(codes[o] >> i32(whole))
    r, carry, filled = u64(width - whole), u64(0), u64(0)  # filled: bits of carry, less than 8
    low = low_bits(r)
    for i in range(4):
        byte = byte_of(mask, i)
        carry |= extract(eights[i], SPREAD[byte] & low) << filled
        store8(out, at, carry)
        filled += r * COUNT[byte]
        carry >>= filled & u64(0x78)
        at += filled >> u64(3)
        filled &= u64(7)


@inlined
def unpack_width(packed, at, k, mask, width, spare, eights, codes, i_b):
    """Inverse of `pack_width`: writes codes [i_b, 32] int32, 0 where mask, of k bits, has none."""
    whole = width & ~7
    rest, r, bit = at + k * (width >> 3), u64(width - whole), u64(0)
    low = low_bits(r)
    for i in range(4):
        byte = byte_of(mask, i)
        bits = load8(packed, rest + (bit >> u64(3))) >> (bit & u64(7))
        eights[i] = deposit(bits, SPREAD[byte] & low)
        bit += r * COUNT[byte]
    for o in range(u64(spare.shape[0])):
        codes[i_b, o] = u32(spare[o]) << u32(whole)
    for shift in range(0, whole, 8):
        for i in range(4):
            byte = byte_of(mask, i)
            eights[i] = deposit(load8(packed, at), SPREAD[byte])
            at += COUNT[byte]
        for o in range(u64(spare.shape[0])):
            codes[i_b, o] |= u32(spare[o]) << u32(shift)


@inlined
def width_nbytes(k, width):
    return (k * width + 7) >> 3
