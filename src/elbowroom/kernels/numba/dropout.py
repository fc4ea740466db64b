"""Dropout by counter (specification: `reference/dropout.py`)."""

import numpy as np
from numba import prange
from torch import Tensor

from elbowroom.kernels.layout import drop_below
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, jit
from elbowroom.kernels.numba.launch import parallel, split_seed, words
from elbowroom.kernels.numba.noise import tile_key, word_at
from elbowroom.kernels.numba.rounding import from_float, target, to_float


def dropout(x: Tensor, seed: int, p: float, out: Tensor) -> None:
    source, kind = words(x)
    below, scale = np.uint32(drop_below(p)), np.float32(1 / (1 - p))
    _dropout(source, words(out)[0], kind, *split_seed(seed), below, scale)


@jit
def thin(values, key, below, scale, out):
    """out [n] <- values [n] * scale where the word of the element is large enough, else 0."""
    for o in range(out.shape[0]):
        word = word_at(key, o)
        kept = values[o] * scale
        out[o] = kept if word >= below else f32(0)


@parallel
def _dropout(x, out, kind, seed_low, seed_high, below, scale):
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_y = np.empty(TILE, f32), np.empty(TILE, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            n = last - first
            values = to_float(x[first:last], kind, b_x[:n])
            thinned = target(out[first:last], kind, b_y[:n])
            thin(values, tile_key(i_t, seed_low, seed_high), below, scale, thinned)
            from_float(thinned, kind, out[first:last])
