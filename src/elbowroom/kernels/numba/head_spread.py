"""How long the rows of each head are, and how wide a step of their code would be.

Specification: `reference/head_spread.py`. Each row is read once; by torch it takes twelve ops.
"""

from collections.abc import Sequence

import numpy as np
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.numba.compiled import TILE, f32, jit, leaf, summing
from elbowroom.kernels.numba.lanes import least as lower
from elbowroom.kernels.numba.lanes import most as higher
from elbowroom.kernels.numba.launch import array, parallel, words
from elbowroom.kernels.numba.rounding import BOTTOM, TOP, as_float, order, to_float

f64 = np.float64
_INF = f32(np.inf)


def head_spread(
    x: Tensor, width: int, sizes: Sequence[int], strides: Sequence[int], shares: bool
) -> Tensor:
    found = outputs.head_spread(x, sizes)
    B, H, T = sizes
    by_row = x.new_empty(2, B, H, T, dtype=found.dtype)
    rows = array(by_row)
    _rows(*words(x), width, *strides, rows)
    _heads(rows, shares, array(found))
    return found


@summing
def _length(x):
    total = f32(0)
    for o in range(x.shape[0]):
        total += x[o] * x[o]
    return total


@leaf
def _range(x):
    """The largest less the least of x [n], as `order` integers."""
    low, high = TOP, BOTTOM
    for o in range(x.shape[0]):
        place = order(x[o])
        low, high = lower(low, place), higher(high, place)
    return as_float(order(high)) - as_float(order(low))


@jit
def _of_head(lengths, ranges):
    """The weighted and the plain means of length and range^2, of rows [T] of a head."""
    longest, length, wide = f32(0), f64(0), f64(0)
    for t in range(lengths.shape[0]):
        longest = max(longest, lengths[t])
        length += f64(lengths[t])
        wide += f64(ranges[t]) * f64(ranges[t])
    scale = f64(1) / f64(longest) if longest > f32(0) else f64(0)
    total, of_length, of_range = f64(0), f64(0), f64(0)
    for t in range(lengths.shape[0]):
        share = f64(lengths[t]) * scale
        weight = share * share * share if longest > f32(0) else f64(1)
        total += weight
        of_length += weight * f64(lengths[t])
        of_range += weight * f64(ranges[t]) * f64(ranges[t])
    n = f64(lengths.shape[0])
    return of_length / total, of_range / total, length / n, wide / n


@jit
def _part(x, D, step, lengths, ranges):
    """Finds the length and range of each row of x; rows begin `step` elements apart."""
    for t in range(lengths.shape[0]):
        row = x[t * step : t * step + D]
        lengths[t], ranges[t] = _length(row), _range(row.view(np.int32))


@parallel
def _rows(x, kind, D, of_batch, of_head, of_token, out):
    B, H, T = out.shape[1], out.shape[2], out.shape[3]
    n = max(1, TILE // D) if kind else T  # rows that are turned into float32 at once
    for i in prange(B * H):
        b, h = i // H, i % H
        lengths, ranges = out[0, b, h], out[1, b, h]
        spare = np.empty(n * D if kind else 0, f32)
        for first in range(0, T, n):
            last, at = min(first + n, T), b * of_batch + h * of_head + first * of_token
            if kind:
                for t in range(last - first):
                    start = at + t * of_token
                    to_float(x[start : start + D], kind, spare[t * D : t * D + D])
                _part(spare, D, D, lengths[first:last], ranges[first:last])
            else:
                _part(x[at:].view(np.float32), D, of_token, lengths, ranges)


@parallel
def _heads(rows, shares, out):
    B, H, T = rows.shape[1], rows.shape[2], rows.shape[3]
    for b in prange(B):
        if shares:
            for h in range(1, H):
                for t in range(T):
                    rows[1, b, 0, t] = max(rows[1, b, 0, t], rows[1, b, h, t])
        for h in range(H):
            lengths = rows[0, b, h]
            found = _of_head(lengths, rows[1, b, 0 if shares else h])
            finite = True
            for t in range(T):
                finite = finite and lengths[t] < _INF
            for i_m in range(4):
                out[i_m, b, h] = f32(found[i_m]) if finite else f32(np.nan)
