"""One bit an element: bit i % 8 of byte i // 8 tells whether element i is not zero (NaN is not)."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack_bits(x: Tensor) -> Tensor:
    """x [N] of any real dtype -> [ceil(N / 8)] uint8."""
    rows = pad((x != 0).to(torch.uint8), (0, -x.numel() % 8)).view(-1, 8)  # [bytes, 8]
    return (rows << torch.arange(8, device=x.device)).sum(dim=1).to(torch.uint8)  # [bytes]


def unpack_bits(bits: Tensor, value: float, out: Tensor) -> None:
    """bits [ceil(N / 8)] uint8 -> out [N]: `value` where the bit is set, 0 elsewhere."""
    out.zero_().masked_fill_(flags(bits, out.numel()), value)


def masked(x: Tensor, bits: Tensor, out: Tensor) -> None:
    """x [N], bits [ceil(N / 8)] uint8 -> out [N]: x where the bit is set, +0 elsewhere."""
    torch.where(flags(bits, x.numel()), x, x.new_zeros(()), out=out)


def times_bits(x: Tensor, bits: Tensor, value: float, out: Tensor) -> None:
    """x [N], bits [ceil(N / 8)] uint8 -> out [N]: x times `value` where the bit is set, else 0."""
    factor = torch.empty_like(x)
    unpack_bits(bits, value, factor)
    torch.mul(x, factor, out=out)


def flags(bits: Tensor, numel: int) -> Tensor:
    """bits [ceil(numel / 8)] uint8 -> [numel] bool."""
    return ((bits[:, None] >> torch.arange(8, device=bits.device)) & 1).view(-1)[:numel] != 0
