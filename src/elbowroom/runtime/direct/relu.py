"""ReLU and PReLU: backward passes the gradient where a bit is set, bit for bit as in torch.

torch restores a tensor of zeros and ones, and reads it beside the gradient.
"""

from typing import Any

import torch
from torch import Tensor

from elbowroom.kernels import ops
from elbowroom.plan import Need
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.held import is_alike, packed, view_of
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.masks import HeldMask
from elbowroom.runtime.node import Node
from elbowroom.runtime.slot import View


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """Computes torch.nn.functional.relu."""
    made: Tensor = _ReLU.apply(input, inplace)
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


class _ReLU(Node):
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
    (saved,) = ctx._raw_saved_tensors
    held = packed(saved)
    mask = held if type(held) is HeldMask else _mask_of(view_of(saved))
    if mask is None:
        return None
    bits, shape, stride, dtype, _ = mask
    if not is_alike(grad, shape, stride, dtype, bits.device):
        return None
    made = torch.empty_like(grad)
    kernels = ops.by_address(grad)
    if kernels is not None:
        kernels.masked(grad.data_ptr(), grad.numel(), bits.data_ptr(), made.data_ptr())
    else:
        flat, into = (x.as_strided((x.numel(),), (1,), x.storage_offset()) for x in (grad, made))
        ops.masked(flat, bits, into)
    return made


def _mask_of(view: View | None) -> HeldMask | None:
    """The bits that a view has in place of the tensor."""
    if view is None or view.need is not Need.MASK or view.slot.is_window:
        return None
    slot, (shape, stride, _) = view.slot, view.geometry
    if slot.bits is None or isinstance(slot.value, KeepHandle):
        return None  # a kept tensor checks whether it was changed meanwhile
    return HeldMask((slot.bits, shape, stride, slot.dtype, None))


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
    """PReLU, whose backward reads signs, beside what its weight's gradient reads.

        grad_x = grad where x > 0, else weight grad          the signs
        grad_weight = sum of grad x where x <= 0             x, in a sum: it may carry an error

    torch saves x for both, so that x could have no code, nor could the input of a norm that it is
    made from. An exact context leaves PReLU to torch: there x is held.
    """

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
