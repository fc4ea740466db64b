"""Dropout, whose backward multiplies by 0 or 1 / (1 - p): by a bit an element, to torch's bits.

torch saves the factors as a tensor, which would be restored to be read once.
"""

from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs.base import FLOATS
from elbowroom.kernels import ops
from elbowroom.runtime.direct.held import flat_like, view_of
from elbowroom.runtime.handles import EncodeHandle


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As torch.nn.functional.dropout."""
    ours = not inplace and training is True and isinstance(p, float) and 0 < p < 1
    if not ours or input.device.type != "cpu" or input.dtype not in FLOATS or not input.numel():
        return torch.nn.functional.dropout(input, p, training, inplace)
    made: Tensor = _Dropout.apply(input, p)  # type: ignore[no-untyped-call]
    return made


class _Dropout(torch.autograd.Function):
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
    view = view_of(ctx, 0)
    handle = None if view is None else view.slot.value
    if view is None or not isinstance(handle, EncodeHandle):
        return None
    factors, flat = handle.factors(), flat_like(grad, view)
    if factors is None or flat is None:
        return None
    made = torch.empty_like(flat)
    ops.times_bits(flat, *factors, made)
    return made.as_strided(grad.shape, grad.stride())
