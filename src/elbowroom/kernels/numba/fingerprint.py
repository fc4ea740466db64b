"""Fingerprints of the bits of many tensors (specification: `reference/fingerprint.py`)."""

import numpy as np
import torch
from torch import Tensor

from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.compiled import counted, leaf, u8, u64
from elbowroom.kernels.states import FINGERPRINT

STEP, BY_ONE, BY_OTHER = map(u64, FINGERPRINT[:3])
JUMP = FINGERPRINT[3]


def fingerprint(xs: list[Tensor], words: list[int]) -> Tensor:
    found = torch.empty(len(xs), dtype=torch.int64)
    table = torch.tensor([[x.data_ptr() for x in xs], [x.nbytes for x in xs], words])  # [3, n]
    fingerprints(table.data_ptr(), len(xs), found.data_ptr())
    return found


@leaf
def mix(z):
    z = (z ^ (z >> u64(30))) * BY_ONE
    z = (z ^ (z >> u64(27))) * BY_OTHER
    return z ^ (z >> u64(31))


@leaf
def word_at(x, i):
    """Return word i of the bytes x, at any address; what lies behind the last byte is 0."""
    word = u64(0)
    for o in range(min(8, x.shape[0] - 8 * i)):
        word |= u64(x[8 * i + o]) << u64(8 * o)
    return word


@leaf
def of_all(x):
    """Return the sum over whole words, all of which are read."""
    total = u64(0)
    for i in range(x.shape[0]):
        total += mix(x[i] + u64(i + 1) * STEP)
    return total


@counted
def fingerprints(table, n, out):
    """Write those of n tensors to out [n], all by addresses.

    table [3, n]: their addresses, bytes, and numbers of words that are read, in int64
    """
    about, found = array_at(table, 3 * n, np.int64), array_at(out, n, np.int64)
    for i_x in range(n):
        address, nbytes, k = about[i_x], about[n + i_x], about[2 * n + i_x]
        x, W = array_at(address, nbytes, u8), (nbytes + 7) // 8
        total, first = u64(0), 0
        if k == W and address % 8 == 0:
            first = nbytes // 8
            total += of_all(array_at(address, first, u64))
        for i in range(first, k):
            at = i * W // k + (i * JUMP) % max(W // k, 1)
            total += mix(word_at(x, at) + u64(i + 1) * STEP)
        found[i_x] = np.int64(total)
