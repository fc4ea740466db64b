"""The blocks of a tile: their forms, and their bytes (specification: `reference/comet.py`)."""

import numpy as np

from elbowroom.kernels.numba.bits import SPREAD
from elbowroom.kernels.numba.compiled import TILE, i32, inlined, jit, u8, u32, u64
from elbowroom.kernels.numba.widths import ROOM, byte_of, pack_width, unpack_width, width_nbytes

ZIGZAG, MASKED, RAW = 0x20, 0x40, 0x80
BLOCKS = TILE // 32  # of a tile
SCRATCH = 4 * TILE + ROOM  # bytes that a tile's payload fits, with room to write and read over


@inlined
def popcount(x):
    x = x - ((x >> u32(1)) & u32(0x55555555))
    x = (x & u32(0x33333333)) + ((x >> u32(2)) & u32(0x33333333))
    return i32(u32(((x + (x >> u32(4))) & u32(0x0F0F0F0F)) * u32(0x01010101)) >> u32(24))


@inlined
def bit_length(x):
    """Computes the bit length of an int32 that is not negative, without a branch.

    It is the exponent of x as a double.
    """
    return max(i32(np.float64(x).view(np.int64) >> 52) - i32(1022), i32(0))


@inlined
def zigzag(x):
    return i32((x << i32(1)) ^ (x >> i32(31)))


@jit
def measure(r, bad, masks, n, itemsize, aware, top, every, headers):
    """The headers of a tile of n elements, and the bytes that its payload takes.

    r [TILE / 32, 32] int32 is 0 beyond n and at zeros; bad [TILE / 32, 4] uint64 are eight flags a
    word, masks [TILE / 32] uint32 the flags of what is not 0; top, every [TILE / 32] int32 are
    scratch. No branch hangs on a block: nobody could predict it.
    """
    for i_b in range(u64(headers.shape[0])):
        both, most = i32(0), i32(0)
        for o in range(u64(r.shape[1])):
            code = zigzag(r[i_b, o])
            both |= code
            most = max(most, code)
        every[i_b], top[i_b] = both, most
    total = 0
    for i_b in range(headers.shape[0]):
        each, k = i32(min(32, n - 32 * i_b)), popcount(masks[i_b])
        sign = every[i_b] & i32(1)  # zigzag has doubled what is not negative
        most = top[i_b] >> (i32(1) - sign)
        width, filled = bit_length(most), bit_length(most + i32(1))
        zeros = k < each
        header = (sign << i32(5)) | width | (i32(MASKED) if zeros else i32(0))
        size = width_nbytes(k, width) + (i32(4) if zeros and not aware else i32(0))
        shorter = zeros and not aware and width_nbytes(each, filled) <= size
        header = i32(RAW) | (sign << i32(5)) | filled if shorter else header
        size = width_nbytes(each, filled) if shorter else size
        header = i32(ZIGZAG) if header == i32(0) else header
        failed = (bad[i_b, 0] | bad[i_b, 1] | bad[i_b, 2] | bad[i_b, 3]) != u64(0)
        raw = failed or size >= each * i32(itemsize)
        header, size = (i32(RAW), each * i32(itemsize)) if raw else (header, size)
        headers[i_b] = u8(header) if k else u8(0)
        total += size if k else i32(0)
    return total


@inlined
def is_filled(header):
    return header > RAW and not header & MASKED


@jit
def bitmaps_nbytes(headers):
    total = 0
    for i_b in range(headers.shape[0]):
        total += (headers[i_b] & MASKED) >> 4
    return total


@jit
def write_tile(source, r, flag, masks, n, headers, aware, kept, spare, out):
    """out [SCRATCH] <- the payload of a tile whose elements, as bytes, are `source`.

    r, flag [TILE / 32, 32]; kept [32] int32 and spare [32] uint8 are scratch.
    """
    at = u64(0) if aware else write_bitmaps(headers, masks, out.view(u32))
    itemsize = source.shape[0] // n
    eights = spare.view(u64)
    for i_b in range(u64(headers.shape[0])):
        header, each = i32(headers[i_b]), min(32, n - 32 * i32(i_b))
        if header == RAW:
            first = u64(32 * itemsize) * i_b
            for o in range(u64(each * itemsize)):
                out[at + o] = source[first + o] * flag[i_b, o // u64(itemsize)]
            at += u64(each * itemsize)
            continue
        sign, more = (header >> i32(5)) & i32(1), i32(is_filled(header))
        for o in range(u64(r.shape[1])):
            code = (r[i_b, o] << sign) ^ (r[i_b, o] >> i32(31))
            kept[o] = (code + more) & -i32(flag[i_b, o])
        mask = first_bits(each) if more else masks[i_b]
        pack_width(kept, mask, header & 31, spare, eights, out, at)
        at += u64(width_nbytes(popcount(mask), header & 31))


@jit
def write_bitmaps(headers, masks, out):
    """Writes the bitmaps of blocks with MASKED; returns the bytes they take."""
    place = u64(0)
    for i_b in range(headers.shape[0]):
        out[place] = masks[i_b]  # what has no bitmap is written over
        place += u64((headers[i_b] & MASKED) >> 6)
    return u64(4) * place


@inlined
def first_bits(n):
    return u32((u64(1) << u64(n)) - u64(1))


@jit
def read_tile(part, size, headers, bits, n, itemsize, spare, masks, flags, codes, source):
    """A tile's payload -> codes [TILE / 32, 32], flags [TILE] int8: -1 where coded.

    part    [SCRATCH], of which `size` bytes are the payload
    source  the elements as bytes, written where a block is raw
    masks [TILE / 32] uint32 and spare [32] uint8 are scratch
    Codes are anything where nothing is coded. Returns whether headers and payload fit each other.
    """
    aware = bits.shape[0] > 0
    at = 0 if aware else bitmaps_nbytes(headers)
    eights, bitmaps, bitmap, bytes_of = spare.view(u64), part.view(u32), 0, masks.view(u8)
    block, words = flags.reshape(codes.shape), flags.view(u64)
    masks[:] = 0
    for o in range(bits.shape[0]):
        bytes_of[o] = bits[o]
    if size > SCRATCH - ROOM:
        return False
    for i_b in range(headers.shape[0]):
        header, each = i32(headers[i_b]), min(32, n - 32 * i_b)
        if at + (each * itemsize if header == RAW else 0) > size:
            return False
        if header == RAW:
            for o in range(each * itemsize):
                source[32 * i_b * itemsize + o] = part[at + o]
            block[i_b] = 0
            at += each * itemsize
            continue
        width, mask, filled = header & 31, first_bits(each), is_filled(header)
        if aware and not filled:
            mask &= masks[i_b]
        elif header & MASKED:
            mask &= bitmaps[bitmap]
            bitmap += 1
        elif header == 0:
            mask = u32(0)
        k = popcount(mask)
        unpack_width(part, at, k, mask, width, spare, eights, codes, i_b)
        at += width_nbytes(k, width)
        for i in range(4):
            words[4 * i_b + i] = SPREAD[byte_of(mask, i)]
        sign, more = (header >> i32(5)) & i32(1), i32(filled)
        for o in range(u64(codes.shape[1])):
            code = codes[i_b, o] - more
            block[i_b, o] &= -np.int8(code >= i32(0))
            codes[i_b, o] = (code >> sign) ^ -(code & sign)
    return at == size
