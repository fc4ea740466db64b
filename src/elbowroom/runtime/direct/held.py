"""What one of our nodes has saved, as it is held: no tensor is restored by asking."""

from typing import Any

from torch import Tensor

from elbowroom.runtime.slot import View


def view_of(ctx: Any, i: int) -> View | None:
    """The view that stands for the i-th saved tensor, if it is of all that its slot holds.

    Raises what autograd raises in a second backward without retain_graph.
    """
    held = packed(ctx, i)
    return held if type(held) is View and held.geometry == held.slot.base else None


def packed(ctx: Any, i: int) -> Any:
    """What `_pack` made of the i-th saved tensor."""
    return ctx._raw_saved_tensors[i].data


def flat_like(grad: Tensor, view: View) -> Tensor | None:
    """grad as a flat run in the order of the view; None where it has another, or another dtype."""
    geometry = view.geometry
    if view.slot.is_window:
        return None
    alike = grad.dtype is view.slot.dtype and grad.stride() == geometry.stride
    if not alike or grad.shape != geometry.shape or grad.device != view.slot.device:
        return None
    return grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
