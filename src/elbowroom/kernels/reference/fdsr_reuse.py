"""The residual of a transform code: words, norms, and the codebook (see `fdsr.py`)."""

import torch
from torch import Tensor

from elbowroom.kernels.bands import FIRST_GAIN, HASH_BITS, PLANES, UNITS, WORDS, Bands
from elbowroom.kernels.reference.sections import Sections


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
    # As many of each row, in the order of the lanes: by a mask, the host would count them.
    place = keep.byte().argsort(dim=1, descending=True, stable=True)[:, :kept]  # [G, kept]

    members = r.transpose(1, 2).gather(1, place[:, :, None].expand(-1, -1, b.rest)).flatten(0, 1)
    words = word.gather(1, place).flatten()  # [tiles]
    total = torch.zeros(WORDS, b.rest, dtype=torch.int64, device=r.device)
    total.index_add_(0, words, members)
    length = torch.zeros(WORDS, dtype=torch.int64, device=r.device)
    length.index_add_(0, words, energy.gather(1, place).flatten().float().sqrt().long())
    mean = total.float() / length.clamp(min=1).float()[:, None]
    codebook = (mean * 127).clamp(-127, 127).round().to(torch.int8)

    eights = keep.view(len(r), -1, 8).long() << torch.arange(8, device=r.device)
    sections = [] if kept == b.lanes else [eights.sum(dim=2).to(torch.uint8)]
    sections += [words.to(torch.uint8).view(len(r), kept), norms.gather(1, place)]
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


def rms(units: Tensor) -> Tensor:
    """RMS over all but the first dimension, as a share of absmax, at least one unit: [G]."""
    count = units.shape[1] * units.shape[2]
    total = units.square().sum(dim=2).sum(dim=1).clamp(min=count)
    return (total.float() * (1 / count)).sqrt() * (1 / UNITS)


def gain_code(g: Tensor, *, up: bool) -> Tensor:
    """A float32 that is not negative to 8 bits, 4 of them fraction: up, or to the nearest."""
    bits = g.view(torch.int32) + ((1 << 19) - 1 if up else 1 << 18)
    return torch.where(g == 0, 0, ((bits >> 19) - FIRST_GAIN).clamp(1, 255)).to(torch.uint8)


def gain_value(code: Tensor) -> Tensor:
    """Inverse of `gain_code`: codes uint8 -> float32, 0 for code 0."""
    bits = (code.to(torch.int32) + FIRST_GAIN) << 19
    return torch.where(code == 0, 0.0, bits.view(torch.float32))
