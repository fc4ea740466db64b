"""Scale and shift by channel under a bitmap (specification: `reference/affine.py`).

As an op, and as the pieces that quantizers do it with on a tile that is in the cache anyway.
"""

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.bits import blank, unpack_flags
from elbowroom.kernels.numba.compiled import CHUNK, TILE, counted, f32, jit
from elbowroom.kernels.numba.launch import array, parallel, words
from elbowroom.kernels.numba.rounding import from_float, target, to_float

_NO_ROWS, _NO_BITS = np.empty((0, 0), f32), np.empty(0, np.uint8)


def affine(
    x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: Tensor | None, out: Tensor
) -> None:
    in_place = x.data_ptr() == out.data_ptr()
    by = channels(scale, shift, inner, x.numel())
    _affine(*words(x), *by, mask_array(bits), words(out)[0], in_place)


def channels(
    scale: Tensor | None, shift: Tensor | None, inner: int, n: int
) -> tuple[Any, Any, tuple[int, int]]:
    """Returns an affine in the form that `mapped` and `map_restored` take.

    That is scale and shift [R, C], then inner and the number of elements of a row.

    Scale and shift are empty arrays if there is nothing to scale by.
    """
    if scale is None or shift is None:
        return _NO_ROWS, _NO_ROWS, (1, 1)
    rows = [array(part.reshape(-1, part.shape[-1])) for part in (scale, shift)]
    return rows[0], rows[1], (inner, max(n // len(rows[0]), 1))


def mask_array(bits: Tensor | None) -> np.ndarray[Any, Any]:
    """The bits, or an empty array for no mask."""
    return _NO_BITS if bits is None else array(bits)


def at_channels(
    scale: Tensor | None, shift: Tensor | None, inner: int, n: int
) -> tuple[int, int, int, int, int, int]:
    """`channels` by addresses, as `rows_at` takes them: scale, shift, R, C; inner, n of a row."""
    if scale is None or shift is None:
        return 0, 0, 0, 0, 1, 1
    columns = scale.shape[-1]
    rows = scale.numel() // columns
    return scale.data_ptr(), shift.data_ptr(), rows, columns, inner, max(n // rows, 1)


def has_addresses(scale: Tensor | None, shift: Tensor | None) -> bool:
    """Returns whether an affine, if there is one, can be given by addresses: float32, in order."""
    if scale is None or shift is None:
        return True
    in_order = scale.is_contiguous() and shift.is_contiguous()
    return in_order and scale.dtype is shift.dtype is torch.float32


@counted
def rows_at(address, R, C):
    """The float32 matrix [R, C] at an address."""
    return array_at(address, R * C, f32).reshape(R, C)


@jit
def scale_run(y, scale, shift):
    for o in range(y.shape[0]):
        y[o] = y[o] * scale + shift


@jit
def scale_each(y, scale, shift):
    for o in range(y.shape[0]):
        y[o] = y[o] * scale[o] + shift[o]


@jit
def scale_runs(y, start, inner, scale, shift):
    """y [n] in place, of which the first is element `start` of the tensor."""
    n, C = y.shape[0], scale.shape[0]
    first, last = 0, min(inner - start % inner, n)
    c = (start // inner) % C
    while first < n:
        scale_run(y[first:last], scale[c], shift[c])
        first, last = last, min(last + inner, n)
        c = c + 1 if c + 1 < C else 0


@jit
def scale_neighbors(y, start, scale, shift):
    """Scales runs as `scale_runs` does if channels lie next to each other: inner = 1.

    Whole rows of them as an array of two dimensions: with three slices a row 5x slower (C = 64).
    """
    n, C = y.shape[0], scale.shape[0]
    c = start % C
    rest = min((C - c) % C, n)
    scale_each(y[:rest], scale[c:], shift[c:])
    R = (n - rest) // C
    rows = y[rest : rest + R * C].reshape(R, C)
    for i in range(R):
        for o in range(C):
            rows[i, o] = rows[i, o] * scale[o] + shift[o]
    scale_each(y[rest + R * C :], scale, shift)


@jit
def scale_tile(y, start, scale, shift, runs):
    """y [n] <- y * scale + shift by channel, if there are any; y[0] is element `start` of all."""
    if scale.shape[0] == 0:
        return
    inner, share = runs
    first, n = 0, y.shape[0]
    while first < n:
        i_r, at = (start + first) // share, (start + first) % share
        last = min(first + share - at, n)
        scale_share(y[first:last], at, scale[i_r], shift[i_r], inner)
        first = last


@jit
def scale_share(y, start, scale, shift, inner):
    """Scales one row as `scale_tile` does: scale, shift [C]."""
    if scale.shape[0] == 1:
        scale_run(y, scale[0], shift[0])
    elif inner == 1:
        scale_neighbors(y, start, scale, shift)
    else:
        scale_runs(y, start, inner, scale, shift)


@counted
def mapped(values, start, scale, shift, runs, spare):
    """values [n], or, where there are channels, spare [n] <- values * scale + shift."""
    if scale.shape[0] == 0:
        return values
    for o in range(values.shape[0]):  # then in place: LLVM gives up on a loop over what may overlap
        spare[o] = values[o]
    scale_tile(spare, start, scale, shift, runs)
    return spare


@jit
def map_restored(values, start, scale, shift, runs, mask, flags):
    """values [n] <- values * scale + shift by channel, then +0 where mask has no bit."""
    scale_tile(values, start, scale, shift, runs)
    blank_unset(values, start, mask, flags)


@jit
def blank_unset(values, start, mask, flags):
    """values [n] <- +0 where mask, if there is one, has no bit; flags [TILE] int8 is scratch."""
    if mask.shape[0] > 0:
        unpack_flags(mask[start // 8 : (start + values.shape[0] + 7) // 8], flags)
        blank(values, flags)


@parallel
def _affine(x, kind, scale, shift, runs, mask, out, in_place):
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_flag = np.empty(TILE, f32), np.empty(TILE, np.int8)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            values = to_float(x[first:last], kind, b_x[: last - first])
            y = target(out[first:last], kind, b_x[: last - first])
            if kind == 0 and not in_place:
                for o in range(last - first):
                    y[o] = values[o]
            map_restored(y, first, scale, shift, runs, mask, b_flag)
            from_float(y, kind, out[first:last])
