"""Backward of a layer norm on its normalized input xhat, which the gradient overwrites.

by row of D elements, with g = grad * weight:
grad_x      = rstd * (g - mean(g) - xhat * mean(g * xhat))
over rows:
grad_weight = sum(grad * xhat);   grad_bias = sum(grad)
"""

from torch import Tensor


def layer_norm_backward(
    grad: Tensor, weight: Tensor, rstd: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """grad, x [R * D]; weight [D], rstd [R] float32 -> x: from xhat to grad_x; two sums [D]."""
    xhat, dy = x.double().view(-1, len(weight)), grad.double().view(-1, len(weight))
    g = dy * weight
    inner = g - g.mean(1, keepdim=True) - xhat * (g * xhat).mean(1, keepdim=True)
    x.copy_((rstd[:, None] * inner).view(-1))
    return (dy * xhat).sum(0).float(), dy.sum(0).float()
