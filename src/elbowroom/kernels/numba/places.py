"""Indices of max-pooling as places in their windows (specification: `reference/places.py`).

A work item is a run of whole bytes of packed places; an element's row and column are counted on.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.numba.compiled import CHUNK, TILE, inlined, u8
from elbowroom.kernels.numba.launch import array, parallel
from elbowroom.kernels.windows import window_of

_RUN = CHUNK * TILE  # elements of a work item: whole bytes, whatever the bits


def places_pack(x: Tensor, window: Sequence[int], maps: Sequence[int]) -> tuple[Tensor, Tensor]:
    w = window_of(window)
    packed = outputs.places(x, window)
    lost = torch.zeros(-(-x.numel() // _RUN), dtype=torch.int64)
    _pack(array(x), tuple(w), w.bits, tuple(maps[1:]), array(packed), array(lost))
    return packed, lost.sum()


def places_unpack(packed: Tensor, window: Sequence[int], maps: Sequence[int], out: Tensor) -> None:
    w = window_of(window)
    _unpack(array(packed), tuple(w), w.bits, tuple(maps[1:]), array(out))


@inlined
def start_of(w, row, column):
    return (row * w[3] - w[5]) * w[0] + column * w[4] - w[6]


@inlined
def place_of(offset, step, kernel):
    """offset // step, but at least 0 and below kernel: comparisons cost less than a division."""
    place = 0
    for k in range(1, kernel):
        place += offset >= k * step
    return place


@parallel
def _pack(x, w, bits, maps, packed, lost):
    rows, columns, inner = maps
    each = 8 // bits
    for i_c in prange(lost.shape[0]):
        first, last = i_c * _RUN, min((i_c + 1) * _RUN, x.shape[0])
        row, column, channel = _place_at(first, rows, columns, inner)
        start, wrong, byte = start_of(w, row, column), 0, 0
        for o in range(first, last):
            offset = x[o] - start
            y = place_of(offset, w[7] * w[0], w[1])
            offset -= y * w[7] * w[0]
            place_x = place_of(offset, w[8], w[2])
            wrong += offset != place_x * w[8]
            byte |= (y * w[2] + place_x) << (bits * (o % each))
            if o % each == each - 1 or o == last - 1:
                packed[o // each] = u8(byte)
                byte = 0
            channel += 1
            if channel == inner:
                row, column, channel = _next(row, column + 1, rows, columns)
                start = start_of(w, row, column)
        lost[i_c] = wrong


@parallel
def _unpack(packed, w, bits, maps, out):
    rows, columns, inner = maps
    each, mask = 8 // bits, (1 << bits) - 1
    offsets = np.empty(w[1] * w[2], np.int64)
    for place in range(offsets.shape[0]):
        offsets[place] = place // w[2] * w[7] * w[0] + place % w[2] * w[8]
    for i_c in prange((out.shape[0] + _RUN - 1) // _RUN):
        first, last = i_c * _RUN, min((i_c + 1) * _RUN, out.shape[0])
        row, column, channel = _place_at(first, rows, columns, inner)
        start = start_of(w, row, column)
        for o in range(first, last):
            place = (packed[o // each] >> u8(bits * (o % each))) & mask
            out[o] = start + offsets[min(place, offsets.shape[0] - 1)]
            channel += 1
            if channel == inner:
                row, column, channel = _next(row, column + 1, rows, columns)
                start = start_of(w, row, column)


@inlined
def _place_at(o, rows, columns, inner):
    """Row, column and channel of element o."""
    return o // (columns * inner) % rows, o // inner % columns, o % inner


@inlined
def _next(row, column, rows, columns):
    """Row, column and channel where the next column begins."""
    ends = column == columns
    row = row + 1 if ends else row
    return (0 if row == rows else row), (0 if ends else column), 0
