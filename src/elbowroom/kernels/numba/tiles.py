"""Tiles of maps to groups and back, in rows: [B, lanes, B] (see `transform.py`)."""

from elbowroom.kernels.numba.compiled import i32, inlined, jit, u64
from elbowroom.kernels.numba.rounding import (
    as_bits,
    as_float,
    bf16_nearest,
    half_nearest,
    half_value,
)
from elbowroom.kernels.numba.transform import load, store


@jit
def locate(maps, B, first, count, o_x, o_row, o_column):
    """Finds where each lane's tile starts in x and in its map; returns whether all are whole."""
    _, rows, columns, inner = maps
    across, down = (columns + B - 1) // B, (rows + B - 1) // B
    plane, place = first // (across * down), first % (across * down)
    row, column = place // across, place % across
    outer, channel = plane // inner, plane % inner
    for o in range(o_x.shape[0]):
        o_row[o], o_column[o] = row * B, column * B
        o_x[o] = u64(((outer * rows + row * B) * columns + column * B) * inner + channel)
        if first + o + 1 < count:  # one tile on, without divisions
            column += 1
            if column == across:
                column, row = 0, row + 1
            if row == down:
                row, channel = 0, channel + 1
            if channel == inner:
                channel, outer = 0, outer + 1
    return rows % B == 0 and columns % B == 0


@jit
def gather(x, kind, maps, B, o_x, o_row, o_column, whole, b_x):
    """b_x <- the located tiles of x; edges of a map are repeated."""
    _, rows, columns, inner = maps
    lanes = o_x.shape[0]
    if kind == 0 and inner == 1 and whole:
        if B == 8:
            gather_whole(8, 32, x, columns, o_x, b_x.view(i32))
        elif B == 7:
            gather_whole(7, 32, x, columns, o_x, b_x.view(i32))
        else:
            gather_whole(4, 128, x, columns, o_x, b_x.view(i32))
        return
    to = u64(0)
    for i in range(B):
        for o in range(lanes):
            start = o_x[o] + u64(min(i, rows - 1 - o_row[o]) * columns * inner)
            last = columns - 1 - o_column[o]
            for k in range(B):
                b_x[to] = value_of(x[start + u64(min(k, last) * inner)], kind)
                to += u64(1)


@jit
def scatter(b_x, maps, B, o_x, o_row, o_column, real, whole, out, kind):
    """Inverse of `gather`.

    Elements of the first `real` tiles that exist are written, as their dtype.
    """
    _, rows, columns, inner = maps
    lanes = o_x.shape[0]
    if kind == 0 and inner == 1 and whole:
        if B == 8:
            scatter_whole(8, 32, b_x.view(i32), columns, o_x, real, out)
        elif B == 7:
            scatter_whole(7, 32, b_x.view(i32), columns, o_x, real, out)
        else:
            scatter_whole(4, 128, b_x.view(i32), columns, o_x, real, out)
        return
    for i in range(B):
        for o in range(real):
            if i < rows - o_row[o]:
                at, start = u64((i * lanes + o) * B), o_x[o] + u64(i * columns * inner)
                for k in range(min(B, columns - o_column[o])):
                    out[start + u64(k * inner)] = word_of(b_x[at + u64(k)], kind)


@inlined
def gather_whole(B, L, x, columns, o_x, b_x):
    """Gathers whole tiles; all of a line is loaded before it is stored: one vector each."""
    for i in range(B):
        for o in range(L):
            at, to = o_x[o] + u64(i * columns), u64((i * L + o) * B)
            a, b, c, d, e, f, g, h = load(B, x, at, u64(1))
            store(B, b_x, to, u64(1), a, b, c, d, e, f, g, h)


@inlined
def scatter_whole(B, L, b_x, columns, o_x, real, out):
    for i in range(B):
        for o in range(real):
            at, to = u64((i * L + o) * B), o_x[o] + u64(i * columns)
            a, b, c, d, e, f, g, h = load(B, b_x, at, u64(1))
            store(B, out, to, u64(1), a, b, c, d, e, f, g, h)


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
