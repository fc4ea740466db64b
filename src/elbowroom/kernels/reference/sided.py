"""Dither on either side of a threshold that a bitmap tells: each side has its own levels.

The bitmap is there anyway (the mask of the ReLU that follows a norm), so which side a value lies on
is known for nothing, and each side's range is about half of the whole: at equal levels half the
step. What lies below serves only the norm's backward, and bears a coarser code.

    tile      the values whose bit is set, in order, then the others: two short tiles of `dither`
    payload   per tile: upper ranges, upper codes, lower ranges, lower codes
    bounds    [2 * tiles, 2] bf16: lo, hi of the upper, then of the lower values of each tile

The noise of the lower values goes on where that of the upper ones ended. Where each tile's payload
starts is not stored: the popcount of its bitmap tells.
"""

import torch
from torch import Tensor

from elbowroom.kernels.layout import TILE, check_payload, tiles
from elbowroom.kernels.reference.affine import mapped
from elbowroom.kernels.reference.bits import flags
from elbowroom.kernels.reference.dither import tile_bounds
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.nonzero import decode_part, encode_part, part_nbytes
from elbowroom.kernels.reference.rounding import store


def sided_quantize(
    x: Tensor,
    bits: Tensor,
    seed: int,
    upper: int,
    lower: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor]:
    """x [N], bits [ceil(N / 8)] uint8 -> payload [variable] uint8, bounds [2 * tiles, 2] bf16."""
    bounds = torch.zeros(2 * tiles(x.numel()), 2, dtype=torch.bfloat16, device=x.device)
    payload = [torch.empty(0, dtype=torch.uint8, device=x.device)]
    above = torch.split(flags(bits, x.numel()), TILE)
    x = mapped(x, scale, shift, inner)
    for i, tile in enumerate(torch.split(x, TILE) if x.numel() else ()):
        u, done = uniform(seed, i, 1, x.device)[0], 0
        for side, levels in enumerate((upper, lower)):
            values = tile[above[i] if side == 0 else ~above[i]]
            if values.numel():
                at = 2 * i + side
                bounds[at] = tile_bounds(values)[0]
                part = encode_part(values, bounds[at : at + 1], u[done:], levels, group_size)
                payload.append(part)
            done += values.numel()
    return torch.cat(payload), bounds


def sided_dequantize(
    bits: Tensor,
    payload: Tensor,
    bounds: Tensor,
    seed: int,
    upper: int,
    lower: int,
    group_size: int,
    out: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
    mask: Tensor | None = None,
    first: int = 0,
) -> None:
    """The inverse: out [N] is written; of a larger tensor, the part that begins with tile first."""
    held = flags(bits, first * TILE + out.numel())
    above = torch.split(held, TILE) if held.numel() else ()
    counts = [(int(tile.sum()), int((~tile).sum())) for tile in above]
    nbytes = sum(
        part_nbytes(p, upper, group_size) + part_nbytes(q, lower, group_size) for p, q in counts
    )
    check_payload(payload, nbytes, goes_on=8 * bits.numel() >= held.numel() + 8)
    y, start = torch.empty(held.numel(), dtype=torch.float32, device=out.device), 0
    for i, tile in enumerate(torch.split(y, TILE) if held.numel() else ()):
        u, done = uniform(seed, i, 1, bits.device)[0], 0
        for side, levels in enumerate((upper, lower)):
            n, at = counts[i][side], 2 * i + side
            size = part_nbytes(n, levels, group_size)
            part, start = payload[start : start + size], start + size
            values = decode_part(part, bounds[at : at + 1], u[done:], n, levels, group_size)
            tile[above[i] if side == 0 else ~above[i]] = values
            done += n
    store(mapped(y, scale, shift, inner, mask)[first * TILE :], out)
