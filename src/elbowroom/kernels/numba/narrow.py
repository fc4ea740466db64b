"""Smaller integers (specification: `reference/narrow.py`)."""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.numba.compiled import CHUNK, TILE, jit
from elbowroom.kernels.numba.launch import array, parallel


def narrow(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = outputs.narrow(x, dtype)
    lost = torch.zeros(-(-x.numel() // (CHUNK * TILE)), dtype=torch.int64)
    _narrow(array(x), array(out), array(lost))
    return out, lost.sum()


@jit
def narrow_run(x, out):
    lost = 0
    for o in range(x.shape[0]):
        out[o] = x[o]
        lost += np.int64(out[o]) != np.int64(x[o])
    return lost


@parallel
def _narrow(x, out, lost):
    for i_c in prange(lost.shape[0]):
        first, last = i_c * CHUNK * TILE, min((i_c + 1) * CHUNK * TILE, x.shape[0])
        lost[i_c] = narrow_run(x[first:last], out[first:last])
