"""Lorenzo prediction (specification: `reference/predict.py`): a row at a time, left to right.

A map is `rows * columns * inner` numbers in memory, the neighbor on the left is `inner` before,
the one above `columns * inner`.
"""

import numpy as np

from elbowroom.kernels.numba.compiled import counted, i32, jit, u64


@jit
def residuals(q, first, rows, columns, inner, r):
    """r [n] <- the residuals of elements first .. first + n; q [at, first + n) ends with them."""
    n, row = r.shape[0], columns * inner
    ahead = q.shape[0] - n
    place = first % (rows * row)
    j, o = place % row, 0
    while o < n:
        count = min(n - o, inner - j if j < inner else row - j)  # one run: same neighbors
        left, above = inner if j >= inner else 0, row if place >= row else 0
        differences(q, u64(ahead + o), u64(left), u64(above), u64(o), u64(o + count), r)
        o, j, place = o + count, j + count, place + count
        j = 0 if j == row else j
        place = 0 if place == rows * row else place


@jit
def differences(q, at, left, above, first, last, r):
    """Writes the differences of one run from `at`; a distance of 0 means no such neighbor."""
    at -= first
    if left and above:
        for o in range(first, last):
            e = at + o
            r[o] = q[e] - q[e - left] - q[e - above] + q[e - above - left]
    elif left or above:
        for o in range(first, last):
            r[o] = q[at + o] - q[at + o - (left + above)]
    else:
        for o in range(first, last):
            r[o] = q[at + o]


@jit
def restore(codes, flags, place, rows, columns, inner, lines):
    """codes [n], where flags is -1, from residuals to q, in place; where it is 0 they are q.

    place  of the first in its map        lines [2, inner + columns * inner] int32: the rows above
           and here, which live from call to call, and start with `inner` zeros
    """
    row, n = columns * inner, codes.shape[0]
    i_r, j, o = place // row, place % row, 0
    while o < n:
        if i_r == 0 and j == 0:
            lines[:] = 0
        count = min(n - o, row - j)
        above, here = u64((i_r + 1) & 1), u64(i_r & 1)
        if inner == 1 and j == 0 and i_r + 1 < rows and n - o >= 2 * row:
            restore_two(codes, flags, u64(o), u64(row), lines, above)
            o, i_r = o + 2 * row, (i_r + 2) % rows
            continue
        if inner == 1:
            restore_one(codes, flags, u64(o), u64(count), lines, above, here, u64(j))
        else:
            for i in range(u64(count)):
                k, left = u64(o) + i, u64(j) + i
                right = left + u64(inner)
                predicted = lines[here, left] + lines[above, right] - lines[above, left]
                codes[k] += i32(flags[k]) & predicted
                lines[here, right] = codes[k]
        o, j, i_r = o + count, 0, (i_r + 1) % rows


@jit
def restore_one(codes, flags, first, count, lines, above, here, j):
    """A run with neighbors side by side: the one on the left stays in a register."""
    for i in range(count):
        up = lines[above, j + i + u64(1)] - lines[above, j + i]
        codes[first + i] += i32(flags[first + i]) & up
    left = lines[here, j]
    for i in range(count):
        left = codes[first + i] + (i32(flags[first + i]) & left)
        codes[first + i] = left
        lines[here, j + i + u64(1)] = left


@jit
def restore_two(codes, flags, first, row, lines, above):
    """Two whole rows of such a map. Both wait for what is on their left: so they wait together."""
    for i in range(row):
        up = lines[above, i + u64(1)] - lines[above, i]
        codes[first + i] += i32(flags[first + i]) & up
    left, lower_left, second = i32(0), i32(0), first + row
    for i in range(row):
        corner, flag = left, i32(flags[second + i])
        left = codes[first + i] + (i32(flags[first + i]) & left)
        lower_left = codes[second + i] + (flag & (left - corner)) + (flag & lower_left)
        codes[first + i], codes[second + i] = left, lower_left
        lines[above, i + u64(1)] = lower_left


@counted
def lines_of(columns, inner):
    """Returns the two lines of memory that `restore` needs."""
    return np.zeros((2, inner + columns * inner), np.int32)
