"""Product of two tensors, whose backward holds one tensor of the result's size at a time.

    grad_a = sum(grad * b)      grad_b = sum(grad * a)      over dimensions that were broadcast

torch's own backward restores both factors, computes both products and only then sums the product of
a factor that was broadcast over a map (a gate, an attention weight, the scale of a layer): at that
moment four tensors of the map's size are alive beside the gradient. Here the smallest sum is
computed first, and its product freed; and where a factor was decoded or rebuilt, so that it is
private, the product takes its place. Numbers, kernels and layouts are torch's, and so are the bits.
"""

from typing import Any

import torch
from torch import Tensor

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.held import packed, restored_alone
from elbowroom.runtime.node import Node
from elbowroom.runtime.slot import View
from elbowroom.runtime.storage import untouchable

_MIN_NBYTES = 1 << 18  # of the result: fewer are not worth a node of ours


def product(input: Tensor, other: Tensor) -> Tensor:
    """Computes torch.mul of arguments that pass `fits_product`."""
    made: Tensor = _Product.apply(input, other)
    return made


def fits_product(call: Call, x: Tensor) -> bool:
    """Returns whether a call multiplies two different tensors on a CPU that want a gradient."""
    y = call.arg(1, "other")
    if not isinstance(y, Tensor) or len(call.args) + len(call.kwargs) != 2:
        return False
    if not (x.requires_grad and y.requires_grad) or x.dtype is not y.dtype:
        return False
    if not x.device.type == y.device.type == "cpu":  # the bits were not verified elsewhere
        return False
    if x.untyped_storage()._cdata == y.untyped_storage()._cdata:
        return False
    largest = max(x, y, key=Tensor.numel)
    if largest.nbytes < _MIN_NBYTES or x.is_complex():
        return False
    return _spreads(y if largest is x else x, largest)


def _spreads(x: Tensor, over: Tensor) -> bool:
    """Returns whether x times the other tensor has the other's shape."""
    pairs = zip(reversed(x.shape), reversed(over.shape), strict=False)
    return x.dim() <= over.dim() and all(own in (1, length) for own, length in pairs)


class _Product(Node):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.set_materialize_grads(False)
        ctx.shapes = a.shape, b.shape
        return torch.mul(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        if grad is None:
            return None, None
        if torch.is_grad_enabled() or type(grad) is not Tensor or untouchable(grad):
            a, b = ctx.saved_tensors
            both = grad * b, grad * a
            return both[0].sum_to_size(ctx.shapes[0]), both[1].sum_to_size(ctx.shapes[1])
        made: list[Tensor | None] = [None, None]
        for i in sorted((0, 1), key=lambda i: ctx.shapes[i].numel()):
            made[i] = _times(grad, ctx, 1 - i).sum_to_size(ctx.shapes[i])
        return made[0], made[1]


def _times(grad: Tensor, ctx: Any, i: int) -> Tensor:
    """Returns grad * the i-th factor, in the factor's memory if that is private."""
    held = packed(ctx._raw_saved_tensors[i])
    if isinstance(held, View) and _fits_over(grad, held):
        own = restored_alone(held)
        if own is not None:
            return own.mul_(grad)
    factor: Tensor = held.restore().detach()
    return grad * factor


def _fits_over(grad: Tensor, view: View) -> bool:
    """Returns whether grad * factor has the dtype, shape and strides of the factor.

    torch orders a result by the strides of the first operand, where these are unique; a gradient
    that was expanded has strides of 0, which do not.
    """
    shape, stride = view.geometry.shape, view.geometry.stride
    if grad.dtype is not view.slot.dtype or grad.shape != shape or grad.device != view.slot.device:
        return False
    if grad.stride() == stride:
        return True
    pairs = zip(grad.stride(), stride, shape, strict=True)
    return all(length > 1 and one in (0, own) for one, own, length in pairs)
