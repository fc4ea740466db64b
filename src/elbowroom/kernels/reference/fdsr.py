"""Frequency division and similarity reuse: a transform code of maps with bands of their own widths.

    tile      y = D x D'           orthonormal DCT of B x B elements; edges repeat the last one
    group     lo, hi               of the means, bf16, rounded outwards
              w_l                  a weight a band, bf16: RMS of its coefficients (dither:
                                   sqrt(RMS * absmax))
    tile      z = y / w_l          and, with dither, each run of equal levels is mixed: signs, then
                                   Hadamard transforms of its two overlapping halves
              g = max |z|          8 bits, rounded up
              code = clamp(floor((z + g) / step + u), 0, levels - 1),  step = 2 g / (levels - 1)
    decode    z~ = step (code - u + 1/2) - g       and back

u is 1/2 (nearest; levels are odd, so that 0 is one of them), or uniform, and then z~ is unbiased
with variance step^2 / 12: no value leaves the range. Mixing makes coefficients alike, so that the
largest of a tile is near 2.5 of their RMS; sqrt(RMS) weights make the sum of the variances least.

Residual r (bands without levels), for the `kept` tiles of a group where it is largest:

    word  = signs of 8 fixed projections of r
    codebook[word] = sum r / sum |r| over all tiles with that word,  int8 of 1 / 127
    r~    = |r| codebook[word]      |r| in 8 bits, relative to the group's RMS

Coefficients go into statistics as integers (absmax = 8192), whose sums do not depend on the order.
A group with a NaN, an Inf or a coefficient beyond 2^120 gets lo = hi = NaN and decodes to NaN.
Origin: re-designed by us from the abstract of FDSR (10.1145/3802593), whose text we have not read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elbowroom.kernels.bands import LIMIT, UNITS, Bands, bands_of
from elbowroom.kernels.layout import codes_nbytes
from elbowroom.kernels.reference.fdsr_reuse import gain_code, gain_value, reuse, reused, rms
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.rounding import bf16_down, bf16_up, inverse, store
from elbowroom.kernels.reference.sections import Sections, pack, unpack
from elbowroom.kernels.reference.transform import coefficients, elements, mix, places, unmix


def fdsr_quantize(
    x: Tensor,
    seed: int | Tensor,
    maps: Sequence[int],
    block: int,
    levels: Sequence[int],
    kept: int,
    dither: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N] -> payload [G, P] uint8, scales [G, S] bf16, codebook [256 or 0, R] int8.

    maps: outer, rows, columns, inner (N is their product). levels by band, the last one repeated.
    """
    b = bands_of(block, tuple(levels))
    y = coefficients(x.float()[places(maps, b, x.device)[0]], b)  # [G, positions, lanes]
    usable = (y.abs() < LIMIT).all(dim=2).all(dim=1)[:, None]  # [G, 1]
    y = torch.where(usable[..., None], y, 0.0)
    bounds = torch.stack([bf16_down(y[:, 0].amin(dim=1)), bf16_up(y[:, 0].amax(dim=1))], dim=1)
    absmax = y[:, 1:].abs().amax(dim=2).amax(dim=1)[:, None]  # [G, 1]
    units = (y * inverse(absmax * (1 / UNITS))[..., None]).long()  # towards zero
    weights = band_weights(units, absmax, b, dither)  # [G, bands]
    u = noise(seed, len(y), b, dither, x.device)

    lo, step = mean_grid(bounds, b)
    sections = [pack(code(y[:, :1] - lo, step, u[:, :1], b.runs[0].levels), b.runs[0].levels)]
    z = y * inverse(spread(weights, b))[..., None]
    z = (mix(z, b) if dither else z)[:, 1 : b.coded]
    gains = gain_code(cells(z.abs(), b), up=True)  # [G, lanes / cell]
    g = gain_value(gains).repeat_interleave(b.cell, dim=1)[:, None]  # [G, 1, lanes]
    sections.append(gains)
    for run in b.runs[1:]:
        at = slice(run.start, run.stop)
        values = z[:, run.start - 1 : run.stop - 1] + g
        sections.append(
            pack(code(values, run_step(g, run.levels), u[:, at], run.levels), run.levels)
        )

    codebook = torch.zeros(0, b.rest, dtype=torch.int8, device=x.device)
    if kept:
        residual, scale, codebook = reuse(units[:, b.coded :], absmax, kept, b)
        sections += residual
        weights = torch.cat([weights, scale], dim=1)
    bounds = torch.where(usable, bounds, float("nan"))
    return torch.cat(sections, dim=1), torch.cat([bounds, weights], dim=1), codebook


def fdsr_dequantize(
    payload: Tensor,
    scales: Tensor,
    codebook: Tensor,
    seed: int | Tensor,
    maps: Sequence[int],
    block: int,
    levels: Sequence[int],
    kept: int,
    dither: bool,
    out: Tensor,
) -> None:
    """Inverse of `fdsr_quantize`: out [N] is written."""
    b = bands_of(block, tuple(levels))
    u = noise(seed, len(payload), b, dither, payload.device)
    y = torch.zeros(len(payload), block**2, b.lanes, device=payload.device)

    sections = Sections(payload)
    lo, step = mean_grid(scales[:, :2], b)
    q = unpack(sections.take(codes_nbytes(b.runs[0].levels, b.lanes)), b.lanes, b.runs[0].levels)
    y[:, 0] = (lo + step * 0.5)[:, 0] + step[:, 0] * (q - u[:, 0])
    g = gain_value(sections.take(b.lanes // b.cell)).repeat_interleave(b.cell, dim=1)[:, None]
    for run in b.runs[1:]:
        count = (run.stop - run.start) * b.lanes
        q = unpack(sections.take(codes_nbytes(run.levels, count)), count, run.levels)
        q = q.view(len(payload), -1, b.lanes)
        step = run_step(g, run.levels)
        y[:, run.start : run.stop] = (step * 0.5 - g) + step * (q - u[:, run.start : run.stop])
    if dither:
        y = unmix(y, b)
    y[:, 1 : b.coded] *= spread(scales[:, 2 : 2 + b.bands], b)[:, 1 : b.coded, None]
    if kept:
        y[:, b.coded :] = reused(sections, scales[:, -1:], codebook, kept, b)
    at, real = places(maps, b, payload.device)
    values = elements(y, b)
    restored = torch.empty_like(values, dtype=out.dtype)
    store(values, restored)
    # What repeats an edge goes to one place behind the others: by a mask, the host would wait.
    padded = torch.empty(out.numel() + 1, dtype=out.dtype, device=out.device)
    padded[torch.where(real, at, out.numel())] = restored
    out.copy_(padded[:-1])


def noise(seed: int | Tensor, groups: int, b: Bands, dither: bool, device: torch.device) -> Tensor:
    """u of each coefficient, [G, positions, lanes]; element p * lanes + lane of tile G of noise."""
    if not dither:
        return torch.full((groups, b.block**2, b.lanes), 0.5, device=device)
    used = b.block**2 * b.lanes
    return uniform(seed, 0, groups, device)[:, :used].view(groups, b.block**2, b.lanes)


def mean_grid(bounds: Tensor, b: Bands) -> tuple[Tensor, Tensor]:
    """bounds [G, 2] bf16 -> lo and step of the means [G, 1, 1]."""
    lo, hi = bounds.float()[:, :, None, None].unbind(dim=1)
    return lo, (hi - lo) * (1 / (b.runs[0].levels - 1))


def band_weights(units: Tensor, absmax: Tensor, b: Bands, dither: bool) -> Tensor:
    """units [G, positions, lanes], absmax [G, 1] -> weights [G, bands] bf16."""
    found = [
        rms(units[:, [p for p in range(len(b.band)) if b.band[p] == band]])
        for band in range(1, b.bands + 1)
    ]
    ratio = torch.stack(found, dim=1) if found else absmax[:, :0]
    return ((ratio.sqrt() if dither else ratio) * absmax).to(torch.bfloat16)


def spread(weights: Tensor, b: Bands) -> Tensor:
    """weights [G, bands] bf16 -> [G, positions] float32: 0 where there is none."""
    known = torch.cat([weights.new_zeros(len(weights), 1), weights], dim=1).float()
    return known[:, [band if p < b.coded else 0 for p, band in enumerate(b.band)]]


def cells(sizes: Tensor, b: Bands) -> Tensor:
    """The largest of each cell: [G, positions, lanes] -> [G, lanes / cell]."""
    if sizes.shape[1] == 0:
        return sizes.new_zeros(len(sizes), b.lanes // b.cell)
    return sizes.amax(dim=1).view(len(sizes), -1, b.cell).amax(dim=2)


def run_step(g: Tensor, levels: int) -> Tensor:
    """The step of codes that span -g..g."""
    return g * (2 / (levels - 1))


def code(above: Tensor, step: Tensor, u: Tensor, levels: int) -> Tensor:
    """above (the value over that of code 0) [G, n, lanes] -> codes [G, n * lanes] uint8."""
    found = (above * inverse(step) + u).nan_to_num(0.0).clamp(0, levels - 1)
    return found.to(torch.uint8).view(len(above), -1)
