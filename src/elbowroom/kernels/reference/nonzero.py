"""Dither for tensors with exact zeros: a bitmap says where, only the other values are coded.

    tile      bits [256] bytes: bit i is set where x_i is not zero;
              the n values left are a short tile of their own
    payload   per tile, one after the other: ranges [ceil(n / group_size), 2],
              then the n packed codes of `dither`

Zeros decode to exactly 0 and nothing else does (a decoded 0 becomes the smallest positive normal
number), so the bitmap is also ReLU's mask. The size of the payload depends on the data: reading it
makes the host wait on a GPU, so it may be given memory of a fixed size (`spill.py`). Where each
tile's payload starts is not stored: the popcount of its bitmap tells.
"""

import torch
from torch import Tensor

from elbowroom.kernels.layout import (
    TILE,
    check_payload,
    codes_nbytes,
    groups,
    nonzero_tile_nbytes,
    tiles,
)
from elbowroom.kernels.reference.affine import mapped
from elbowroom.kernels.reference.bits import flags, pack_bits
from elbowroom.kernels.reference.codes import pack_codes, unpack_codes
from elbowroom.kernels.reference.dither import grid, group_ranges, tile_bounds
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.rounding import inverse, store
from elbowroom.kernels.reference.spill import divide, unite

# The smallest normal float32 and bfloat16; float16's own is 2^-14, used where that is the dtype.
TINIEST = 2.0**-126


def nonzero_quantize(
    x: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N] -> bits [ceil(N / 8)] uint8, payload [variable] uint8, bounds [tiles, 2] bf16."""
    bounds = torch.zeros(tiles(x.numel()), 2, dtype=torch.bfloat16, device=x.device)
    payload = [torch.empty(0, dtype=torch.uint8, device=x.device)]
    x = mapped(x, scale, shift, inner)
    for i, tile in enumerate(torch.split(x, TILE) if x.numel() else ()):
        values = tile[tile != 0]  # [n]
        if values.numel() == 0:
            continue
        bounds[i] = tile_bounds(values)[0]
        u = uniform(seed, i, 1, x.device)[0]
        payload.append(encode_part(values, bounds[i : i + 1], u, levels, group_size))
    return pack_bits(x), torch.cat(payload), bounds


def nonzero_quantize_into(
    x: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    payload: Tensor,
    spill: Tensor,
    used: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor]:
    """Quantizes as `nonzero_quantize` does, but payload and spill are given.

    used [1] int64 gets the payload's size.
    """
    bits, whole, bounds = nonzero_quantize(x, seed, levels, group_size, scale, shift, inner)
    sizes = [part_nbytes(n, levels, group_size) for n in _counts(flags(bits, x.numel()))]
    divide(whole, sizes, payload, spill, nonzero_tile_nbytes(levels, group_size))
    used.fill_(len(whole))
    return bits, bounds


def _counts(held: Tensor) -> list[int]:
    """Counts the elements of each tile that are not zero."""
    return [int(tile.sum()) for tile in torch.split(held, TILE)] if held.numel() else []


def encode_part(values: Tensor, bounds: Tensor, u: Tensor, levels: int, group_size: int) -> Tensor:
    """values [n] that lie within bounds [1, 2] -> their ranges and packed codes, uint8."""
    n = len(values)
    ranges = group_ranges(values, bounds, group_size)
    low, step = grid(ranges, bounds, levels, group_size)
    each = torch.arange(n, device=values.device) // group_size
    v = (values - low[each]) * inverse(step)[each]
    codes = (v + u[:n]).nan_to_num(0.0).clamp(0, levels - 1).to(torch.uint8)
    return torch.cat([ranges.view(-1), pack_codes(codes, levels)])


def decode_part(
    part: Tensor, bounds: Tensor, u: Tensor, n: int, levels: int, group_size: int
) -> Tensor:
    """Inverse of `encode_part`: [n] float32."""
    head = 2 * groups(n, group_size)
    low, step = grid(part[:head].view(-1, 2), bounds, levels, group_size)
    each = torch.arange(n, device=part.device) // group_size
    q = unpack_codes(part[head:], n, levels).float()
    return (low + step * 0.5)[each] + step[each] * (q - u[:n])


def part_nbytes(n: int, levels: int, group_size: int) -> int:
    """Bytes of the ranges and codes of n values."""
    return 2 * groups(n, group_size) + codes_nbytes(levels, n)


def nonzero_dequantize(
    bits: Tensor,
    payload: Tensor,
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
    spill: Tensor | None = None,
) -> None:
    """Inverse of `nonzero_quantize`: out [N] is written.

    If out is part of a larger tensor, it is the part that begins with tile `first`.
    """
    held = flags(bits, first * TILE + out.numel())
    counts = _counts(held)
    sizes = [part_nbytes(n, levels, group_size) for n in counts]
    nbytes = sum(sizes)
    if spill is not None:
        payload = unite(payload, spill, sizes, nonzero_tile_nbytes(levels, group_size))
    check_payload(payload, nbytes, goes_on=8 * bits.numel() >= held.numel() + 8)
    y, start = torch.zeros(held.numel(), dtype=torch.float32, device=out.device), 0
    for i, n in enumerate(counts):
        size = part_nbytes(n, levels, group_size)
        part, start = payload[start : start + size], start + size
        u = uniform(seed, i, 1, bits.device)[0]
        tile = slice(i * TILE, (i + 1) * TILE)
        y[tile][held[tile]] = decode_part(part, bounds[i : i + 1], u, n, levels, group_size)
    y = mapped(y, scale, shift, inner)
    tiniest = max(TINIEST, torch.finfo(out.dtype).tiny)
    y = torch.where(held & (y.abs() < tiniest), tiniest, y)
    store(mapped(y, None, None, 1, mask)[first * TILE :], out)
