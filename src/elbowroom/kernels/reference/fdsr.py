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

from elbowroom.kernels.bands import (
    FIRST_GAIN,
    HASH_BITS,
    LIMIT,
    PLANES,
    SIGNS,
    UNITS,
    WORDS,
    Bands,
    bands_of,
    cosines,
    mixed,
    tiles_of,
)
from elbowroom.kernels.layout import RADIX, codes_nbytes, segments
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.rounding import bf16_down, bf16_up, inverse, store


def fdsr_quantize(
    x: Tensor,
    seed: int,
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
    seed: int,
    maps: Sequence[int],
    block: int,
    levels: Sequence[int],
    kept: int,
    dither: bool,
    out: Tensor,
) -> None:
    """The inverse: out [N] is written."""
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
    values = elements(y, b)[real]
    restored = torch.empty_like(values, dtype=out.dtype)
    store(values, restored)
    out[at[real]] = restored


# --- maps, tiles, coefficients ---


def places(maps: Sequence[int], b: Bands, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each element of each tile lies in x, [G, B * B, lanes], and whether it is its own."""
    _, rows, columns, inner = maps
    count, B = tiles_of(maps, b.block), b.block
    across, down = -(-columns // B), -(-rows // B)
    lane = torch.arange(-(-count // b.lanes) * b.lanes, device=device).view(-1, 1, b.lanes)
    tile = lane.clamp(max=count - 1)
    plane, row, column = tile // (across * down), tile // across % down * B, tile % across * B
    i = torch.arange(B * B, device=device)[None, :, None]
    row, column = row + i // B, column + i % B
    real = (lane < count) & (row < rows) & (column < columns)
    row, column = row.clamp(max=rows - 1), column.clamp(max=columns - 1)
    at = ((plane // inner * rows + row) * columns + column) * inner + plane % inner
    return at, real


def coefficients(x: Tensor, b: Bands) -> Tensor:
    """x [G, B * B, lanes] by row and column -> y of the same shape, by position."""
    x = x.view(len(x), b.block, b.block, -1)
    y = dct(dct(x, 1, b.block), 2, b.block)
    return y.reshape(len(x), b.block**2, -1)[:, list(b.order)]


def elements(y: Tensor, b: Bands) -> Tensor:
    """The inverse of `coefficients`."""
    raster = torch.empty_like(y)
    raster[:, list(b.order)] = y
    x = raster.view(len(y), b.block, b.block, -1)
    return inverse_dct(inverse_dct(x, 1, b.block), 2, b.block).reshape(y.shape)


def dct(x: Tensor, dim: int, B: int) -> Tensor:
    """One-dimensional, along dim: a row of D is even or odd, so both halves of x are folded."""
    D, rows = cosines(B), x.unbind(dim)
    sums = [rows[j] + rows[B - 1 - j] for j in range(B // 2)]
    differences = [rows[j] - rows[B - 1 - j] for j in range(B // 2)]
    middle = list(rows[B // 2 : B - B // 2])  # of an odd B; odd rows of D are 0 there
    folded = (sums + middle, differences)
    return torch.stack([weighted(D[i], folded[i % 2]) for i in range(B)], dim)


def inverse_dct(y: Tensor, dim: int, B: int) -> Tensor:
    """Its inverse."""
    D, rows = cosines(B), y.unbind(dim)
    even = [weighted([D[i][j] for i in range(0, B, 2)], rows[::2]) for j in range(B - B // 2)]
    odd = [weighted([D[i][j] for i in range(1, B, 2)], rows[1::2]) for j in range(B // 2)]
    first = [even[j] + odd[j] for j in range(B // 2)]
    last = [even[j] - odd[j] for j in reversed(range(B // 2))]
    return torch.stack(first + even[B // 2 : B - B // 2] + last, dim)


def weighted(weights: Sequence[float], rows: Sequence[Tensor]) -> Tensor:
    """The sum of weights times rows, added in turn: the order decides the last bit."""
    total = weights[0] * rows[0]
    for weight, row in zip(weights[1 : len(rows)], rows[1:], strict=True):
        total = total + weight * row
    return total


def mix(z: Tensor, b: Bands) -> Tensor:
    """z [G, positions, lanes] -> each run turned by signs and Hadamard transforms; orthonormal."""
    z = z.clone()
    z[:, 1:] *= torch.tensor(SIGNS[1 : b.block**2], device=z.device)[:, None]
    for run in b.runs[1:]:
        for start, size in mixed(run):
            z[:, start : start + size] = hadamard(z[:, start : start + size])
    return z


def unmix(z: Tensor, b: Bands) -> Tensor:
    """The inverse of `mix`, but position 0, which it never touches."""
    z = z.clone()
    for run in b.runs[1:]:
        for start, size in reversed(list(mixed(run))):
            z[:, start : start + size] = hadamard(z[:, start : start + size])
    z[:, 1:] *= torch.tensor(SIGNS[1 : b.block**2], device=z.device)[:, None]
    return z


def hadamard(z: Tensor) -> Tensor:
    """z [G, size, lanes] -> its Walsh-Hadamard transform, which is its own inverse."""
    size, half = z.shape[1], 1
    while half < size:
        a, c = z.reshape(len(z), -1, 2, half, z.shape[2]).unbind(dim=2)
        z = torch.stack([a + c, a - c], dim=2).view(len(z), size, -1)
        half *= 2
    return z * float(size**-0.5)


# --- scales and codes ---


def noise(seed: int, groups: int, b: Bands, dither: bool, device: torch.device) -> Tensor:
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


def rms(units: Tensor) -> Tensor:
    """RMS over all but the first dimension, as a share of absmax, at least one unit: [G]."""
    count = units.shape[1] * units.shape[2]
    total = units.square().sum(dim=2).sum(dim=1).clamp(min=count)
    return (total.float() * (1 / count)).sqrt() * (1 / UNITS)


def spread(weights: Tensor, b: Bands) -> Tensor:
    """weights [G, bands] bf16 -> [G, positions] float32: 0 where there is none."""
    known = torch.cat([weights.new_zeros(len(weights), 1), weights], dim=1).float()
    return known[:, [band if p < b.coded else 0 for p, band in enumerate(b.band)]]


def cells(sizes: Tensor, b: Bands) -> Tensor:
    """The largest of each cell: [G, positions, lanes] -> [G, lanes / cell]."""
    if sizes.shape[1] == 0:
        return sizes.new_zeros(len(sizes), b.lanes // b.cell)
    return sizes.amax(dim=1).view(len(sizes), -1, b.cell).amax(dim=2)


def gain_code(g: Tensor, *, up: bool) -> Tensor:
    """A float32 that is not negative to 8 bits, 4 of them fraction: up, or to the nearest."""
    bits = g.view(torch.int32) + ((1 << 19) - 1 if up else 1 << 18)
    return torch.where(g == 0, 0, ((bits >> 19) - FIRST_GAIN).clamp(1, 255)).to(torch.uint8)


def gain_value(code: Tensor) -> Tensor:
    """The inverse: codes uint8 -> float32, 0 for code 0."""
    bits = (code.to(torch.int32) + FIRST_GAIN) << 19
    return torch.where(code == 0, 0.0, bits.view(torch.float32))


def run_step(g: Tensor, levels: int) -> Tensor:
    """The step of codes that span -g..g."""
    return g * (2 / (levels - 1))


def code(above: Tensor, step: Tensor, u: Tensor, levels: int) -> Tensor:
    """above (the value over that of code 0) [G, n, lanes] -> codes [G, n * lanes] uint8."""
    found = (above * inverse(step) + u).nan_to_num(0.0).clamp(0, levels - 1)
    return found.to(torch.uint8).view(len(above), -1)


def pack(codes: Tensor, levels: int) -> Tensor:
    """codes [G, n] uint8 -> [G, codes_nbytes]; see layout.py."""
    if levels in RADIX:
        return _planes(codes, RADIX[levels], levels)
    parts = [
        _planes((codes >> s.shift) & ((1 << s.width) - 1), s.per, 1 << s.width)
        for s in segments(levels)
    ]
    return torch.cat(parts, dim=1)


def _planes(codes: Tensor, per: int, base: int) -> Tensor:
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per)).long()
    place = base ** torch.arange(per, device=codes.device)
    return (padded.view(len(codes), per, -1) * place[:, None]).sum(dim=1).to(torch.uint8)


def unpack(packed: Tensor, n: int, levels: int) -> Tensor:
    """The inverse: [G, codes_nbytes] -> [G, n] float32."""
    if levels in RADIX:
        return _digits(packed, RADIX[levels], levels)[:, :n].float()
    codes, start = torch.zeros(len(packed), n, dtype=torch.int64, device=packed.device), 0
    for s in segments(levels):
        size = -(-n // s.per)
        found = _digits(packed[:, start : start + size], s.per, 1 << s.width)[:, :n]
        codes, start = codes + (found << s.shift), start + size
    return codes.float()


def _digits(packed: Tensor, per: int, base: int) -> Tensor:
    place = base ** torch.arange(per, device=packed.device)
    return (packed.long()[:, None] // place[:, None] % base).view(len(packed), -1)


class Sections:
    """A payload [G, P], read from the left."""

    def __init__(self, payload: Tensor) -> None:
        self.left = payload

    def take(self, nbytes: int) -> Tensor:
        taken, self.left = self.left[:, :nbytes], self.left[:, nbytes:]
        return taken


# --- the residual ---


def reuse(r: Tensor, absmax: Tensor, kept: int, b: Bands) -> tuple[list[Tensor], Tensor, Tensor]:
    """r [G, R, lanes] int64 units -> sections, scale [G, 1] bf16, codebook [256, R] int8."""
    energy = r.square().sum(dim=1)  # [G, lanes]
    ratio = rms(r)[:, None]
    size = (energy.float()).sqrt() * (1 / UNITS)
    norms = gain_code(size / ratio, up=False)
    planes = torch.tensor(PLANES, device=r.device)[:, b.coded : b.block**2]  # [8, R]
    side = (planes[None, :, :, None] * r[:, None]).sum(dim=2) > 0  # [G, 8, lanes]
    word = (side.long() << torch.arange(HASH_BITS, device=r.device)[:, None]).sum(dim=1)

    more = energy[:, None, :] > energy[:, :, None]  # [G, lanes, lanes]: other, itself
    first = torch.ones(b.lanes, b.lanes, dtype=torch.bool, device=r.device).tril(-1)
    rank = (more | (energy[:, None, :] == energy[:, :, None]) & first).sum(dim=2)
    keep = rank < kept  # [G, lanes]

    members = r.transpose(1, 2)[keep]  # [tiles, R]
    words = word[keep]
    total = torch.zeros(WORDS, b.rest, dtype=torch.int64, device=r.device)
    total.index_add_(0, words, members)
    length = torch.zeros(WORDS, dtype=torch.int64, device=r.device)
    length.index_add_(0, words, energy[keep].float().sqrt().long())
    mean = total.float() / length.clamp(min=1).float()[:, None]
    codebook = (mean * 127).clamp(-127, 127).round().to(torch.int8)

    eights = keep.view(len(r), -1, 8).long() << torch.arange(8, device=r.device)
    sections = [] if kept == b.lanes else [eights.sum(dim=2).to(torch.uint8)]
    sections += [words.to(torch.uint8).view(len(r), kept), norms[keep].view(len(r), kept)]
    return sections, (ratio * absmax).to(torch.bfloat16), codebook


def reused(sections: Sections, scale: Tensor, codebook: Tensor, kept: int, b: Bands) -> Tensor:
    """The residual again, [G, R, lanes] float32."""
    groups = len(scale)
    keep = torch.ones(groups, b.lanes, dtype=torch.bool, device=scale.device)
    if kept < b.lanes:
        bits = sections.take(b.lanes // 8)
        keep = ((bits[:, :, None] >> torch.arange(8, device=bits.device)) & 1).view(groups, -1) != 0
    word, norm = sections.take(kept).long(), gain_value(sections.take(kept))
    place = (keep.long().cumsum(dim=1) - 1).clamp(0, kept - 1)  # [G, lanes]
    word, norm = word.gather(1, place), norm.gather(1, place)
    size = torch.where(keep, norm * scale.float() * (1 / 127), 0.0)
    return (codebook.float()[word] * size[..., None]).transpose(1, 2)
