"""Subtractive dither: an error that is uniform, unbiased and independent of the data.

    tile     lo, hi   = min rounded down, max rounded up to bf16
             unit     = hi / 255 - lo / 255
    group    a, b     = floor((min - lo) / unit), ceil((max - lo) / unit)    uint8 each
             low      = lo + a * unit;   step = (b - a) * unit / (levels - 1)
    encode   code     = clamp(floor((x - low) / step + u), 0, levels - 1)    u uniform in (0, 1)
    decode   x~       = low + step * (code - u + 1/2)                        the same u, drawn again

Metadata: 16 bits a group, 32 a tile.

code - u + 1/2 = v + 1/2 - frac(v + u) with v = (x - low) / step, and frac(v + u) is uniform
whatever v is: the error is uniform in +-step/2, its variance step^2 / 12 for every x. Metadata are
rounded outwards before they are used, so that no value leaves the range. A tile with a NaN, an Inf,
or a value beyond 2^125 gets lo = hi = NaN and decodes to NaN throughout. Origin: subtractive dither
(Schuchman 1964); its use on saved activations is ours.
"""

import torch
from torch import Tensor

from elbowroom.kernels.layout import TILE, groups, tiles
from elbowroom.kernels.reference.affine import mapped
from elbowroom.kernels.reference.codes import pack_codes, unpack_codes
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.rounding import (
    LARGEST,
    bf16_down,
    bf16_up,
    inverse,
    rows_of,
    store,
)


def dither_quantize(
    x: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N] -> codes [packed] uint8, ranges [G, 2] uint8: a, b; bounds [tiles, 2] bf16: lo, hi."""
    n, x = x.numel(), mapped(x, scale, shift, inner)
    bounds = tile_bounds(x)  # [tiles, 2]
    ranges = group_ranges(x, bounds, group_size)  # [G, 2]
    low, step = grid(ranges, bounds, levels, group_size)  # [G], [G]
    u = uniform(seed, 0, tiles(n), x.device).view(-1)[:n]
    each = torch.arange(n, device=x.device) // group_size
    v = (x - low[each]) * inverse(step)[each]
    codes = (v + u).nan_to_num(0.0).clamp(0, levels - 1).to(torch.uint8)
    return pack_codes(codes, levels), ranges, bounds


def dither_dequantize(
    codes: Tensor,
    ranges: Tensor,
    bounds: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    out: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
    mask: Tensor | None = None,
    first: int = 0,
) -> None:
    """Inverse of `dither_quantize`: out [N] is written.

    If out is part of a larger tensor, it is the part that begins with tile `first`.
    """
    n = first * TILE + out.numel()
    low, step = grid(ranges, bounds, levels, group_size)
    u = uniform(seed, 0, tiles(n), codes.device).view(-1)[:n]
    each = torch.arange(n, device=codes.device) // group_size
    q = unpack_codes(codes, n, levels).float()
    y = (low + step * 0.5)[each] + step[each] * (q - u)
    store(mapped(y, scale, shift, inner, mask)[first * TILE :], out)


def grid(ranges: Tensor, bounds: Tensor, levels: int, group_size: int) -> tuple[Tensor, Tensor]:
    """low [G] and step [G], float32, as encoder and decoder both compute them."""
    lo, hi = (
        bounds.float().repeat_interleave(TILE // group_size, dim=0)[: len(ranges)].unbind(dim=1)
    )
    unit = hi * (1 / 255) - lo * (1 / 255)
    a, b = ranges.float().unbind(dim=1)
    return lo + a * unit, (b - a) * unit * (1 / (levels - 1))


def tile_bounds(x: Tensor) -> Tensor:
    """x [N] float32 -> lo, hi of each tile [tiles, 2] bf16; NaN where a value is not usable."""
    rows, real = rows_of(x, TILE)
    smallest = rows.masked_fill(~real, float("inf")).amin(dim=1)
    largest = rows.masked_fill(~real, float("-inf")).amax(dim=1)
    usable = (smallest > -LARGEST) & (largest < LARGEST)  # False for NaN too
    bounds = torch.stack([bf16_down(smallest), bf16_up(largest)], dim=1)
    return torch.where(usable[:, None], bounds, float("nan"))


def group_ranges(x: Tensor, bounds: Tensor, group_size: int) -> Tensor:
    """x [N] float32, bounds [tiles, 2] -> a, b of each group [G, 2] uint8."""
    rows, real = rows_of(x, group_size)
    smallest = rows.masked_fill(~real, float("inf")).amin(dim=1)
    largest = rows.masked_fill(~real, float("-inf")).amax(dim=1)
    count = groups(x.numel(), group_size)
    lo, hi = bounds.float().repeat_interleave(TILE // group_size, dim=0)[:count].unbind(dim=1)
    scale = inverse(hi * (1 / 255) - lo * (1 / 255))
    a = ((smallest - lo) * scale).floor()
    b = ((largest - lo) * scale).ceil()
    return torch.stack([a, b], dim=1).nan_to_num(0.0).clamp(0, 255).to(torch.uint8)
