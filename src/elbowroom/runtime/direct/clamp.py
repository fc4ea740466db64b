"""Clamp, whose backward reads which elements lie between its limits: a bit each, in place of x.

torch saves x, and compares it again in backward, which tolerates no error: x could have no code,
nor could its sources. Here the comparison is made in forward, by torch's own ops, so that elements
equal to a limit are treated as in torch. An exact context leaves clamp to torch: there x is held,
and the result is rebuilt from x.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.node import Node, itself

Limit = float | int | None
_Compare = Callable[[Tensor, float], Tensor]
# The gradients of the least, of what lies between, of the most, and of NaN.
_KNOWN: dict[tuple[float, ...], tuple[_Compare, _Compare]] = {
    (1.0, 1.0, 1.0, 0.0): (torch.ge, torch.le),
    (0.0, 1.0, 0.0, 0.0): (torch.gt, torch.lt),
}


def clamp(input: Tensor, min: Limit = None, max: Limit = None) -> Tensor:
    """Computes torch.clamp, with numbers for limits."""
    made: Tensor = _Clamp.apply(input, min, max)
    return made


def clamp_min(input: Tensor, min: Limit) -> Tensor:
    """Computes torch.clamp_min, with a number for a limit."""
    return clamp(input, min, None)


def clamp_max(input: Tensor, max: Limit) -> Tensor:
    """Computes torch.clamp_max, with a number for a limit."""
    return clamp(input, None, max)


def fits_clamp(call: Call, x: Tensor) -> bool:
    """Returns whether limits are numbers and it is known what torch compares with them."""
    given = (*call.args[1:], *(value for name, value in call.kwargs.items() if name != "input"))
    numbers = all(one is None or type(one) in (int, float) for one in given)
    has_limit = any(one is not None for one in given)
    return numbers and has_limit and _comparisons() is not None


@cache
def _comparisons() -> tuple[_Compare, _Compare] | None:
    """The comparisons that backward makes with both limits, found by a trial of torch.

    Elements equal to a limit have a gradient in torch 2.13, and none in 2.14. None: another
    behavior.
    """
    with (
        torch.enable_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        saved_tensors_hooks(itself, itself),  # not those of a checkpoint of the user's
    ):
        x = torch.tensor([0.0, 0.5, 1.0, float("nan")], requires_grad=True)
        (grad,) = torch.autograd.grad(x.clamp(0, 1).sum(), x)
    return _KNOWN.get(tuple(grad.tolist()))


class _Clamp(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Limit, high: Limit) -> Tensor:
        compared = _comparisons()
        assert compared is not None
        limits = zip(compared, (low, high), strict=True)
        inside = [compare(x, limit) for compare, limit in limits if limit is not None]
        ctx.save_for_backward(inside[0] if len(inside) == 1 else inside[0].logical_and_(inside[1]))
        ctx.set_materialize_grads(False)
        return torch.clamp(x, low, high)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        (grad,) = grads
        if grad is None:
            return None, None, None
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grad, grad.new_zeros(())), None, None
