"""GELU and SiLU on a code: the gradient takes the place of the input that was decoded for it.

The decoded tensor is private, so torch's backward overwrites it, and one tensor of the widest
layer's size is not allocated. The bits are those of torch on the restored tensor.
"""

from typing import Any, cast

import torch
from torch import Tensor

from elbowroom.runtime.direct.held import private_of
from elbowroom.runtime.node import Node

_aten: Any = torch.ops.aten
_nn = torch._C._nn  # those of torch.nn.functional may be wrapped by the program


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Computes torch.nn.functional.gelu."""
    made: Tensor = _GELU.apply(input, approximate)
    return made


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """Computes torch.nn.functional.silu, but for `inplace`, which must be false."""
    made: Tensor = _SiLU.apply(input)
    return made


class _GELU(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        ctx.set_materialize_grads(False)
        return _nn.gelu(x, approximate=approximate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,), how = grads, {"approximate": ctx.approximate}
        if grad is None:
            return None, None
        x = None if torch.is_grad_enabled() else private_of(ctx._raw_saved_tensors[0], grad)
        if x is not None:
            return _aten.gelu_backward.grad_input(grad, x, **how, grad_input=x), None
        (x,) = ctx.saved_tensors
        return _aten.gelu_backward(grad, x, **how), None


class _SiLU(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return _nn.silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        (grad,) = grads
        if grad is None:
            return None
        x = None if torch.is_grad_enabled() else private_of(ctx._raw_saved_tensors[0], grad)
        if x is not None:
            return cast(Tensor, _aten.silu_backward.grad_input(grad, x, grad_input=x))
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # torch's kernel has no derivative
            slope = x.sigmoid()
            # Computed before the product, as in torch: backward accumulates in the reverse order of
            # nodes.
            bend = 1 + x * (1 - slope)
            return cast(Tensor, grad * slope * bend)
        return cast(Tensor, _aten.silu_backward(grad, x))
