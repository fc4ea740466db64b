"""Codes of any width, a block at a time (specification: `pack_width` in `reference/comet.py`).

Eight codes of up to 8 bits, a byte each in one word, move together in three steps: pairs, fours,
eights. In memory they are then as many bytes as they have bits. A word is stored whole, and what
it has too much is written over by the next; so `out` and `packed` are longer than a block by ROOM.
"""

from elbowroom.kernels.numba.compiled import i32, inlined, u8, u32, u64
from elbowroom.kernels.numba.unaligned import load8, store8

ROOM = 160  # the bytes of a block at the largest width, and a word


@inlined
def close_up(x, r):
    """Eight bytes of r bits each -> the lowest 8 r bits."""
    x = (x & u64(0x00FF00FF00FF00FF)) | ((x >> u64(8)) & u64(0x00FF00FF00FF00FF)) << r
    x = (x & u64(0x0000FFFF0000FFFF)) | ((x >> u64(16)) & u64(0x0000FFFF0000FFFF)) << (r + r)
    return (x & u64(0xFFFFFFFF)) | (x >> u64(32)) << (u64(4) * r)


@inlined
def open_out(x, r, four, two, one):
    """The inverse; the masks drop what stands above 8 r bits. See `masks_of`."""
    x = (x & four) | ((x >> (u64(4) * r)) & four) << u64(32)
    x = (x & two) | ((x >> (r + r)) & two) << u64(16)
    return (x & one) | ((x >> r) & one) << u64(8)


@inlined
def masks_of(r):
    four = (u64(1) << (u64(4) * r)) - u64(1)
    two = ((u64(1) << (r + r)) - u64(1)) * u64(0x0000000100000001)
    return four, two, ((u64(1) << r) - u64(1)) * u64(0x0001000100010001)


@inlined
def pack_width(kept, k, width, spare, eights, out, at):
    """out from at <- kept [32] int32, of which k count. spare [32] uint8 and eights are one."""
    shift = 0
    while width - shift >= 8:
        for o in range(k):
            out[at + o] = u8((kept[o] >> i32(shift)) & i32(255))
        at, shift = at + k, shift + 8
    for o in range(32):
        spare[o] = u8(kept[o] >> i32(shift)) if o < k else u8(0)
    r = u64(width - shift)
    for i in range(4):
        store8(out, at + i * (width - shift), close_up(eights[i], r))


@inlined
def unpack_width(packed, at, k, width, spare, eights, kept, i_b):
    """The inverse: kept [i_b, 32] int32 is written, with anything beyond k."""
    whole = width & ~7
    rest, r = at + k * (width >> 3), u64(width - whole)
    four, two, one = masks_of(r)
    for i in range(4):
        eights[i] = open_out(load8(packed, rest + i * (width - whole)), r, four, two, one)
    for o in range(32):
        kept[i_b, o] = i32(u32(spare[o]) << u32(whole))
    for shift in range(0, whole, 8):
        for o in range(k):
            kept[i_b, o] |= i32(u32(packed[at + o]) << u32(shift))
        at += k


@inlined
def width_nbytes(k, width):
    return (k * width + 7) >> 3
