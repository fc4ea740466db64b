"""Backward of a batch norm on the dithered code of its normalized input xhat.

by channel, over its M elements:
grad_bias = sum(grad);   grad_weight = sum(grad * xhat)
grad_x    = factor * (grad - grad_bias / M - xhat * grad_weight / M)     factor = weight * rstd
"""

import torch
from torch import Tensor

from elbowroom.kernels.reference.dither import dither_dequantize


def dither_batch_norm_backward(
    grad: Tensor,
    codes: Tensor,
    ranges: Tensor,
    bounds: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    factor: Tensor,
    inner: int,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """grad [N]; factor [C] float32 -> out [N] = grad_x; grad_weight, grad_bias [C] float32.

    Element i belongs to channel (i // inner) % C. The sums are those of the decoded xhat; for
    grad_x it is rounded to grad's dtype, as a restored input is.
    """
    xhat = torch.empty_like(grad, dtype=torch.float32)
    dither_dequantize(codes, ranges, bounds, seed, levels, group_size, xhat)
    shape = -1, len(factor), inner
    dy, x = grad.double().view(shape), xhat.double().view(shape)
    bias, weight = dy.sum((0, 2)), (dy * x).sum((0, 2))  # [C]
    each = grad.numel() / len(factor)
    rounded = xhat.to(grad.dtype).double().view(shape)
    mean = (bias[:, None] + rounded * weight[:, None]) / each
    out.copy_(((dy - mean) * factor[:, None]).view(-1))
    return weight.float(), bias.float()
