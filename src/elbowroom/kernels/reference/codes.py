"""Codes to bytes and back, tile by tile (layout: `elbowroom.kernels.layout`)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from elbowroom.kernels.layout import RADIX, TILE, codes_nbytes, segments


def pack_codes(codes: Tensor, levels: int) -> Tensor:
    """codes [N] uint8, each below `levels` -> [packed_nbytes] uint8."""
    parts = [_pack_tile(tile, levels) for tile in torch.split(codes, TILE)] if codes.numel() else []
    return torch.cat([codes.new_empty(0), *parts])


def unpack_codes(packed: Tensor, numel: int, levels: int) -> Tensor:
    """Inverse of `pack_codes`: [packed_nbytes] uint8 -> [numel] uint8."""
    full = codes_nbytes(levels, TILE)
    parts = [
        _unpack_tile(packed[i * full : (i + 1) * full], min(TILE, numel - i * TILE), levels)
        for i in range(-(-numel // TILE))
    ]
    return torch.cat([packed.new_empty(0), *parts])


def _pack_tile(codes: Tensor, levels: int) -> Tensor:
    """[n] -> [codes_nbytes(levels, n)]."""
    if levels in RADIX:
        planes = _planes(codes, RADIX[levels])  # [per, bytes]
        place = levels ** torch.arange(len(planes), device=codes.device)
        return (planes.long() * place[:, None]).sum(dim=0).to(torch.uint8)
    return torch.cat([_pack_segment(codes >> s.shift, s.per, s.width) for s in segments(levels)])


def _pack_segment(codes: Tensor, per: int, width: int) -> Tensor:
    planes = _planes(codes & ((1 << width) - 1), per).long()
    place = torch.arange(per, device=codes.device) * width
    return (planes << place[:, None]).sum(dim=0).to(torch.uint8)


def _planes(codes: Tensor, per: int) -> Tensor:
    """[n] -> [per, ceil(n / per)]: row k holds elements k * bytes ... (k + 1) * bytes - 1."""
    return pad(codes, (0, -codes.numel() % per)).view(per, -1)


def _unpack_tile(packed: Tensor, n: int, levels: int) -> Tensor:
    """[codes_nbytes(levels, n)] -> [n]."""
    if levels in RADIX:
        place = levels ** torch.arange(RADIX[levels], device=packed.device)
        return (packed.long() // place[:, None] % levels).to(torch.uint8).view(-1)[:n]
    codes, start = packed.new_zeros(n), 0
    for s in segments(levels):
        stored = packed[start : start + -(-n // s.per)].long()
        place = torch.arange(s.per, device=packed.device) * s.width
        plane = (stored >> place[:, None]) & ((1 << s.width) - 1)
        codes |= (plane.to(torch.uint8).view(-1)[:n]) << s.shift
        start += stored.numel()
    return codes
