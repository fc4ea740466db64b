"""x <- x * scale + shift by channel, and exactly 0 where a bitmap says so.

This is the output of BatchNorm and ReLU, remade.
"""

import torch
from torch import Tensor

from elbowroom.kernels.reference.bits import flags


def affine(x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: Tensor | None) -> None:
    """x [N] floating is changed in place; element i belongs to channel (i // inner) % C.

    scale [C], shift [C] float32; bits [ceil(N / 8)] uint8, or None for no mask.
    """
    channel = (torch.arange(x.numel(), device=x.device) // inner) % scale.numel()
    y = x.float() * scale[channel] + shift[channel]
    x.copy_(y if bits is None else torch.where(flags(bits, x.numel()), y, 0.0))
