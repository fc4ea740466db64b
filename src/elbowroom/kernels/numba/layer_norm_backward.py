"""Backward of a layer norm on its normalized input (spec: `reference/layer_norm_backward.py`).

Each row becomes its gradient while it is in the cache. Sums over rows are taken in float32 by work
item, then in float64, in the same order however many threads there are.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.compiled import MOST_ITEMS, counted, f32, i32, jit, summing
from elbowroom.kernels.numba.launch import array, parallel, runs_serially, words
from elbowroom.kernels.numba.rounding import from_float, to_float

f64 = np.float64
_LEAST_ROWS = 16  # of an item: its sums take as much memory as two rows


def layer_norm_backward(
    grad: Tensor, weight: Tensor, rstd: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    rows, row = rstd.numel(), weight.numel()
    of_weight, of_bias = torch.empty_like(weight), torch.empty_like(weight)
    sums_at = of_weight.data_ptr(), of_bias.data_ptr()
    if grad.dtype is torch.float32 and runs_serially(grad.numel()):
        of_rows = weight.data_ptr(), rstd.data_ptr()
        _backward_at(grad.data_ptr(), *of_rows, x.data_ptr(), rows, row, *sums_at)
        return of_weight, of_bias
    sums = np.zeros((_items(rows), 2, row), f32)
    _rows(*words(grad), array(weight), array(rstd), words(x)[0], sums)
    _add_up(sums, *sums_at)
    return of_weight, of_bias


@jit
def _items(rows):
    """Return for how many work items the sums are taken apart."""
    return max(1, min(MOST_ITEMS, rows // _LEAST_ROWS))


@jit
def _add_up(sums, of_weight, of_bias):
    """Write the sums over all items [items, 2, D] to two addresses."""
    D = sums.shape[2]
    for i in range(2):
        out = array_at(of_bias if i else of_weight, D, f32)
        for o in range(D):
            total = f64(0)
            for i_c in range(sums.shape[0]):
                total += f64(sums[i_c, i, o])
            out[o] = f32(total)


@summing
def _means(dy, x, weight):
    """The means of dy * weight and of dy * weight * x."""
    total, product = f32(0), f32(0)
    for o in range(dy.shape[0]):
        scaled = dy[o] * weight[o]
        total += scaled
        product += scaled * x[o]
    each = f32(1) / f32(dy.shape[0])
    return total * each, product * each


@jit
def _add(dy, x, of_weight, of_bias):
    for o in range(dy.shape[0]):
        of_weight[o] += dy[o] * x[o]
        of_bias[o] += dy[o]


@jit
def _finish(y, dy, weight, scale, mean, slope):
    for o in range(y.shape[0]):
        y[o] = scale * (dy[o] * weight[o] - mean - y[o] * slope)


@parallel
def _rows(grad, kind, weight, rstd, x, sums):
    R, D = rstd.shape[0], weight.shape[0]
    each = (R + sums.shape[0] - 1) // sums.shape[0]
    for i_c in prange(sums.shape[0]):
        b_x, b_dy = np.empty(D, f32), np.empty(D, f32)
        for i_r in range(i_c * each, min(i_c * each + each, R)):
            y = to_float(x[i_r * D : i_r * D + D], kind, b_x)
            dy = to_float(grad[i_r * D : i_r * D + D], kind, b_dy)
            mean, slope = _means(dy, y, weight)
            _add(dy, y, sums[i_c, 0], sums[i_c, 1])
            _finish(y, dy, weight, rstd[i_r], mean, slope)
            from_float(y, kind, x[i_r * D : i_r * D + D])


_rows_serial = _rows.serial


@counted
def _backward_at(grad, weight, rstd, x, R, D, of_weight, of_bias):
    """All of it for float32 on one thread, by addresses."""
    sums, dy, made = (
        np.zeros((_items(R), 2, D), f32),
        array_at(grad, R * D, i32),
        array_at(x, R * D, i32),
    )
    _rows_serial(dy, 0, array_at(weight, D, f32), array_at(rstd, R, f32), made, sums)
    _add_up(sums, of_weight, of_bias)
