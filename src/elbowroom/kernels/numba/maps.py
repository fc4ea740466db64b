"""Cells over maps (`kernels/maps.py`): a table spread over elements; sums and extremes of blocks.

Places are unsigned here, and there are no slices: a row may have 7 elements, a slice costs as much
as moving 50, and an unsigned index is not checked for being negative.
"""

import numpy as np

from elbowroom.kernels.numba.compiled import f32, i32, jit
from elbowroom.kernels.numba.rounding import as_float

up = np.uintp
LEAST, MOST = f32(np.inf), f32(-np.inf)


@jit
def spread(table, shift, first, over, out):
    """out [n] float32 <- the entry of the cell of elements first, first + 1, ... of the tensor.

    table [cells]: bits of bf16 (shift 16) or of float32 (shift 0).
    """
    if over.inner == 1:
        spread_elements(table, i32(shift), first, over, out)
    else:
        spread_channels(table, i32(shift), first, over, out)


@jit
def spread_elements(table, shift, first, over, out):
    """One channel: a row is a few runs of one value; cells as wide as the map are one run."""
    rows, columns, high, wide = up(over.rows), up(over.columns), up(over.high), up(over.wide)
    down, across = (rows + high - up(1)) // high, (columns + wide - up(1)) // wide
    n = up(out.shape[0])
    line = up(first) // columns
    c = up(first) - line * columns
    i_o = line // rows
    r = line - i_o * rows
    o = up(0)
    while o < n:
        cell = (i_o * down + r // high) * across
        if across == up(1):
            last = min(r - r % high + high, rows)
            stop = o + min((last - r) * columns - c, n - o)
            value = as_float(i32(table[cell]) << shift)
            for e in range(o, stop):
                out[e] = value
            r = last
        else:
            stop = o + min(columns - c, n - o)
            spread_row(table, cell + c // wide, shift, wide - c % wide, wide, out, o, stop)
            r += up(1)
        o, c = stop, up(0)
        if r == rows:
            i_o, r = i_o + up(1), up(0)


@jit
def spread_row(table, cell, shift, left, wide, out, o, stop):
    """out[o:stop] <- `left` times the entry of a cell, `wide` times that of the next, and so on."""
    if left < wide:
        value = as_float(i32(table[cell]) << shift)
        for e in range(o, min(o + left, stop)):
            out[e] = value
        o, cell = min(o + left, stop), cell + up(1)
    if wide == up(8):  # a constant: one vector store a cell
        for _ in range((stop - o) // up(8)):
            value = as_float(i32(table[cell]) << shift)
            for e in range(up(8)):
                out[o + e] = value
            o, cell = o + up(8), cell + up(1)
    elif wide == up(16):
        for _ in range((stop - o) // up(16)):
            value = as_float(i32(table[cell]) << shift)
            for e in range(up(16)):
                out[o + e] = value
            o, cell = o + up(16), cell + up(1)
    while o < stop:
        value = as_float(i32(table[cell]) << shift)
        for e in range(o, min(o + wide, stop)):
            out[e] = value
        o, cell = min(o + wide, stop), cell + up(1)


@jit
def spread_channels(table, shift, first, over, out):
    """Channels lie next to each other: an element's run is a run of its cell's row of the table."""
    rows, columns, high, wide = up(over.rows), up(over.columns), up(over.high), up(over.wide)
    inner = up(over.inner)
    down, across = (rows + high - up(1)) // high, (columns + wide - up(1)) // wide
    n = up(out.shape[0])
    place = up(first) // inner
    i = up(first) - place * inner
    line = place // columns
    c = place - line * columns
    i_o = line // rows
    r = line - i_o * rows
    o = up(0)
    while o < n:
        cell = ((i_o * down + r // high) * across + c // wide) * inner + i
        run = min(inner - i, n - o)
        for e in range(run):
            out[o + e] = as_float(i32(table[cell + e]) << shift)
        o, i, c = o + run, up(0), c + up(1)
        if c == columns:
            r, c = r + up(1), up(0)
            if r == rows:
                i_o, r = i_o + up(1), up(0)


@jit
def sum_rows(x, start, step, n, tall, part, total, least, most):
    """total, least, most [n] <- down the columns of `tall` rows of x; total is of x * part.

    The rows begin at start, start + step, ... Columns are independent, so that a plain comparison
    is a vector one. A NaN is passed over by least and most (but for the first row), and stays in
    total. Two rows a turn: half the traffic with total, least and most.
    """
    at, step, n, tall = up(start), up(step), up(n), up(tall)
    for o in range(n):
        x0 = x[at + o]
        total[o], least[o], most[o] = x0 * part, x0, x0
    k = up(1)
    while k + up(2) <= tall:
        at += step
        below = at + step
        for o in range(n):
            x0, x1 = x[at + o], x[below + o]
            total[o] = (total[o] + x0 * part) + x1 * part
            low, high = least[o], most[o]
            low = x0 if x0 < low else low
            high = x0 if x0 > high else high
            least[o] = x1 if x1 < low else low
            most[o] = x1 if x1 > high else high
        at, k = below, k + up(2)
    if k < tall:
        at += step
        for o in range(n):
            x0 = x[at + o]
            total[o] += x0 * part
            least[o] = x0 if x0 < least[o] else least[o]
            most[o] = x0 if x0 > most[o] else most[o]


@jit
def fold(n, full, wide, inner, total, least, most):
    """Columns by halves: each run of wide * inner numbers -> its first `inner`.

    Of the `full` numbers the first n exist; the others are made neutral.
    """
    n, full, inner, run = up(n), up(full), up(inner), up(wide) * up(inner)
    for o in range(n, full):
        total[o], least[o], most[o] = f32(0), LEAST, MOST
    if run == up(8):
        fold_eights(full, total, least, most)
        return
    for k in range(full // run):
        half = run // up(2)
        while half >= inner:
            for o in range(k * run, k * run + half):
                merge(total, least, most, o, o + half)
            half //= up(2)


@jit
def fold_eights(n, total, least, most):
    """`fold` with wide 8 and inner 1, written out: 6x as fast."""
    for k in range(n // up(8)):
        o = k * up(8)
        a, b, c, d = total[o], total[o + up(1)], total[o + up(2)], total[o + up(3)]
        e, f, g, h = total[o + up(4)], total[o + up(5)], total[o + up(6)], total[o + up(7)]
        total[o] = ((a + e) + (c + g)) + ((b + f) + (d + h))
        low, high = least[o], most[o]
        for j in range(up(1), up(8)):
            low = least[o + j] if least[o + j] < low else low
            high = most[o + j] if most[o + j] > high else high
        least[o], most[o] = low, high


@jit
def merge(total, least, most, a, b):
    total[a] += total[b]
    least[a] = least[b] if least[b] < least[a] else least[a]
    most[a] = most[b] if most[b] > most[a] else most[a]
