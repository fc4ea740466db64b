"""Dropout, whose backward multiplies by 0 or 1 / (1 - p): by a bit an element, to torch's bits.

torch saves the factors as a tensor, which would be restored to be read once.
"""

from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs.base import FLOATS
from elbowroom.kernels import ops
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.held import by_element, view_of
from elbowroom.runtime.handles import EncodeHandle
from elbowroom.runtime.node import Node


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Computes torch.nn.functional.dropout, in training and not in place."""
    made: Tensor = _Dropout.apply(input, p)
    return made


def fits_dropout(call: Call, x: Tensor) -> bool:
    """Returns whether there are factors that a bitmap can hold."""
    p, training = call.arg(1, "p", 0.5), call.arg(2, "training", True)
    drops = training is True and isinstance(p, float) and 0 < p < 1
    on_cpu = x.device.type == "cpu" and x.dtype in FLOATS and x.numel() > 0
    return drops and on_cpu and not call.arg(3, "inplace", False)


class _Dropout(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        noise = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)  # torch's own steps
        ctx.save_for_backward(noise)
        ctx.set_materialize_grads(False)
        return x * noise

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,) = grads
        if grad is None:
            return None, None
        direct = None if torch.is_grad_enabled() else _by_bits(ctx, grad)
        if direct is None:
            (noise,) = ctx.saved_tensors
            direct = grad * noise
        return direct, None


def _by_bits(ctx: Any, grad: Tensor) -> Tensor | None:
    """The gradient by the bits alone; None where there are none, or in another order."""
    view = view_of(ctx._raw_saved_tensors[0])
    handle = None if view is None else view.slot.value
    if view is None or not isinstance(handle, EncodeHandle):
        return None
    factors = handle.factors()
    if factors is None:
        return None
    return by_element(grad, view, lambda flat, made: ops.times_bits(flat, *factors, made))
