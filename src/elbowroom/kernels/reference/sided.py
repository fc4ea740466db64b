"""Dither on each side of a threshold, with its own levels; a bitmap says which side a value is on.

The bitmap is stored anyway (the mask of the ReLU that follows a norm), so the side of a value costs
no bits. The range of a side is about half of the whole range: at equal levels, half the step. Only
the backward of the norm reads the values below the threshold, so their code may be coarser.

    tile      the values whose bit is set, in order, then the others: two short tiles of `dither`
    payload   per tile: upper ranges, upper codes, lower ranges, lower codes
    bounds    [2 * tiles, 2] bf16: lo, hi of the upper, then of the lower values of each tile

The noise of the lower values goes on where that of the upper ones ended. Where each tile's payload
starts is not stored: the popcount of its bitmap tells.

With fold F > 1, F lower values v share a code, that of their sum with random signs (a sketch as of
Charikar, Chen and Farach-Colton 2002):

    z_k = sum of s_i (v_i - mean)  over the F values of k     v~_i = mean + s_i z~_k

which is v_i on average over the signs; the others of its F are noise of their variance. Those of k
are v_k, v_(k + m), v_(k + 2m), ..., with m = ceil(n / F), added in that order. The mean of a tile's
lower values, in bf16, lies before the ranges of z in the payload; it is found in integers, so that
all backends find the same.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from elbowroom.kernels.layout import TILE, check_payload, sided_tile_nbytes, tiles
from elbowroom.kernels.reference.affine import mapped
from elbowroom.kernels.reference.bits import flags
from elbowroom.kernels.reference.dither import tile_bounds
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.nonzero import decode_part, encode_part, part_nbytes
from elbowroom.kernels.reference.rounding import bf16_down, inverse, store
from elbowroom.kernels.reference.spill import divide, unite


def sided_quantize(
    x: Tensor,
    bits: Tensor,
    seed: int,
    upper: int,
    lower: int,
    group_size: int,
    fold: int,
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
            n, at, noise = values.numel(), 2 * i + side, u[done:]
            done += n
            if n and side and fold > 1:
                mean = mean_of(values)
                payload.append(mean.view(1).view(torch.uint8))
                values = folded(values, noise, mean.float(), fold)
            if n:
                bounds[at] = tile_bounds(values)[0]
                part = encode_part(values, bounds[at : at + 1], noise, levels, group_size)
                payload.append(part)
    return torch.cat(payload), bounds


def sided_quantize_into(
    x: Tensor,
    bits: Tensor,
    seed: int,
    upper: int,
    lower: int,
    group_size: int,
    fold: int,
    payload: Tensor,
    spill: Tensor,
    used: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> Tensor:
    """Quantizes as `sided_quantize` does, but payload and spill are given.

    used [1] int64 gets the payload's size.
    """
    settings = upper, lower, group_size, fold
    whole, bounds = sided_quantize(x, bits, seed, *settings, scale, shift, inner)
    sizes = _sizes(_counts(flags(bits, x.numel())), *settings)
    divide(whole, sizes, payload, spill, sided_tile_nbytes(*settings))
    used.fill_(len(whole))
    return bounds


def _counts(held: Tensor) -> list[tuple[int, int]]:
    """Counts the elements of each tile that lie above, and those below."""
    above = torch.split(held, TILE) if held.numel() else ()
    return [(int(tile.sum()), int((~tile).sum())) for tile in above]


def _sizes(
    counts: list[tuple[int, int]], upper: int, lower: int, group_size: int, fold: int
) -> list[int]:
    """Bytes of the payload of each tile."""
    return [
        part_nbytes(p, upper, group_size) + lower_nbytes(q, lower, group_size, fold)
        for p, q in counts
    ]


def sided_dequantize(
    bits: Tensor,
    payload: Tensor,
    bounds: Tensor,
    seed: int,
    upper: int,
    lower: int,
    group_size: int,
    fold: int,
    out: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
    mask: Tensor | None = None,
    first: int = 0,
    spill: Tensor | None = None,
) -> None:
    """Inverse of `sided_quantize`: out [N] is written.

    If out is part of a larger tensor, it is the part that begins with tile `first`.
    """
    held = flags(bits, first * TILE + out.numel())
    above = torch.split(held, TILE) if held.numel() else ()
    counts = _counts(held)
    sizes = _sizes(counts, upper, lower, group_size, fold)
    if spill is not None:
        payload = unite(payload, spill, sizes, sided_tile_nbytes(upper, lower, group_size, fold))
    check_payload(payload, sum(sizes), goes_on=8 * bits.numel() >= held.numel() + 8)
    y, start = torch.empty(held.numel(), dtype=torch.float32, device=out.device), 0
    for i, tile in enumerate(torch.split(y, TILE) if held.numel() else ()):
        u, done = uniform(seed, i, 1, bits.device)[0], 0
        for side, levels in enumerate((upper, lower)):
            n, at, noise = counts[i][side], 2 * i + side, u[done:]
            done, each = done + n, fold if side else 1
            size = lower_nbytes(n, levels, group_size, each)
            part, start = payload[start : start + size], start + size
            head, m = 2 if n and each > 1 else 0, -(-n // each)
            values = decode_part(part[head:], bounds[at : at + 1], noise, m, levels, group_size)
            if head:
                values = unfolded(
                    values, noise, part[:2].clone().view(torch.bfloat16).float(), each, n
                )
            tile[above[i] if side == 0 else ~above[i]] = values
    store(mapped(y, scale, shift, inner, mask)[first * TILE :], out)


def lower_nbytes(n: int, levels: int, group_size: int, fold: int) -> int:
    """Bytes of the mean, the ranges and the codes of n lower values of a tile."""
    if fold == 1 or not n:
        return part_nbytes(n, levels, group_size)
    return 2 + part_nbytes(-(-n // fold), levels, group_size)


def mean_of(values: Tensor) -> Tensor:
    """values [n] -> their mean, in 255ths of their range and then rounded to bf16: []."""
    lo, hi = tile_bounds(values)[0].float()
    unit = hi * (1 / 255) - lo * (1 / 255)
    each = ((values - lo) * inverse(unit) + 0.5).nan_to_num(0.0).clamp(0, 255).to(torch.int32)
    return bf16_down(lo + (int(each.sum()) + len(values) // 2) // len(values) * unit)


def folded(values: Tensor, u: Tensor, mean: Tensor, fold: int) -> Tensor:
    """values [n] -> the sums z [ceil(n / fold)], of values that are so far apart."""
    rows = pad(signs(u, len(values)) * (values - mean), (0, -len(values) % fold)).view(fold, -1)
    z = torch.zeros_like(rows[0])
    for row in rows:  # one after the other, as all backends add them
        z = z + row
    return z


def unfolded(z: Tensor, u: Tensor, mean: Tensor, fold: int, n: int) -> Tensor:
    """Inverse of `folded`, on average: [n]."""
    return signs(u, n) * z.repeat(fold)[:n] + mean


def signs(u: Tensor, n: int) -> Tensor:
    """1 or -1 by the last bit of each element's noise, of which a code sees next to nothing."""
    return 1.0 - 2.0 * ((u[:n] * 65536).to(torch.int32) & 1)
