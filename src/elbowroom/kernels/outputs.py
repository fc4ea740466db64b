"""Allocates the outputs of ops: their dtype, shape and device are defined here alone.

The launchers of numba and Triton fill this memory; fakes of ops return it as it is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elbowroom.kernels.bands import WORDS, bands_of, tiles_of
from elbowroom.kernels.layout import blocks, groups, packed_nbytes, tiles
from elbowroom.kernels.maps import blocks as averaged
from elbowroom.kernels.maps import ranges as scaled
from elbowroom.kernels.windows import window_of


def bits(x: Tensor) -> Tensor:
    """Allocates one bit an element."""
    return x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)


def bytes_of(x: Tensor, nbytes: int | torch.SymInt) -> Tensor:
    """Allocates `nbytes` bytes: a payload, or codes."""
    return x.new_empty(nbytes, dtype=torch.uint8)


def bounds(x: Tensor, sides: int = 1) -> Tensor:
    """Allocates the ends of each tile's values, or of each side of it."""
    return x.new_empty(sides * tiles(x.numel()), 2, dtype=torch.bfloat16)


def group(x: Tensor, levels: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates codes, step and low."""
    step = x.new_empty(groups(x.numel(), group_size), dtype=torch.bfloat16)
    return bytes_of(x, packed_nbytes(levels, x.numel())), step, torch.empty_like(step)


def dither(x: Tensor, levels: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates codes, ranges and bounds."""
    ranges = x.new_empty(groups(x.numel(), group_size), 2, dtype=torch.uint8)
    return bytes_of(x, packed_nbytes(levels, x.numel())), ranges, bounds(x)


def division(
    x: Tensor, levels: int, block: int, reach: int, maps: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates codes, mean, scale and low."""
    mean = x.new_empty(averaged(maps, block).entries, dtype=torch.bfloat16)
    scale = x.new_empty(scaled(maps, block, reach).entries, dtype=torch.bfloat16)
    return bytes_of(x, packed_nbytes(levels, x.numel())), mean, scale, torch.empty_like(scale)


def fp8(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Allocates codes and scale."""
    scale = x.new_empty(groups(x.numel(), group_size), dtype=torch.bfloat16)
    return bytes_of(x, x.numel()), scale


def fdsr(
    x: Tensor, maps: Sequence[int], block: int, levels: Sequence[int], kept: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates payload, scales and codebook."""
    b = bands_of(block, tuple(levels))
    count = -(-tiles_of(maps, block) // b.lanes)
    return (
        x.new_empty(count, b.nbytes(kept), dtype=torch.uint8),
        x.new_empty(count, b.scales(kept), dtype=torch.bfloat16),
        x.new_empty(WORDS if kept else 0, b.rest, dtype=torch.int8),
    )


def comet(x: Tensor, *, aware: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates bits, headers and sizes; the payload's size depends on the values."""
    return (
        bits(x) if aware else bytes_of(x, 0),
        bytes_of(x, blocks(x.numel())),
        x.new_empty(tiles(x.numel()), dtype=torch.int16),
    )


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocates the smaller integers."""
    return torch.empty_like(x, dtype=dtype)


def places(x: Tensor, window: Sequence[int]) -> Tensor:
    """Allocates the packed places in windows."""
    return bytes_of(x, window_of(window).nbytes(x.numel()))


def row_statistics(x: Tensor, width: int) -> Tensor:
    """Allocates mean, variance, least and most of each row."""
    return x.new_empty(4, x.numel() // width, dtype=torch.float32)


def head_spread(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Allocates four means of each head."""
    return x.new_empty(4, *sizes[:2], dtype=torch.float32)
