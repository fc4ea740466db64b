"""Scale and shift by channel under a bitmap (specification: `reference/affine.py`)."""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.numba.bits import blank, unpack_flags
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, jit
from elbowroom.kernels.numba.launch import array, parallel, words
from elbowroom.kernels.numba.rounding import from_float, target, to_float


def affine(
    x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: Tensor | None, out: Tensor
) -> None:
    flags = torch.empty(0, dtype=torch.uint8) if bits is None else bits
    channels = array(scale), array(shift), inner
    _affine(*words(x), *channels, array(flags), bits is not None, words(out)[0])


@jit
def scale_run(values, scale, shift, y):
    for o in range(values.shape[0]):
        y[o] = values[o] * scale + shift


@jit
def scale_each(values, scale, shift, y):
    for o in range(values.shape[0]):
        y[o] = values[o] * scale[o] + shift[o]


@jit
def channels(values, start, inner, scale, shift, y):
    """y [n] <- values [n], of which the first is element `start` of the tensor."""
    n, C = values.shape[0], scale.shape[0]
    o = 0
    if inner == 1:  # channels lie next to each other
        while o < n:
            c = (start + o) % C
            run = min(C - c, n - o)
            scale_each(values[o : o + run], scale[c : c + run], shift[c : c + run], y[o : o + run])
            o += run
        return
    while o < n:
        at = start + o
        run = min(inner - at % inner, n - o)
        c = (at // inner) % C
        scale_run(values[o : o + run], scale[c], shift[c], y[o : o + run])
        o += run


@parallel
def _affine(x, kind, scale, shift, inner, bits, masked, out):
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_flag = np.empty(TILE, f32), np.empty(TILE, np.int8)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            values = to_float(x[first:last], kind, b_x[: last - first])
            y = target(out[first:last], kind, b_x[: last - first])
            channels(values, first, inner, scale, shift, y)
            if masked:
                unpack_flags(bits[first // 8 : (last + 7) // 8], b_flag)
                blank(y, b_flag)
            from_float(y, kind, out[first:last])
