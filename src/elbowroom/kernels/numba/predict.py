"""Lorenzo prediction (specification: `reference/predict.py`): a row at a time, left to right.

A map is `rows * columns * inner` numbers in memory, the neighbour on the left is `inner` before,
the one above `columns * inner`.
"""

import numpy as np

from elbowroom.kernels.numba.compiled import i32, jit


@jit
def residuals(q, first, rows, columns, inner, r):
    """r [n] <- the residuals of elements first .. first + n; q [at, first + n) ends with them."""
    n, at = r.shape[0], q.shape[0] - r.shape[0] - first  # q[at + i] is that of element i
    row = columns * inner
    i = first
    while i < first + n:
        place = i % (rows * row)
        j = place % row
        end = min(first + n, i + (inner - j if j < inner else row - j))  # one run: same neighbours
        here, out = q[at + i : at + end], r[i - first : end - first]
        left = q[at + i - inner : at + end - inner] if j >= inner else here
        for o in range(out.shape[0]):
            out[o] = here[o] - (left[o] if j >= inner else i32(0))
        if place >= row:
            above = q[at + i - row : at + end - row]
            for o in range(out.shape[0]):
                out[o] -= above[o]
            if j >= inner:
                aslant = q[at + i - row - inner : at + end - row - inner]
                for o in range(out.shape[0]):
                    out[o] += aslant[o]
        i = end


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
        above, here = lines[(i_r + 1) & 1, j:], lines[i_r & 1, j:]
        run, coded = codes[o : o + count], flags[o : o + count]
        if inner == 1:
            restore_one(run, coded, above, here)
        else:
            for i in range(count):
                run[i] += i32(coded[i]) & (here[i] + above[inner + i] - above[i])
                here[inner + i] = run[i]
        o, j, i_r = o + count, 0, (i_r + 1) % rows


@jit
def restore_one(run, coded, above, here):
    """A run with neighbours side by side: the one on the left stays in a register."""
    left = here[0]
    for i in range(run.shape[0]):
        run[i] += i32(coded[i]) & (above[i + 1] - above[i])
    for i in range(run.shape[0]):
        left = run[i] + (i32(coded[i]) & left)
        run[i] = left
        here[i + 1] = left


@jit
def lines_of(columns, inner):
    """What `restore` remembers."""
    return np.zeros((2, inner + columns * inner), np.int32)
