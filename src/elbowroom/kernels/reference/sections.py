"""The payload of a group: sections of codes and bytes, one after the other (see `fdsr.py`)."""

import torch
from torch import Tensor

from elbowroom.kernels.layout import RADIX, segments


class Sections:
    """A payload [G, P], read from the left."""

    def __init__(self, payload: Tensor) -> None:
        self.left = payload

    def take(self, nbytes: int) -> Tensor:
        taken, self.left = self.left[:, :nbytes], self.left[:, nbytes:]
        return taken


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
    """Inverse of `pack`: [G, codes_nbytes] -> [G, n] float32."""
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
