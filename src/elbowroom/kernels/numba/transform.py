"""Tiles of maps as rows of lanes, their DCT and Hadamard transforms (reference/fdsr.py).

A group's values lie as [positions, lanes]: one element of all its tiles is one row, so that every
loop below runs along rows, and a transform is a sum of whole rows.
"""

import numpy as np

from elbowroom.kernels.numba.compiled import f32, i32, inlined, jit, u64
from elbowroom.kernels.numba.rounding import (
    as_bits,
    as_float,
    bf16_nearest,
    half_nearest,
    half_value,
)


@jit
def locate(maps, B, first, count, o_x, o_row, o_column):
    """Where each lane's tile starts: in x, and in its map; returns whether all are whole."""
    rows, columns, inner = maps[1], maps[2], maps[3]
    across, down = (columns + B - 1) // B, (rows + B - 1) // B
    whole = rows % B == 0 and columns % B == 0
    plane, place = first // (across * down), first % (across * down)
    row, column = place // across, place % across
    for o in range(o_x.shape[0]):
        o_row[o], o_column[o] = row * B, column * B
        start = plane // inner * rows * columns * inner + plane % inner
        o_x[o] = u64(start + (row * columns + column) * B * inner)
        if first + o + 1 < count:  # one tile on, without divisions
            column += 1
            if column == across:
                column, row = 0, row + 1
            if row == down:
                row, plane = 0, plane + 1
    return whole


@jit
def gather(x, kind, maps, B, o_x, o_row, o_column, whole, b_x):
    """b_x [B * B, lanes] <- the located tiles of x; edges of a map are repeated."""
    rows, columns, inner = maps[1], maps[2], maps[3]
    if whole:
        for i in range(B):
            for k in range(B):
                row, off = b_x[i * B + k], u64((i * columns + k) * inner)
                if kind == 0:
                    for o in range(row.shape[0]):
                        row[o] = as_float(x[o_x[o] + off])
                else:
                    for o in range(row.shape[0]):
                        row[o] = value_of(x[o_x[o] + off], kind)
        return
    for o in range(b_x.shape[1]):
        for i in range(B):
            down = min(i, rows - 1 - o_row[o])
            for k in range(B):
                off = (down * columns + min(k, columns - 1 - o_column[o])) * inner
                b_x[i * B + k, o] = value_of(x[o_x[o] + u64(off)], kind)


@jit
def scatter(b_x, maps, B, o_x, o_row, o_column, real, whole, out, kind):
    """The inverse: elements of the first `real` tiles that exist are written, as their dtype."""
    rows, columns, inner = maps[1], maps[2], maps[3]
    if whole:
        for i in range(B):
            for k in range(B):
                row, off = b_x[i * B + k], u64((i * columns + k) * inner)
                if kind == 0:
                    for o in range(real):
                        out[o_x[o] + off] = as_bits(row[o])
                else:
                    for o in range(real):
                        out[o_x[o] + off] = word_of(row[o], kind)
        return
    for o in range(real):
        for i in range(min(B, rows - o_row[o])):
            for k in range(min(B, columns - o_column[o])):
                at = o_x[o] + u64((i * columns + k) * inner)
                out[at] = word_of(b_x[i * B + k, o], kind)


@inlined
def value_of(word, kind):
    return (
        as_float(i32(word) << i32(16))
        if kind == 1
        else (half_value(word) if kind == 2 else as_float(word))
    )


@jit
def word_of(value, kind):
    """Bits of a value in its dtype; where float16's range ends, its largest number."""
    if kind == 0:
        return as_bits(value)
    if kind == 1:
        return bf16_nearest(value)
    word = half_nearest(value)
    return word - i32((word & i32(0x7FFF)) == i32(0x7C00))


@inlined
def weighted(w, b_in, r0, r1, r2, r3, b_out, row):
    """b_out[row] <- the sum of w[j] * b_in[r_j] over the 2 to 4 weights, added in turn."""
    if w.shape[0] == 4:
        for o in range(b_in.shape[1]):
            b_out[row, o] = (
                w[0] * b_in[r0, o] + w[1] * b_in[r1, o] + w[2] * b_in[r2, o] + w[3] * b_in[r3, o]
            )
    elif w.shape[0] == 3:
        for o in range(b_in.shape[1]):
            b_out[row, o] = w[0] * b_in[r0, o] + w[1] * b_in[r1, o] + w[2] * b_in[r2, o]
    else:
        for o in range(b_in.shape[1]):
            b_out[row, o] = w[0] * b_in[r0, o] + w[1] * b_in[r1, o]


@jit
def dct(b_in, source, even, odd, b_half, b_out, target):
    """Rows target[:, s] of b_out <- the DCT of rows source[:, s] of b_in, for each s.

    even [B - B // 2, B - B // 2], odd [B // 2, B // 2]: the left halves of the even and the odd
    rows of D; b_half [B, lanes] is scratch. source and target are unsigned: see device.py.
    """
    B, n = source.shape[0], b_in.shape[1]
    H, E = B // 2, B - B // 2
    for s in range(B):
        for j in range(H):
            first, last, above, below = source[j, s], source[B - 1 - j, s], u64(j), u64(E + j)
            for o in range(n):
                b_half[above, o] = b_in[first, o] + b_in[last, o]
                b_half[below, o] = b_in[first, o] - b_in[last, o]
        if B % 2:
            middle, above = source[H, s], u64(H)
            for o in range(n):
                b_half[above, o] = b_in[middle, o]
        for i in range(E):
            row = target[2 * i, s]
            weighted(even[i], b_half, u64(0), u64(1), u64(2), u64(3), b_out, row)
        for i in range(H):
            row, r = target[2 * i + 1, s], u64(E)
            weighted(odd[i], b_half, r, r + u64(1), r + u64(2), r + u64(3), b_out, row)


@jit
def inverse_dct(b_in, source, even_t, odd_t, b_half, b_out, target):
    """The inverse of `dct`; even_t and odd_t are even and odd transposed."""
    B, n = source.shape[0], b_in.shape[1]
    H, E = B // 2, B - B // 2
    for s in range(B):
        at = source[:, s]
        last = B - 1
        for j in range(E):
            r2, r3 = at[min(4, last)], at[min(6, last)]
            weighted(even_t[j], b_in, at[0], at[2], r2, r3, b_half, u64(j))
        for j in range(H):
            r2, r3 = at[min(5, last)], at[min(7, last)]
            weighted(odd_t[j], b_in, at[1], at[3], r2, r3, b_half, u64(E + j))
        for j in range(H):
            first, last_row, even, odd = target[j, s], target[B - 1 - j, s], u64(j), u64(E + j)
            for o in range(n):
                b_out[first, o] = b_half[even, o] + b_half[odd, o]
                b_out[last_row, o] = b_half[even, o] - b_half[odd, o]
        if B % 2:
            middle, even = target[H, s], u64(H)
            for o in range(n):
                b_out[middle, o] = b_half[even, o]


@jit
def coefficients(b_x, even, odd, at, at_t, place_t, b_half, b_t, b_y):
    """b_y by position <- the DCT of b_x by row and column (at [B, B]); place_t: see Tables."""
    dct(b_x, at, even, odd, b_half, b_t, at)
    dct(b_t, at_t, even, odd, b_half, b_y, place_t)


@jit
def elements(b_y, even_t, odd_t, at, at_t, place, b_half, b_t, b_x):
    """The inverse of `coefficients`."""
    inverse_dct(b_y, place, even_t, odd_t, b_half, b_t, at)
    inverse_dct(b_t, at_t, even_t, odd_t, b_half, b_x, at_t)


@jit
def hadamard(flat, lanes):
    """flat [size * lanes] <- the Walsh-Hadamard transform of its `size` rows."""
    size, half = flat.shape[0] // lanes, 1
    while half < size:
        run = half * lanes
        for start in range(0, flat.shape[0], 2 * run):
            a, c = flat[start : start + run], flat[start + run : start + 2 * run]
            for o in range(run):
                above, below = a[o] + c[o], a[o] - c[o]
                a[o], c[o] = above, below
        half *= 2
    scale = f32(np.float64(size) ** -0.5)
    for o in range(flat.shape[0]):
        flat[o] *= scale


@jit
def mix(b_z, signs, spans, back):
    """b_z [positions, lanes] is mixed in place; `back`: the inverse. spans [n, 2]: start, size."""
    lanes = b_z.shape[1]
    flat = b_z.reshape(b_z.size)
    for p in range(1, b_z.shape[0]):
        row, sign = b_z[p], signs[p]
        if not back and sign < f32(0):
            for o in range(lanes):
                row[o] = -row[o]
    for s in range(spans.shape[0]):
        start, size = spans[spans.shape[0] - 1 - s if back else s]
        hadamard(flat[start * lanes : (start + size) * lanes], lanes)
    for p in range(1, b_z.shape[0]):
        row, sign = b_z[p], signs[p]
        if back and sign < f32(0):
            for o in range(lanes):
                row[o] = -row[o]
