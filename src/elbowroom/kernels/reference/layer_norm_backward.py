"""Backward of a layer norm on the dithered code of its normalized input xhat.

by row of D elements, with g = grad * weight:
grad_x      = rstd * (g - mean(g) - xhat * mean(g * xhat))
over rows:
grad_weight = sum(grad * xhat);   grad_bias = sum(grad)
"""

from torch import Tensor

from elbowroom.kernels.reference.dither import dither_dequantize


def dither_layer_norm_backward(
    grad: Tensor,
    codes: Tensor,
    ranges: Tensor,
    bounds: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    weight: Tensor,
    rstd: Tensor,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """grad [R * D]; weight [D], rstd [R] float32 -> out [R * D] = grad_x; the other two [D].

    xhat is rounded to grad's dtype, as a restored input is.
    """
    dither_dequantize(codes, ranges, bounds, seed, levels, group_size, out)
    x, dy = out.double().view(-1, len(weight)), grad.double().view(-1, len(weight))
    g = dy * weight
    inner = g - g.mean(1, keepdim=True) - x * (g * x).mean(1, keepdim=True)
    out.copy_((rstd[:, None] * inner).view(-1))
    return (dy * x).sum(0).float(), dy.sum(0).float()
