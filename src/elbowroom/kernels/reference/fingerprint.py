"""Fingerprints of the bits of many tensors, which tell whether one has changed.

A tensor is W = ceil(nbytes / 8) words of 64 bits, the last one filled up with zeros. Of k of them,
one in each of k equal stretches, a fingerprint is the sum of mixed words, modulo 2^64:

    place(i) = floor(i W / k) + (40503 i) mod floor(W / k)          all of them for k = W
    sum over i of mix(word(place(i)) + (i + 1) STEP)

mix is the finalizer of SplitMix64 (Steele, Lea, Flood 2014), so that a change of signs or a
permutation shows as any other: two contents share a fingerprint with a probability of 2^-64.
"""

import torch
from torch import Tensor

from elbowroom.kernels.states import FINGERPRINT as CONSTANTS

_SIGN = 1 << 63


def fingerprint(xs: list[Tensor], words: list[int]) -> Tensor:
    """int64 [len(xs)], on a CPU. xs are dense; `words` is k of each: 1 to W, 0 of an empty one."""
    found = [_of(x.detach(), k) for x, k in zip(xs, words, strict=True)]
    return torch.tensor(found, dtype=torch.int64)


def _of(x: Tensor, k: int) -> int:
    step, by_one, by_other, jump = CONSTANTS
    n = x.numel()
    if not n:
        return 0
    raw = x.as_strided((n,), (1,)).view(torch.uint8).cpu()
    length = -(-raw.numel() // 8)  # W
    filled = torch.zeros(8 * length, dtype=torch.uint8)
    filled[: raw.numel()] = raw
    i = torch.arange(k)
    place = i * length // k + (i * jump) % max(length // k, 1)
    z = filled.view(torch.int64)[place] + (i + 1) * _signed(step)
    z = (z ^ _shifted(z, 30)) * _signed(by_one)
    z = (z ^ _shifted(z, 27)) * _signed(by_other)
    return int((z ^ _shifted(z, 31)).sum())


def _signed(x: int) -> int:
    """Returns the number in [-2^63, 2^63) that has the same 64 bits."""
    return (x ^ _SIGN) - _SIGN


def _shifted(z: Tensor, by: int) -> Tensor:
    """Returns z shifted to the right as 64 bits without a sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)
