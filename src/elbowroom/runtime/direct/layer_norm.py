"""Layer norm, whose backward reads the code of its input, which encodes xhat.

g = grad * weight
grad_x = rstd * (g - mean(g) - xhat * mean(g * xhat))     means by row
grad_weight = sum(grad * xhat);   grad_bias = sum(grad)   over rows
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs.base import FLOATS
from elbowroom.kernels import ops
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.held import normalized_of, packed, wanted
from elbowroom.runtime.node import Node

_Grads = tuple[Tensor | None, ...]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Computes torch.nn.functional.layer_norm."""
    made: Tensor = _LayerNorm.apply(input, weight, bias, normalized_shape, eps)
    return made


def fits_layer_norm(call: Call, x: Tensor) -> bool:
    """Returns whether the node can run.

    A `normalized_shape` that is no sequence goes to torch, for its own error.
    """
    on_cpu = x.device.type == "cpu" and x.dtype in FLOATS and x.numel() > 0
    return on_cpu and isinstance(call.arg(1, "normalized_shape"), Sequence)


class _LayerNorm(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        weight, bias, shape, eps = settings
        out, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtypes = shape, [None if p is None else p.dtype for p in (weight, bias)]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> _Grads:
        (grad,) = grads
        if grad is None:
            return (None,) * 5
        found = None if torch.is_grad_enabled() else _on_code(ctx, grad)
        if found is None:
            x, weight, bias, mean, rstd = ctx.saved_tensors
            found = torch.ops.aten.native_layer_norm_backward(
                grad, x, ctx.shape, mean, rstd, weight, bias, ctx.needs_input_grad[:3]
            )
        return *found, None, None


def _on_code(ctx: Any, grad: Tensor) -> _Grads | None:
    """The gradients; None where there is no code of the normalized input, in grad's order."""
    saved = ctx._raw_saved_tensors
    found = normalized_of(saved, grad)
    if found is None:
        return None
    encoded, statistics, flat = found
    if statistics.rows > 1 or statistics.inner != prod(ctx.shape):
        return None  # its rows do not lie one after another
    if ctx.dtypes[0] is None:
        weight = torch.ones(statistics.inner, dtype=torch.float32, device="cpu")
    else:
        weight = packed(saved[1]).restore().float().flatten()
    if ctx.dtypes[1] is not None:
        packed(saved[2]).restore()  # raises torch's error if it was changed in place
    encoded.decode_own(out := torch.empty_like(flat))
    kernels = ops.by_address(flat)
    run = ops.layer_norm_backward if kernels is None else kernels.layer_norm_backward
    sums = run(flat, weight, statistics.rstd.float().flatten(), out)
    if len(ctx.shape) > 1:
        of_weight, of_bias = (total.view(tuple(ctx.shape)) for total in sums)
        sums = of_weight, of_bias
    return out.as_strided(grad.shape, grad.stride()), *wanted(sums, ctx)
