"""A tile of `comet`: its integers, the form of each block, and the bytes (`reference/comet.py`)."""

import numpy as np

from elbowroom.kernels.numba.bits import BELOW, COUNT, unpack_flags
from elbowroom.kernels.numba.compiled import TILE, f32, i32, inlined, jit, u8, u32, u64
from elbowroom.kernels.numba.noise import draw, tile_key
from elbowroom.kernels.numba.rounding import bf16_nearest, bf16_value, half_nearest, half_value
from elbowroom.kernels.numba.widths import ROOM, pack_width, unpack_width, width_nbytes

LARGEST = f32(2.0**26)
ZIGZAG, MASKED, RAW = 0x20, 0x40, 0x80
SCRATCH = 4 * TILE + ROOM  # bytes that a tile's payload fits, with room to write and read over


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


@inlined
def popcount(x):
    x = x - ((x >> u32(1)) & u32(0x55555555))
    x = (x & u32(0x33333333)) + ((x >> u32(2)) & u32(0x33333333))
    return i32(u32(((x + (x >> u32(4))) & u32(0x0F0F0F0F)) * u32(0x01010101)) >> u32(24))


@inlined
def bit_length(x):
    """Of an int32 that is not negative: the exponent of it as a double, without a branch."""
    return max(i32(np.float64(x).view(np.int64) >> 52) - i32(1022), i32(0))


@inlined
def zigzag(x):
    return i32((x << i32(1)) ^ (x >> i32(31)))


@inlined
def zagzig(x):
    return i32((x >> i32(1)) ^ -(x & i32(1)))


@jit
def measure(r, bad, masks, n, itemsize, aware, headers):
    """The headers of a tile of n elements, and the bytes that its payload takes.

    r [TILE / 32, 32] int32 is 0 beyond n and at zeros; bad [TILE / 32, 4] uint64 are eight flags a
    word, masks [TILE / 32] uint32 the flags of what is not 0.
    """
    total = 0
    for i_b in range(headers.shape[0]):
        each, k = min(32, n - 32 * i_b), popcount(masks[i_b])
        if k == 0:
            headers[i_b] = 0
            continue
        every, top = i32(0), i32(0)
        for o in range(32):
            every |= r[i_b, o]
            top = max(top, zigzag(r[i_b, o]))
        # Without a negative one, zigzag has doubled the largest.
        sign, top = (ZIGZAG, top) if every < i32(0) else (0, top >> i32(1))
        width = bit_length(top)
        header, size = sign | width, width_nbytes(k, width)
        if k < each:
            header, size = header | MASKED, size + (0 if aware else 4)
            filled = bit_length(top + i32(1))
            if not aware and width_nbytes(each, filled) <= size:
                header, size = RAW | sign | filled, width_nbytes(each, filled)
        elif width == 0:
            header = ZIGZAG
        failed = bad[i_b, 0] | bad[i_b, 1] | bad[i_b, 2] | bad[i_b, 3]
        if failed != u64(0) or size >= each * itemsize:
            header, size = RAW, each * itemsize
        headers[i_b] = header
        total += size
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

    r, flag [TILE / 32, 32]; kept [33] int32 and spare [32] uint8 are scratch.
    """
    at = 0 if aware else bitmaps_nbytes(headers)
    itemsize = source.shape[0] // n
    eights, bitmaps, bitmap = spare.view(u64), out.view(u32), 0
    for i_b in range(headers.shape[0]):
        header, each = i32(headers[i_b]), min(32, n - 32 * i_b)
        if header == 0:
            continue
        if header == RAW:
            for o in range(each * itemsize):
                out[at + o] = source[32 * i_b * itemsize + o] * flag[i_b, o // itemsize]
            at += each * itemsize
            continue
        if header & ZIGZAG:
            for o in range(32):
                r[i_b, o] = zigzag(r[i_b, o])
        k = each
        if header & MASKED:
            place = u64(0)
            for o in range(32):
                kept[place] = r[i_b, o]
                place += u64(flag[i_b, o])
            k = i32(place)
            if not aware:
                bitmaps[bitmap] = masks[i_b]
                bitmap += 1
        else:
            more = i32(is_filled(header))
            for o in range(32):
                kept[o] = (r[i_b, o] + more) & -i32(flag[i_b, o])
        pack_width(kept, k, header & 31, spare, eights, out, at)
        at += width_nbytes(k, header & 31)


@jit
def read_tile(part, size, headers, bits, n, itemsize, spare, kept, masks, flags, codes, source):
    """A tile's payload -> codes [TILE / 32, 32], flags [TILE] int8: -1 where coded.

    part    [SCRATCH], of which `size` bytes are the payload
    source  the elements as bytes, written where a block is raw
    kept [TILE / 32, 32] int32, masks [TILE / 32] uint32 and spare [32] uint8 are scratch
    Codes are anything where nothing is coded. Returns whether headers and payload fit each other.
    """
    aware = bits.shape[0] > 0
    at = 0 if aware else bitmaps_nbytes(headers)
    eights, bitmaps, bitmap, bytes_of = spare.view(u64), part.view(u32), 0, masks.view(u8)
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
            masks[i_b] = 0
            at += each * itemsize
            continue
        width, mask = header & 31, u32((u64(1) << u64(each)) - u64(1))
        filled = is_filled(header)
        if aware and not filled:
            mask &= masks[i_b]
        elif header & MASKED:
            mask &= bitmaps[bitmap]
            bitmap += 1
        elif header == 0:
            mask = u32(0)
        k = popcount(mask)
        unpack_width(part, at, k, width, spare, eights, kept, i_b)
        at += width_nbytes(k, width)
        if filled:
            mask = u32(0)
            for o in range(32):
                mask |= u32(o < each and kept[i_b, o] != i32(0)) << u32(o)
                kept[i_b, o] -= i32(1)
        masks[i_b] = mask
        if header & ZIGZAG:
            for o in range(32):
                kept[i_b, o] = zagzig(kept[i_b, o])
        if filled or mask == u32(0xFFFFFFFF):
            for o in range(32):
                codes[i_b, o] = kept[i_b, o]
        elif mask:
            spread(kept, mask, codes, i_b)
    unpack_flags(bytes_of, flags)
    return at == size


@inlined
def spread(kept, mask, codes, i_b):
    """codes [i_b, 32] <- the next of kept [i_b, 32] at each set bit."""
    place = u64(0)
    for i in range(4):
        byte = u8(mask >> u32(8 * i) & u32(255))
        below = BELOW[byte]
        for o in range(8):
            codes[i_b, 8 * i + o] = kept[i_b, (place + (below >> u64(8 * o))) & u64(31)]
        place += COUNT[byte]


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
