"""PReLU, whose backward reads signs: a bit an element, beside what its weight's gradient reads.

    grad_x = grad where x > 0, else weight grad          the signs
    grad_weight = sum of grad x where x <= 0             x, in a sum: it may carry an error

torch saves x for both, so that x could have no code, nor could the input of a norm that it is made
from. An exact context leaves PReLU to torch: there x is held.
"""

from typing import Any

import torch
from torch import Tensor

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.node import Node


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """Computes torch.prelu of arguments that pass `fits_prelu`."""
    made: Tensor = _PReLU.apply(input, weight)
    return made


def fits_prelu(call: Call, x: Tensor) -> bool:
    """Returns whether a call has a weight for all elements, or for each channel."""
    weight = call.arg(1, "weight")
    if not isinstance(weight, Tensor) or weight.dtype is not x.dtype or not x.dim():
        return False
    return weight.dim() <= 1 and weight.numel() in (1, *x.shape[1:2])


class _PReLU(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0, x, weight)
        ctx.set_materialize_grads(False)
        return torch.prelu(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        if grad is None:
            return None, None
        is_positive, x, weight = ctx.saved_tensors
        of_x = of_weight = None
        over = weight.view(-1, *(1 for _ in x.shape[2:])) if weight.numel() > 1 else weight
        if ctx.needs_input_grad[0]:
            of_x = torch.where(is_positive, grad, over * grad)
        if ctx.needs_input_grad[1]:
            below = torch.where(is_positive, 0.0, x * grad)
            of_weight = below.sum_to_size(over.shape).view(weight.shape)
        return of_x, of_weight
