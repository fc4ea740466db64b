"""Computes how much of the error of a tensor a smooth function passes on to its gradient.

    dx = dY f'(x)       curvature = mean of x^2 * mean of f''(x)^2 / mean of f'(x)^2

A small error e of x changes dx by dY f''(x) e, and that of a code does not depend on x. So this is
the energy of the error of dx, relative to dx, where an error has the energy of x itself. It goes
from 0, for values so small that f is a line there, to more than 1, where f bends sharply. The
derivatives are differences of f, in float64, at some thousands of the elements. tanh and sigmoid
save their result, of which their derivative is a polynomial.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from elbowroom.runtime.consumers import Call

_ELEMENTS = 4096
_NEAR, _APART = 1e-4, 0.05  # of the root mean square: of a derivative, of its change
# What saves its input, and maps each element by itself.
_OF_INPUT = frozenset(
    (
        *("gelu", "silu", "mish", "hardswish", "softplus", "logsigmoid", "elu", "celu", "selu"),
        *("erf", "atan", "asinh", "sin", "cos"),
    )
)
_OF_RESULT: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda y: 1 - y * y,
    "sigmoid": lambda y: y - y * y,
}


def curvature(call: Call, x: Tensor) -> Tensor | None:
    """Returns the part of an error of x that the call passes on, relative to its gradient.

    x: what the call saves. None: the call is none of those of which it can be computed.
    """
    if not x.is_floating_point() or x.numel() == 0:
        return None
    derivative = _OF_RESULT.get(call.name)
    if derivative is None:
        first = call.first
        saves_input = isinstance(first, Tensor) and first.shape == x.shape
        if call.name not in _OF_INPUT or not saves_input:
            return None
        derivative = _derivative(call)
    flat = x.reshape(-1)
    some = flat[:: max(flat.numel() // _ELEMENTS, 1)].double()
    size = some.square().mean()
    apart = _APART * size.sqrt()
    change = (derivative(some + apart) - derivative(some - apart)) / (2 * apart)  # f''(x)
    passed, kept = size * change.square().mean(), derivative(some).square().mean()
    return torch.where((kept > 0) & (apart > 0), passed / kept, torch.zeros_like(kept))


def _derivative(call: Call) -> Callable[[Tensor], Tensor]:
    """Returns the derivative of the function that the call computes of its first argument."""

    def function(x: Tensor) -> Tensor:
        given = {name: value for name, value in call.kwargs.items() if name != "input"}
        made: Tensor = call.func(x, *call.args[1:], **given)
        return made

    def derivative(x: Tensor) -> Tensor:
        near = _NEAR * x.square().mean().sqrt()
        # In place it changes what it is given: each has a tensor of its own.
        return (function(x + near) - function(x - near)) / (2 * near)

    return derivative
