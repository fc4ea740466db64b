"""Mean, variance, least and largest value of each row (spec: `reference/row_statistics.py`).

The row is read twice, the second time from the cache. torch takes four ops for it, of which the
extremes of short rows alone take as long as ten passes over them.
"""

import numpy as np
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.compiled import MOST_ITEMS, TILE, counted, f32, i32, jit, summing
from elbowroom.kernels.numba.lanes import least as lower
from elbowroom.kernels.numba.lanes import most as higher
from elbowroom.kernels.numba.launch import array, parallel, words
from elbowroom.kernels.numba.rounding import BOTTOM, TOP, as_float, bf16_nearest, order, to_float

_INF = i32(0x7F800000)
_LEAST = i32(-0x7F800001)  # -Inf, as `order` has it
_NAN = f32(np.nan)
i16 = np.int16


def row_statistics(x: Tensor, width: int) -> Tensor:
    found = outputs.row_statistics(x, width)
    _rows(*words(x), width, array(found.view(-1)).reshape(4, -1))
    return found


@summing
def _sum(x):
    total = f32(0)
    for o in range(x.shape[0]):
        total += x[o]
    return total


@summing
def _deviations(x, mean):
    """The means of x - mean and of its square."""
    total, squares = f32(0), f32(0)
    for o in range(x.shape[0]):
        off = x[o] - mean
        total += off
        squares += off * off
    each = f32(1) / f32(x.shape[0])
    return total * each, squares * each


@jit
def _extremes(x):
    """The least and the largest of x [n], as `order` integers: a NaN lies beyond the infinities."""
    low, high = TOP, BOTTOM
    for o in range(x.shape[0]):
        place = order(x[o])
        low, high = lower(low, place), higher(high, place)
    return low, high


@jit
def _part(rows, D, out, first):
    """Fills out [4, first ...] by rows [n * D]."""
    for i_r in range(rows.shape[0] // D):
        row, at = rows[i_r * D : i_r * D + D], first + i_r
        mean = _sum(row) / f32(D)
        # What the mean is rounded by counts against a variance far below its square.
        off, squares = _deviations(row, mean)
        out[0, at], out[1, at] = mean + off, max(squares - off * off, f32(0))
        low, high = _extremes(row.view(np.int32))
        if low < _LEAST or high > _INF:
            out[0, at], out[1, at], out[2, at], out[3, at] = _NAN, _NAN, _NAN, _NAN
        else:
            out[2, at], out[3, at] = as_float(order(low)), as_float(order(high))


@counted
def row_scales(x, R, D, keep_zeros, rounding, least, most, means, scales):
    """Write the mean and 1 / std (bf16) of rows [R, D] of float32; return whether all are finite.

    x, means, scales: addresses
    keep_zeros: 1 / rms in place of 1 / std. rounding: the share of its square that a mean is
    rounded by, which counts as variance. least, most: bounds of the scales
    """
    values, mean, scale = array_at(x, R * D, f32), array_at(means, R, f32), array_at(scales, R, i16)
    beyond = 0
    for i_r in range(R):
        row = values[i_r * D : i_r * D + D]
        about = _sum(row) / f32(D)
        off, squares = _deviations(row, about)
        about += off
        var = max(squares - off * off, f32(0)) + about * about * (
            f32(1) if keep_zeros else rounding
        )
        beyond += not var < np.inf
        mean[i_r] = about
        scale[i_r] = bf16_nearest(min(max(f32(1) / np.sqrt(var), least), most))
    return beyond == 0


@parallel
def _rows(x, kind, D, out):
    R, n = out.shape[1], max(1, TILE // D)  # rows that are turned into float32 at once
    parts = (R + n - 1) // n
    items = max(1, min(MOST_ITEMS, parts // 4))
    each = (parts + items - 1) // items
    for i_c in prange(items):
        spare = np.empty(n * D, f32)
        for i_p in range(i_c * each, min(i_c * each + each, parts)):
            first, last = i_p * n, min(i_p * n + n, R)
            part = to_float(x[first * D : last * D], kind, spare[: (last - first) * D])
            _part(part, D, out, first)
