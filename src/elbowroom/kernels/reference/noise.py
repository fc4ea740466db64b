"""Uniform numbers from a counter: the same for (seed, element), whoever asks, in whatever order.

    key(tile) = mix(mix(mix(tile) ^ seed_low) ^ seed_high)    one 32-bit key a tile
    word(j)   = mix(key + j * 0x9E3779B9)   j in 0..1023           one 32-bit word for two elements
    u[j], u[j + 1024] = (low 16 bits + 1/2) / 65536, (high 16 bits + 1/2) / 65536      in (0, 1)

`mix` is a bijective 32-bit finalizer of the xor-shift-multiply kind. Nothing is stored and torch's
own generators are not touched. A grid of 65536 biases a rounding by at most 2^-17 of a step.
"""

import torch
from torch import Tensor

from elbowroom.kernels.layout import TILE

_MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """x [...] int64 holding 32-bit words -> [...] of the same kind."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def uniform(
    seed: int | Tensor, first_tile: int, tiles: int, device: torch.device, size: int = TILE
) -> Tensor:
    """u in (0, 1) for `tiles` whole tiles of `size`, [tiles, size] float32.

    seed: a number, or int64 [1] on the device
    """
    low, high = seed & _MASK, (seed >> 32) & _MASK
    tile = torch.arange(first_tile, first_tile + tiles, device=device)
    key = mix(mix(mix(tile) ^ low) ^ high)  # [tiles]
    step = torch.arange(size // 2, device=device) * 0x9E3779B9  # [size / 2]
    word = mix((key[:, None] + step) & _MASK)  # [tiles, size / 2]
    halves = torch.cat([word & 0xFFFF, word >> 16], dim=1)  # [tiles, size]
    return halves.to(torch.float32) * (1 / 65536) + (0.5 / 65536)
