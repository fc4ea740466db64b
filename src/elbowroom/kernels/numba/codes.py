"""The codes of one tile to bytes and back (specification: `reference/codes.py`)."""

from elbowroom.kernels.numba.compiled import inlined, jit, u8, u16
from elbowroom.kernels.numba.lanes import left, right, times

SLACK = 16  # codes are packed in whole bytes: up to 7 elements beyond the last are read and written


@inlined
def code_bits(levels):
    bits = 1
    while (1 << bits) < levels:
        bits += 1
    return bits


@inlined
def codes_nbytes(levels, n):
    if levels == 3:
        return (n + 4) // 5
    if levels == 5 or levels == 6:
        return (n + 2) // 3
    bits = code_bits(levels)
    total = 0
    for width in (8, 4, 2, 1):
        if bits >= width:
            bits -= width
            per = 8 // width
            total += (n + per - 1) // per
    return total


@jit
def pack(codes, n, levels, spare, out):
    """out [codes_nbytes] <- codes [n].

    Codes and spare have SLACK entries more; those of codes are 0 beyond n.

    The widths are written out: with constant shifts a loop is one vector pass (6x a loop over
    runtime shifts).
    """
    if levels == 3:
        pack_radix(codes, levels, 5, out)
        return
    if levels == 5 or levels == 6:
        pack_radix(codes, levels, 3, out)
        return
    bits = code_bits(levels)
    start = 0
    for width in (8, 4, 2, 1):
        if bits >= width:
            bits -= width
            n_bytes = (n * width + 7) // 8
            part = codes
            if bits > 0 or start > 0:
                part = spare
                for o in range(codes.shape[0]):
                    spare[o] = right(codes[o], u8(bits)) & u8((1 << width) - 1)
            pack_width(part, width, out[start : start + n_bytes])
            start += n_bytes


@jit
def pack_width(codes, width, out):
    n = out.shape[0]
    if width == 8:
        for o in range(n):
            out[o] = codes[o]
    elif width == 4:
        a, b = codes[:n], codes[n : 2 * n]
        for o in range(n):
            out[o] = a[o] | left(b[o], u8(4))
    elif width == 2:
        a, b, c, d = codes[:n], codes[n : 2 * n], codes[2 * n : 3 * n], codes[3 * n : 4 * n]
        for o in range(n):
            out[o] = a[o] | left(b[o], u8(2)) | left(c[o], u8(4)) | left(d[o], u8(6))
    else:
        a, b, c, d = codes[:n], codes[n : 2 * n], codes[2 * n : 3 * n], codes[3 * n : 4 * n]
        for o in range(n):
            out[o] = a[o] | left(b[o], u8(1)) | left(c[o], u8(2)) | left(d[o], u8(3))
        a, b, c, d = (
            codes[4 * n : 5 * n],
            codes[5 * n : 6 * n],
            codes[6 * n : 7 * n],
            codes[7 * n : 8 * n],
        )
        for o in range(n):
            high = left(a[o], u8(4)) | left(b[o], u8(5)) | left(c[o], u8(6))
            out[o] |= high | left(d[o], u8(7))


@jit
def pack_radix(codes, levels, per, out):
    n = out.shape[0]
    a, b, c = codes[:n], codes[n : 2 * n], codes[2 * n : 3 * n]
    base = u8(levels)
    for o in range(n):
        out[o] = a[o] + times(b[o], base) + times(c[o], u8(base * base))
    if per == 5:
        a, b = codes[3 * n : 4 * n], codes[4 * n : 5 * n]
        for o in range(n):
            out[o] += times(a[o], u8(27)) + times(b[o], u8(81))


@jit
def unpack(packed, levels, codes):
    """codes [n] <- packed [codes_nbytes(levels, n)].

    Codes has SLACK entries more, which are left with anything.
    """
    if levels == 3:
        unpack_radix(packed, 3, 5, codes)
        return
    if levels == 5:
        unpack_radix(packed, 5, 3, codes)
        return
    if levels == 6:
        unpack_radix(packed, 6, 3, codes)
        return
    bits = code_bits(levels)
    n = codes.shape[0] - SLACK
    start = 0
    fresh = True
    for width in (8, 4, 2, 1):
        if bits >= width:
            bits -= width
            n_bytes = (n * width + 7) // 8
            unpack_width(packed[start : start + n_bytes], width, u8(bits), fresh, codes)
            start += n_bytes
            fresh = False


@jit
def unpack_width(packed, width, shift, fresh, codes):
    n = packed.shape[0]
    if fresh and shift == u8(0) and width == 2:  # the common case, in one pass
        a, b, c, d = codes[:n], codes[n : 2 * n], codes[2 * n : 3 * n], codes[3 * n : 4 * n]
        for o in range(n):
            byte = packed[o]
            a[o] = byte & u8(3)
            b[o] = right(byte, u8(2)) & u8(3)
            c[o] = right(byte, u8(4)) & u8(3)
            d[o] = right(byte, u8(6))
        return
    mask = u8((1 << width) - 1)
    for k in range(8 // width):
        plane = codes[k * n : (k + 1) * n]
        if fresh:
            for o in range(n):
                plane[o] = left(right(packed[o], u8(k * width)) & mask, shift)
        else:
            for o in range(n):
                plane[o] |= left(right(packed[o], u8(k * width)) & mask, shift)


@jit
def unpack_radix(packed, levels, per, codes):
    """Two loops: LLVM does not vectorize one with five outputs that might overlap."""
    n, base = packed.shape[0], u8(levels)
    a, b, c = codes[:n], codes[n : 2 * n], codes[2 * n : 3 * n]
    for o in range(n):
        byte = packed[o]
        rest = divided(byte, levels)
        last = divided(rest, levels)
        left = last - divided(last, levels) * base if per == 3 else last
        a[o], b[o], c[o] = byte - rest * base, rest - last * base, left
    if per == 5:
        a, b = codes[3 * n : 4 * n], codes[4 * n : 5 * n]
        for o in range(n):
            byte = c[o]
            rest = divided(byte, levels)
            last = divided(rest, levels)
            left = last - divided(last, levels) * base
            c[o], a[o], b[o] = byte - rest * base, rest - last * base, left


@inlined
def divided(x, levels):
    """x // levels for a byte x, by multiplication: exact for 3, 5 and 6 (all 256 values tested)."""
    return (
        u8((u16(x) * u16(205)) >> u16(10))
        if levels == 5
        else u8((u16(x) * u16(171)) >> u16(9 if levels == 3 else 10))
    )
