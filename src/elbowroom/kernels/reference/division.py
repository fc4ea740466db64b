"""Block means and a low-bit code of the differences: DIVISION, with maps of any size.

x is [outer, rows, columns, inner] in memory order, a *map* being the rows x columns of one (outer,
inner); a block is `block` x `block` elements of a map, shorter at its right and lower edge.

    block  mean  = average of the elements that it holds, nearest bf16
           h     = x - mean                               the mean as it is stored
    range  low   = min h                                  rounded down to bf16
           scale = (max h - low) / (levels - 1)           rounded up to bf16
    encode code  = clamp(floor((h - low) / scale + u), 0, levels - 1)       u uniform in (0, 1)
    decode x~    = mean + low + scale * code                                stochastic rounding
           x~    = mean + low + scale * (code - u + 1/2)                    dither: u drawn again

A range is that of reach x reach blocks or, at reach 0, of the whole map.

Unbiased, whatever the means are: they are known exactly, and only h is rounded. Variance
scale^2 f (1 - f) at remainder f, scale^2 / 6 on average; with dither scale^2 / 12 everywhere. A
range with a NaN, an Inf, or a value beyond 2^125 gets scale = NaN and decodes to NaN throughout.
Origin: DIVISION (arXiv 2208.04187), which leaves out what does not fill a block, rounds its
metadata after use, clamps below only, and has no dither.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from elbowroom.kernels.layout import tiles
from elbowroom.kernels.maps import Cells, blocks, ranges
from elbowroom.kernels.reference.codes import pack_codes, unpack_codes
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.rounding import LARGEST, bf16_down, bf16_up, inverse, store


def division_quantize(
    x: Tensor, seed: int, levels: int, block: int, reach: int, maps: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N] -> codes [packed] uint8, mean [blocks] bf16, scale, low [ranges] bf16.

    maps: (outer, rows, columns, inner), whose product is N; see `kernels/maps.py` for the tables.
    """
    n, x = x.numel(), x.float()
    over_blocks, over_ranges = blocks(maps, block), ranges(maps, block, reach)
    mean = means(x, over_blocks)  # [blocks]
    h = x - spread(mean, over_blocks)  # [N]
    least = cut(h, over_ranges, float("inf")).amin(dim=(2, 4)).view(-1)  # [ranges]
    most = cut(h, over_ranges, float("-inf")).amax(dim=(2, 4)).view(-1)
    small = (x.abs() < LARGEST).float()  # 0 for NaN too
    usable = cut(small, over_ranges, 1.0).amin(dim=(2, 4)).view(-1) != 0
    low = bf16_down(torch.where(usable, least, 0.0))
    scale = bf16_up((torch.where(usable, most, 0.0) - low.float()) * (1 / (levels - 1)))
    scale = torch.where(usable, scale, float("nan"))
    u = uniform(seed, 0, tiles(n), x.device).view(-1)[:n]
    v = (h - spread(low, over_ranges)) * inverse(spread(scale, over_ranges))
    codes = (v + u).nan_to_num(0.0).clamp(0, levels - 1).to(torch.uint8)
    return pack_codes(codes, levels), mean, scale, low


def division_dequantize(
    codes: Tensor,
    mean: Tensor,
    scale: Tensor,
    low: Tensor,
    seed: int,
    levels: int,
    block: int,
    reach: int,
    maps: list[int],
    dither: bool,
    out: Tensor,
) -> None:
    """Inverse of `division_quantize`: out [N] is written. The seed is read with dither only."""
    n, over_ranges = out.numel(), ranges(maps, block, reach)
    q = unpack_codes(codes, n, levels).float()
    base, step = spread(low, over_ranges), spread(scale, over_ranges)  # [N]
    if dither:
        q = q - uniform(seed, 0, tiles(n), codes.device).view(-1)[:n]
        base = base + step * 0.5
    store(spread(mean, blocks(maps, block)) + (base + step * q), out)


def means(x: Tensor, over: Cells) -> Tensor:
    """x [N] float32 -> the mean of each block [blocks] bf16.

    The order of the sum is part of the format: rows first to last, then columns by halves, each
    element times 1 / (high * wide) so that nothing overflows.
    """
    parts = cut(x * (1 / (over.high * over.wide)), over, 0.0).unbind(dim=2)
    total = parts[0]  # [outer, down, across, wide, inner]
    for row in parts[1:]:
        total = total + row
    while total.shape[3] > 1:
        left, right = total.chunk(2, dim=3)
        total = left + right
    held = cut(torch.ones_like(x), over, 0.0).sum(dim=(2, 4)) * (1 / (over.high * over.wide))
    return (total.squeeze(3) / held).view(-1).to(torch.bfloat16)


def cut(x: Tensor, over: Cells, fill: float) -> Tensor:
    """x [N] -> its cells [outer, down, high, across, wide, inner], `fill` where none is left."""
    outer, down, across, inner = over.table
    below, right = down * over.high - over.rows, across * over.wide - over.columns
    maps = x.view(outer, over.rows, over.columns, inner)
    padded = pad(maps, (0, 0, 0, right, 0, below), value=fill)
    return padded.view(outer, down, over.high, across, over.wide, inner)


def spread(table: Tensor, over: Cells) -> Tensor:
    """The entry of each element's cell: a table of bf16 [cells] -> [N] float32."""
    high = table.float().view(over.table).repeat_interleave(over.high, dim=1)
    wide = high.narrow(1, 0, over.rows).repeat_interleave(over.wide, dim=2)
    return wide.narrow(2, 0, over.columns).reshape(-1)
