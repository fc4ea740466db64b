"""Batch norm in training, whose backward reads the code of its input.

What is encoded is xhat = (x - mean) * rstd (`runtime/normal.py`), and that is all backward needs:

    grad_x = weight * rstd * (grad - mean(grad) - xhat * mean(grad * xhat))     means by channel
    grad_weight = sum(grad * xhat);   grad_bias = sum(grad)

So what is decoded becomes the gradient in place: torch's own needs the input and another tensor.
What is decoded is centred first, so that the gradient of the input sums to 0 over each channel, as
that of torch does.
"""

from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs.base import FLOATS
from elbowroom.kernels import ops
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.held import normalized_of, packed, view_of, wanted
from elbowroom.runtime.handles import EncodeHandle
from elbowroom.runtime.node import Node

_Grads = tuple[Tensor | None, ...]


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes torch.nn.functional.batch_norm, in training."""
    # The running statistics in a tuple: no inputs of the node.
    made: Tensor = _BatchNorm.apply(input, weight, bias, (running_mean, running_var), momentum, eps)
    return made


def fits_batch_norm(call: Call, x: Tensor) -> bool:
    """Returns whether the node can run.

    Arguments that torch.batch_norm refuses, but its kernel does not check, go to torch.
    """
    if x.device.type != "cpu" or x.dtype not in FLOATS or x.dim() < 2:
        return False
    momentum, eps = call.arg(6, "momentum", 0.1), call.arg(7, "eps", 1e-5)
    numbers = isinstance(momentum, float) and isinstance(eps, float) and eps > 0
    if not numbers or not call.arg(5, "training", False):
        return False
    names = "running_mean", "running_var", "weight", "bias"
    per_channel = [call.arg(i, name) for i, name in enumerate(names, 1)]
    channels = x.shape[1]
    return x.numel() > channels and all(p is None or p.numel() == channels for p in per_channel)


class _BatchNorm(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        weight, bias, (running_mean, running_var), momentum, eps = settings
        out, mean, rstd = torch.native_batch_norm(
            x, weight, bias, running_mean, running_var, True, momentum, eps
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.dtypes = eps, [None if p is None else p.dtype for p in (weight, bias)]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> _Grads:
        (grad,) = grads
        if grad is None:
            return (None,) * 6
        is_first = not torch.is_grad_enabled()
        found = _on_code(ctx, grad) if is_first else None
        if found is None:
            is_coded = is_first and _is_coded(ctx)
            x, weight, mean, rstd = ctx.saved_tensors
            if is_coded:
                mean = x.mean((0, *range(2, x.dim())), dtype=mean.dtype)
            found = torch.ops.aten.native_batch_norm_backward(
                *(grad, x, weight, None, None, mean, rstd, True, ctx.eps, ctx.needs_input_grad[:3])
            )
        return *found, None, None, None


def _is_coded(ctx: Any) -> bool:
    """Returns whether the input is restored from a lossy code, whose mean is another."""
    view = view_of(ctx._raw_saved_tensors[0])
    held = None if view is None else view.slot.value
    return isinstance(held, EncodeHandle) and not held.exact and held.is_needed()


def _on_code(ctx: Any, grad: Tensor) -> _Grads | None:
    """The gradients; None where there is no code of the normalized input, in grad's order."""
    saved = ctx._raw_saved_tensors
    found = normalized_of(saved, grad)
    if found is None:
        return None
    encoded, statistics, flat = found
    factor = statistics.rstd.float().flatten()
    if ctx.dtypes[0] is not None:
        factor = factor * packed(saved[1]).restore().float()
    encoded.decode_own(out := torch.empty_like(flat))
    kernels = ops.by_address(flat)
    run = ops.batch_norm_backward if kernels is None else kernels.batch_norm_backward
    sums = run(flat, factor, statistics.inner, out)
    return out.as_strided(grad.shape, grad.stride()), *wanted(sums, ctx)
