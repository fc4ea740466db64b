"""Integers in as few bytes as hold them, and a count of those that do not fit."""

import torch
from torch import Tensor


def narrow(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [N] integer -> [N] of the smaller integer `dtype`; how many did not survive, [] int64."""
    y = x.to(dtype)
    return y, (y.to(x.dtype) != x).sum()
