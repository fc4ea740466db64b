"""Backward of a layer norm on its normalized input (spec: `reference/layer_norm_backward.py`).

Each row becomes its gradient while it is in the cache. Sums over rows are taken in float32 by work
item, then in float64, in the same order however many threads there are.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.numba.compiled import MOST_ITEMS, f32, jit, summing
from elbowroom.kernels.numba.launch import array, parallel, words
from elbowroom.kernels.numba.rounding import from_float, to_float

_LEAST_ROWS = 16  # of an item: its sums take as much memory as two rows


def layer_norm_backward(
    grad: Tensor, weight: Tensor, rstd: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    row, rows = len(weight), len(rstd)
    sums = np.zeros((max(1, min(MOST_ITEMS, rows // _LEAST_ROWS)), 2, row), f32)
    _rows(*words(grad), array(weight), array(rstd), words(x)[0], sums)
    of_weight, of_bias = torch.from_numpy(sums).sum(0, dtype=torch.float64)
    return of_weight.float(), of_bias.float()


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
