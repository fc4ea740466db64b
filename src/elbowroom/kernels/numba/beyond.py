"""Test of many tensors for an element NaN or too large (specification: `reference/beyond.py`).

Without its sign, a float read as an integer is the larger the larger its value is, Inf above all
numbers and NaN above Inf: one comparison an element tells all three.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.compiled import i32, leaf, u64
from elbowroom.kernels.numba.lanes import most
from elbowroom.kernels.numba.launch import FLOATS, parallel
from elbowroom.kernels.numba.rounding import TOP
from elbowroom.kernels.numba.step import parameter_at

ITEM = 1 << 14  # elements of a work item of the parallel loop
_LARGEST_HALF = 0x7BFF  # the bits of the largest float16


def beyond(xs: list[Tensor], limit: float) -> Tensor:
    found = torch.zeros((), dtype=torch.int32)
    if not xs:
        return found
    bits = int(np.float32(limit).view(np.int32))
    limits = bits, bits >> 16, _LARGEST_HALF  # of a bf16: the upper half of its float32's bits
    kinds = np.array([FLOATS[x.dtype] for x in xs])
    starts = np.zeros(len(xs) + 1, np.int64)
    np.cumsum([x.numel() for x in xs], out=starts[1:])
    addresses = np.array([x.data_ptr() for x in xs], np.int64)
    above = np.zeros(-(-starts[-1] // ITEM), np.bool_)
    _beyond(
        addresses, starts, kinds, np.array(limits, np.int32)[kinds], above, size=int(starts[-1])
    )
    return found.fill_(bool(above.any()))


@leaf
def largest_of_floats(x, at, n):
    largest = i32(0)
    for o in range(n):
        largest = most(largest, i32(x[at + o] & TOP))
    return largest


@leaf
def largest_of_halves(x, at, n):
    largest = i32(0)
    for o in range(n):
        largest = most(largest, i32(i32(x[at + o]) & i32(0x7FFF)))
    return largest


@leaf
def any_beyond(i_c, addresses, starts, kinds, limits):
    """Returns whether an element of a work item is NaN or too large.

    An item may be of several tensors.
    """
    first = i_c * ITEM
    last = min(first + ITEM, starts[starts.shape[0] - 1])
    i_x = parameter_at(starts, first)
    found = False
    while first < last:
        stop = min(last, starts[i_x + 1])
        at, n = u64(first - starts[i_x]), u64(stop - first)
        if kinds[i_x]:
            bits = largest_of_halves(array_at(addresses[i_x], stop, np.int16), at, n)
        else:
            bits = largest_of_floats(array_at(addresses[i_x], stop, np.int32), at, n)
        found = found or bits > limits[i_x]
        first = stop
        i_x += 1
    return found


@parallel
def _beyond(addresses, starts, kinds, limits, above):
    for i_c in prange(above.shape[0]):
        above[i_c] = any_beyond(i_c, addresses, starts, kinds, limits)
