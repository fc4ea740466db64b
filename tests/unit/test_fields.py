"""Bit fields by instructions and in steps: the same words."""

import numpy as np

from elbowroom.kernels.numba.compiled import jit
from elbowroom.kernels.numba.fields import deposit, deposit_in_steps, extract, extract_in_steps


@jit
def _both_ways(words, masks, found):
    for i in range(words.shape[0]):
        found[0, i], found[1, i] = extract(words[i], masks[i]), extract_in_steps(words[i], masks[i])
        found[2, i], found[3, i] = deposit(words[i], masks[i]), deposit_in_steps(words[i], masks[i])
        found[4, i] = deposit_in_steps(found[1, i], masks[i])


def test_steps_equal_the_instructions():
    draw = np.random.default_rng(0)
    n = 2000
    words = draw.integers(0, 2**64, n, dtype=np.uint64)
    low = (np.uint64(1) << draw.integers(0, 9, n, dtype=np.uint64)) - np.uint64(1)
    some = draw.integers(0, 2, (n, 8), dtype=np.uint64) * low[:, None]
    masks = (some << (np.uint64(8) * np.arange(8, dtype=np.uint64))).sum(axis=1, dtype=np.uint64)
    found = np.zeros((5, n), np.uint64)
    _both_ways(words, masks, found)
    assert (found[0] == found[1]).all()
    assert (found[2] == found[3]).all()
    assert (found[4] == words & masks).all()


def test_three_of_eight_codes_by_hand():
    words, masks = (
        np.array([0x0706050403020100], np.uint64),
        np.array([0x0700000007000700], np.uint64),
    )
    found = np.zeros((5, 1), np.uint64)
    _both_ways(words, masks, found)
    assert found[0, 0] == 1 | 3 << 3 | 7 << 6
