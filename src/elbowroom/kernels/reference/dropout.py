"""Dropout by counter: which elements stay follows from (seed, element), so no mask is stored.

    word(j) = mix(key(tile) + j * 0x9E3779B9)    32 bits for element j of its tile (see `noise.py`)
    out     = x / (1 - p) where word >= p * 2^32, else 0

The same call on a gradient is its backward. p is met to 2^-33. A NaN that is dropped becomes 0.
"""

import torch
from torch import Tensor

from elbowroom.kernels.layout import TILE, drop_below, tiles
from elbowroom.kernels.reference.noise import mix

_MASK = 0xFFFFFFFF


def dropout(x: Tensor, seed: int, p: float, out: Tensor) -> None:
    """x [N] -> out [N], which is written."""
    low, high = seed & _MASK, (seed >> 32) & _MASK
    key = mix(mix(mix(torch.arange(tiles(x.numel()), device=x.device)) ^ low) ^ high)  # [tiles]
    step = torch.arange(TILE, device=x.device) * 0x9E3779B9  # [TILE]
    word = mix((key[:, None] + step) & _MASK).view(-1)[: x.numel()]
    scale = torch.tensor(1 / (1 - p), dtype=torch.float32, device=x.device)
    out.copy_(torch.where(word >= drop_below(p), x.float() * scale, 0.0))
