"""ReLU, whose backward passes the gradient where a bit is set, bit for bit as in torch.

torch restores a tensor of zeros and ones, and reads it beside the gradient.
"""

from typing import Any

import torch
from torch import Tensor

from elbowroom.kernels import ops
from elbowroom.plan import Need
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.held import by_element, lies_like, view_of
from elbowroom.runtime.handles import KeepHandle


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """Computes torch.nn.functional.relu."""
    made: Tensor = _ReLU.apply(input, inplace)  # type: ignore[no-untyped-call]
    return made


def relu_(input: Tensor) -> Tensor:
    """Computes torch.relu_."""
    return relu(input, inplace=True)


def fits_relu(call: Call, x: Tensor) -> bool:
    """Returns whether the node can run.

    Autograd has rules of its own for leaves and views that are changed in place.
    """
    in_place = call.name == "relu_" or call.arg(1, "inplace", False)
    return not in_place or not (x.is_leaf or x._is_view())


class _ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        out = torch.relu_(x) if inplace else torch.relu(x)
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(out)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,) = grads
        if grad is None:
            return None, None
        direct = None if torch.is_grad_enabled() else _masked(ctx, grad)
        if direct is None:
            (out,) = ctx.saved_tensors
            direct = torch.ops.aten.threshold_backward(grad, out, 0)
        return direct, None


def _masked(ctx: Any, grad: Tensor) -> Tensor | None:
    """The gradient by the bits alone; None where there are none, or in another order."""
    view = view_of(ctx, 0)
    if view is None or view.need is not Need.MASK or view.slot.bits is None:
        return None
    if isinstance(view.slot.value, KeepHandle):
        return None  # which checks whether it was changed meanwhile
    bits = view.slot.bits
    if lies_like(grad, view) and (kernels := ops.by_address(grad)) is not None:
        made = torch.empty_like(grad)
        kernels.masked(grad.data_ptr(), grad.numel(), bits.data_ptr(), made.data_ptr())
        return made
    return by_element(grad, view, lambda flat, made: ops.masked(flat, bits, made))
