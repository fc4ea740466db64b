"""out <- x * scale + shift by channel, and exactly 0 where a bit is not set.

It rebuilds the output of BatchNorm and ReLU, and normalizes the input of a norm.
"""

import torch
from torch import Tensor

from elbowroom.kernels.reference.bits import flags


def affine(
    x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: Tensor | None, out: Tensor
) -> None:
    """x [N] floating -> out [N] of the same dtype, which may be x itself.

    Element i belongs to channel (i // inner) % C. scale, shift [C] float32, or [R, C]: a row for
    each of R equal shares of x. bits [ceil(N / 8)] uint8, or None for no mask.
    """
    out.copy_(mapped(x, scale, shift, inner, bits))


def mapped(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, inner: int, bits: Tensor | None = None
) -> Tensor:
    """Returns the same as [N] float32; x itself if there is no scale and shift."""
    y = x.float()
    if scale is not None and shift is not None:
        at, channels = torch.arange(x.numel(), device=x.device), scale.shape[-1]
        share = max(x.numel() // (scale.numel() // channels), 1)
        channel = at // share * channels + (at % share // inner) % channels
        y = y * scale.flatten()[channel] + shift.flatten()[channel]
    return y if bits is None else torch.where(flags(bits, x.numel()), y, 0.0)
