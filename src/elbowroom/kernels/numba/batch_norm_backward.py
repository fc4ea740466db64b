"""Backward of a batch norm on its normalized input (spec: `reference/batch_norm_backward.py`).

One pass takes the sums, another makes the gradient in place of the normalized input, which is what
was decoded: so backward has one tensor, where torch's own has two.

Sums are taken in float32 over what a tile has of a channel, then in float64, in the same order
however many threads there are.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.layout import tiles
from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.compiled import (
    CHUNK,
    MOST_ITEMS,
    TILE,
    counted,
    f32,
    i32,
    jit,
    summing,
)
from elbowroom.kernels.numba.launch import array, parallel, runs_serially, words
from elbowroom.kernels.numba.rounding import from_float, to_float

f64 = np.float64


def batch_norm_backward(
    grad: Tensor, factor: Tensor, inner: int, x: Tensor
) -> tuple[Tensor, Tensor]:
    n, C = grad.numel(), factor.numel()
    items = max(1, min(MOST_ITEMS, -(-tiles(n) // CHUNK)))
    if runs_serially(n) and grad.dtype is torch.float32 and factor.is_contiguous():
        weight, bias = torch.empty_like(factor), torch.empty_like(factor)
        sums_at = weight.data_ptr(), bias.data_ptr()
        of_x = factor.data_ptr(), C, inner, x.data_ptr()
        _backward_at(grad.data_ptr(), n, items, *of_x, *sums_at)
        return weight, bias
    sums = np.zeros((items, 3, C))
    source, made = words(grad), words(x)[0]
    _sums(*source, inner, made, sums)
    bias, weight, values = torch.from_numpy(sums.sum(0))
    count, wide = n / C, factor.double()
    mean = values / count
    weight -= mean * bias
    by_value = -weight / count * wide
    shift = -bias / count * wide - by_value * mean
    _gradient(*source, array(factor), array(by_value.float()), array(shift.float()), inner, made)
    return weight.float(), bias.float()


@summing
def _add_run(dy, x, sums, c):
    total, product, values = f32(0), f32(0), f32(0)
    for o in range(dy.shape[0]):
        total += dy[o]
        product += dy[o] * x[o]
        values += x[o]
    sums[0, c] += total
    sums[1, c] += product
    sums[2, c] += values


@jit
def _add_each(dy, x, sums, c):
    for o in range(dy.shape[0]):
        sums[0, c + o] += dy[o]
        sums[1, c + o] += dy[o] * x[o]
        sums[2, c + o] += x[o]


@jit
def _add_runs(dy, x, start, inner, sums):
    n, C = x.shape[0], sums.shape[1]
    first, last = 0, min(inner - start % inner, n)
    c = (start // inner) % C
    while first < n:
        _add_run(dy[first:last], x[first:last], sums, c)
        first, last = last, min(last + inner, n)
        c = c + 1 if c + 1 < C else 0


@jit
def _add_neighbors(dy, x, start, sums, part):
    """Adds sums as `_add_runs` does for inner = 1; part [3, C] float32 is scratch."""
    n, C = x.shape[0], sums.shape[1]
    c = start % C
    rest = min((C - c) % C, n)
    _add_each(dy[:rest], x[:rest], sums, c)
    R = (n - rest) // C
    rows_dy = dy[rest : rest + R * C].reshape(R, C)
    rows_x = x[rest : rest + R * C].reshape(R, C)
    part[:] = f32(0)
    for i in range(R):
        for o in range(C):
            part[0, o] += rows_dy[i, o]
            part[1, o] += rows_dy[i, o] * rows_x[i, o]
            part[2, o] += rows_x[i, o]
    for o in range(C):
        sums[0, o] += part[0, o]
        sums[1, o] += part[1, o]
        sums[2, o] += part[2, o]
    _add_each(dy[rest + R * C :], x[rest + R * C :], sums, 0)


@parallel
def _sums(grad, kind, inner, x, sums):
    N = grad.shape[0]
    T = (N + TILE - 1) // TILE
    each = (T + sums.shape[0] - 1) // sums.shape[0]
    for i_c in prange(sums.shape[0]):
        b_x, b_dy = np.empty(TILE, f32), np.empty(TILE, f32)
        part = np.empty((3, sums.shape[2]), f32)
        for i_t in range(i_c * each, min(i_c * each + each, T)):
            start = i_t * TILE
            n = min(TILE, N - start)
            values = to_float(x[start : start + n], kind, b_x[:n])
            dy = to_float(grad[start : start + n], kind, b_dy[:n])
            if inner == 1:
                _add_neighbors(dy, values, start, sums[i_c], part)
            else:
                _add_runs(dy, values, start, inner, sums[i_c])


@jit
def _mix_run(y, dy, factor, by, shift):
    for o in range(y.shape[0]):
        y[o] = dy[o] * factor + (y[o] * by + shift)


@jit
def _mix_each(y, dy, factor, by, shift):
    for o in range(y.shape[0]):
        y[o] = dy[o] * factor[o] + (y[o] * by[o] + shift[o])


@jit
def _mix_runs(y, dy, start, inner, factor, by, shift):
    n, C = y.shape[0], factor.shape[0]
    first, last = 0, min(inner - start % inner, n)
    c = (start // inner) % C
    while first < n:
        _mix_run(y[first:last], dy[first:last], factor[c], by[c], shift[c])
        first, last = last, min(last + inner, n)
        c = c + 1 if c + 1 < C else 0


@jit
def _mix_neighbors(y, dy, start, factor, by, shift):
    n, C = y.shape[0], factor.shape[0]
    c = start % C
    rest = min((C - c) % C, n)
    _mix_each(y[:rest], dy[:rest], factor[c:], by[c:], shift[c:])
    R = (n - rest) // C
    rows, rows_dy = y[rest : rest + R * C].reshape(R, C), dy[rest : rest + R * C].reshape(R, C)
    for i in range(R):
        for o in range(C):
            rows[i, o] = rows_dy[i, o] * factor[o] + (rows[i, o] * by[o] + shift[o])
    _mix_each(y[rest + R * C :], dy[rest + R * C :], factor, by, shift)


@parallel
def _gradient(grad, kind, factor, by, shift, inner, x):
    """x <- factor * grad + by * x + shift, by channel."""
    N = grad.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_dy = np.empty(TILE, f32), np.empty(TILE, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            y = to_float(x[first:last], kind, b_x[: last - first])
            dy = to_float(grad[first:last], kind, b_dy[: last - first])
            if inner == 1:
                _mix_neighbors(y, dy, first, factor, by, shift)
            else:
                _mix_runs(y, dy, first, inner, factor, by, shift)
            from_float(y, kind, x[first:last])


_sums_serial, _gradient_serial = _sums.serial, _gradient.serial


@counted
def _backward_at(grad, N, items, factor, C, inner, x, weight, bias):
    """All of it for float32 on one thread, by addresses: the bits of the threads' way."""
    dy, made = array_at(grad, N, i32), array_at(x, N, i32)
    of_channel = array_at(factor, C, f32)
    of_weight, of_bias = array_at(weight, C, f32), array_at(bias, C, f32)
    sums, by_value, shift = np.zeros((items, 3, C)), np.empty(C, f32), np.empty(C, f32)
    _sums_serial(dy, 0, inner, made, sums)
    count = N / C
    for c in range(C):
        for i in range(1, items):
            for m in range(3):
                sums[0, m, c] += sums[i, m, c]
        wide, bias, mean = f64(of_channel[c]), sums[0, 0, c], sums[0, 2, c] / count
        weight = sums[0, 1, c] - mean * bias
        by = -weight / count * wide
        of_bias[c], of_weight[c] = f32(bias), f32(weight)
        by_value[c], shift[c] = f32(by), f32(-bias / count * wide - by * mean)
    _gradient_serial(dy, 0, of_channel, by_value, shift, inner, made)
