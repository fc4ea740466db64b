"""Backward of a batch norm on its normalized input xhat, which the gradient overwrites.

by channel, over its M elements:
centred   = xhat - mean(xhat)
grad_bias = sum(grad);   grad_weight = sum(grad * centred)
grad_x    = factor * (grad - grad_bias / M - centred * grad_weight / M)     factor = weight * rstd

xhat has mean 0, and what its code is decoded to has not quite. Without centring, grad_x would not
sum to 0 over a channel, and the layer below multiplies that sum by the mean of its own input.
"""

from torch import Tensor


def batch_norm_backward(
    grad: Tensor, factor: Tensor, inner: int, x: Tensor
) -> tuple[Tensor, Tensor]:
    """grad, x [N]; factor [C] float32 -> x: from xhat to grad_x; the other two [C] float32.

    Element i belongs to channel (i // inner) % C.
    """
    shape = -1, len(factor), inner
    dy, xhat = grad.double().view(shape), x.double().view(shape)
    xhat = xhat - xhat.mean((0, 2), keepdim=True)
    bias, weight = dy.sum((0, 2)), (dy * xhat).sum((0, 2))  # [C]
    mean = (bias[:, None] + xhat * weight[:, None]) * len(factor) / grad.numel()
    x.copy_(((dy - mean) * factor[:, None]).view(-1))
    return weight.float(), bias.float()
