"""The residual of a transform code: words, norms, and the codebook (`reference/fdsr.py`)."""

import numpy as np

from elbowroom.kernels.bands import FIRST_GAIN, HASH_BITS, UNITS
from elbowroom.kernels.numba.compiled import counted, f32, i32, jit, u8, u32, u64
from elbowroom.kernels.numba.rounding import as_bits, as_float


@jit
def gain_code(g, extra):
    """A float32 that is not negative to 8 bits; extra: 2^19 - 1 rounds up, 2^18 to the nearest."""
    if g == f32(0):
        return u8(0)
    return u8(min(max(((as_bits(g) + i32(extra)) >> i32(19)) - i32(FIRST_GAIN), i32(1)), i32(255)))


@jit
def gain_value(code):
    return f32(0) if code == 0 else as_float((i32(code) + i32(FIRST_GAIN)) << i32(19))


@counted
def add_members(b_q, planes, kept, ratio, out, total, length):
    """Words and norms of the kept tiles into out; what they add to the codebook's sums.

    b_q [R, lanes] int32 units; ratio: their RMS as a share of absmax; total [256, R], length [256]
    int64. Kept are the tiles of most energy, the first ones among equals.
    """
    R, L = b_q.shape
    squares, word = np.zeros(L, u32), np.zeros(L, u8)  # 63 squares of 2^26 fit 32 bits
    for p in range(u64(R)):
        for o in range(u64(L)):
            squares[o] += u32(b_q[p, o] * b_q[p, o])
    side = np.empty(L, i32)
    for h in range(u64(HASH_BITS)):
        side[:] = i32(0)
        fours = u64(R // 4 * 4)
        for p in range(u64(0), fours, u64(4)):  # fewer trips through memory than one by one
            q, r, s = p + u64(1), p + u64(2), p + u64(3)
            a, b, c, d = planes[h, p], planes[h, q], planes[h, r], planes[h, s]
            for o in range(u64(L)):
                side[o] += b_q[p, o] * a + b_q[q, o] * b + b_q[r, o] * c + b_q[s, o] * d
        for p in range(fours, u64(R)):
            for o in range(u64(L)):
                side[o] += b_q[p, o] * planes[h, p]
        for o in range(u64(L)):
            word[o] |= u8(side[o] > i32(0)) << u8(h)
    bitmap = L // 8 if kept < L else 0
    out[:bitmap] = u8(0)
    place = 0
    for o in range(L):
        rank, own = i32(0), squares[o]
        for other in range(L):
            rank += i32(squares[other] > own)
        for other in range(o):
            rank += i32(squares[other] == own)
        if rank >= kept:
            continue
        if bitmap:
            out[o // 8] |= u8(1 << (o % 8))
        root = np.sqrt(f32(squares[o]))
        out[bitmap + place] = word[o]
        out[bitmap + kept + place] = gain_code(root * f32(1 / UNITS) / ratio, 1 << 18)
        place += 1
        length[word[o]] += np.int64(root)
        row = total[word[o]]
        for p in range(R):
            row[p] += np.int64(b_q[p, o])


@jit
def codebook_of(total, length, codebook):
    """codebook [256, R] int8 <- sum r / sum |r| in units of 1 / 127."""
    for i in range(codebook.shape[0]):
        whole = f32(max(length[i], 1))
        for p in range(codebook.shape[1]):
            mean = f32(total[i, p]) / whole * f32(127)
            codebook[i, p] = np.int8(np.rint(min(max(mean, f32(-127)), f32(127))))


@jit
def restored(source, kept, scale, codebook, raster, y):
    """Rows raster [R] of y <- the residual again, 0 for tiles without."""
    R, L = raster.shape[0], y.shape[1]
    bitmap = L // 8 if kept < L else 0
    place = 0
    for o in range(L):
        if (bitmap and (source[o // 8] >> u8(o % 8)) & u8(1) == 0) or place >= kept:
            for p in range(R):
                y[raster[p], o] = f32(0)
            continue
        size = gain_value(source[bitmap + kept + place]) * scale * f32(1 / 127)
        row = codebook[source[bitmap + place]]
        place += 1
        for p in range(R):
            y[raster[p], o] = f32(row[p]) * size
