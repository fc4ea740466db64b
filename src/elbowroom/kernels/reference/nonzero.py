"""Dither for tensors with exact zeros: a bitmap says where, only the other values are coded.

    tile      bits [256] bytes: bit i is set where x_i is not zero;
              the n values left are a short tile of their own
    payload   per tile, one after the other: ranges [ceil(n / group_size), 2],
              then the n packed codes of `dither`

Zeros decode to exactly 0 and nothing else does (a decoded 0 becomes the smallest positive normal
number), so the bitmap is also ReLU's mask. The size of the payload depends on the data: reading it
makes the host wait on a GPU. Where each tile's payload starts is not stored: the popcount of its
bitmap tells.
"""

import torch
from torch import Tensor

from elbowroom.kernels.layout import TILE, check_payload, codes_nbytes, groups, tiles
from elbowroom.kernels.reference.bits import pack_bits, unpack_bits
from elbowroom.kernels.reference.codes import pack_codes, unpack_codes
from elbowroom.kernels.reference.dither import grid, group_ranges, tile_bounds
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.rounding import inverse, store

# The smallest normal float32 and bfloat16; float16's own is 2^-14, used where that is the dtype.
TINIEST = 2.0**-126


def nonzero_quantize(
    x: Tensor, seed: int, levels: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N] -> bits [ceil(N / 8)] uint8, payload [variable] uint8, bounds [tiles, 2] bf16."""
    bounds = torch.zeros(tiles(x.numel()), 2, dtype=torch.bfloat16, device=x.device)
    payload = [torch.empty(0, dtype=torch.uint8, device=x.device)]
    for i, tile in enumerate(torch.split(x.float(), TILE) if x.numel() else ()):
        values = tile[tile != 0]  # [n]
        if values.numel() == 0:
            continue
        bounds[i] = tile_bounds(values)[0]
        ranges = group_ranges(values, bounds[i : i + 1], group_size)
        low, step = grid(ranges, bounds[i : i + 1], levels, group_size)
        each = torch.arange(len(values), device=x.device) // group_size
        u = uniform(seed, i, 1, x.device)[0, : len(values)]
        v = (values - low[each]) * inverse(step)[each]
        codes = (v + u).nan_to_num(0.0).clamp(0, levels - 1).to(torch.uint8)
        payload += [ranges.view(-1), pack_codes(codes, levels)]
    return pack_bits(x), torch.cat(payload), bounds


def nonzero_dequantize(
    bits: Tensor,
    payload: Tensor,
    bounds: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    out: Tensor,
) -> None:
    """The inverse: out [N] is written."""
    unpack_bits(bits, 1.0, out)
    tiniest = max(TINIEST, torch.finfo(out.dtype).tiny)
    counts = [int((tile != 0).sum()) for tile in torch.split(out, TILE)] if out.numel() else []
    check_payload(payload, sum(2 * groups(n, group_size) + codes_nbytes(levels, n) for n in counts))
    start = 0
    for i, tile in enumerate(torch.split(out, TILE) if out.numel() else ()):
        n = counts[i]
        head = 2 * groups(n, group_size)
        size = head + codes_nbytes(levels, n)
        part, start = payload[start : start + size], start + size
        low, step = grid(part[:head].view(-1, 2), bounds[i : i + 1], levels, group_size)
        each = torch.arange(n, device=bits.device) // group_size
        u = uniform(seed, i, 1, bits.device)[0, :n]
        q = unpack_codes(part[head:], n, levels).float()
        values = (low + step * 0.5)[each] + step[each] * (q - u)
        values = torch.where(values.abs() < tiniest, tiniest, values)
        restored = torch.empty_like(values, dtype=out.dtype)
        store(values, restored)
        tile[tile != 0] = restored  # `out` is written through its view
