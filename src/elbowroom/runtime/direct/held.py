"""Access to the saved tensors of one of our nodes in their held form, without restoring them.

`ctx._raw_saved_tensors` makes an object for each tensor that a node has saved, so a backward asks
for it once, and passes on these objects (`saved`).
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs import Encoded
from elbowroom.runtime.handles import EncodeHandle, RebuildHandle
from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.normal import Statistics
from elbowroom.runtime.slot import Geometry, View
from elbowroom.runtime.storage import untouchable


def view_of(saved: Any) -> View | None:
    """The view of a saved tensor, if it covers all that its slot holds.

    Raises what autograd raises in a second backward without retain_graph.
    """
    held = packed(saved)
    return held if type(held) is View and held.geometry == held.slot.base else None


def packed(saved: Any) -> Any:
    """Returns the object that `_pack` has returned for a saved tensor."""
    held = saved.data
    return held.held if isinstance(held, Deferred) else held


def flat_like(grad: Tensor, view: View) -> Tensor | None:
    """Returns grad as a flat run in the view's order; None where it has another order or dtype.

    Reordering it would give a gradient of another layout than torch's, from which later ops may
    compute other bits.
    """
    if not lies_like(grad, view):
        return None
    return grad.as_strided((grad.numel(),), (1,), grad.storage_offset())


def lies_like(grad: Tensor, view: View) -> bool:
    """Returns whether grad has the dtype and order of the view, and is a plain tensor."""
    (shape, stride, _), slot = view.geometry, view.slot
    return not slot.is_window and is_alike(grad, shape, stride, slot.dtype, slot.device)


def is_alike(
    grad: Tensor,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Returns whether grad is a plain tensor of this kind."""
    if type(grad) is not Tensor or untouchable(grad):  # batched, for one
        return False
    alike = grad.dtype is dtype and grad.stride() == stride
    return alike and grad.shape == shape and grad.device == device


def by_element(grad: Tensor, view: View, run: Callable[[Tensor, Tensor], None]) -> Tensor | None:
    """Returns run(flat, made), which works element by element; None where `flat_like` is."""
    flat = flat_like(grad, view)
    if flat is None:
        return None
    made = torch.empty_like(flat)
    run(flat, made)
    return made.as_strided(grad.shape, grad.stride())


def private_of(saved: Any, grad: Tensor) -> Tensor | None:
    """A saved tensor, decoded into memory of its own, in grad's layout.

    None where it is not a code, its original still exists, or it is shared with other readers.
    """
    view = view_of(saved)
    handle = None if view is None or view.slot.is_shared else view.slot.value
    if view is None or not isinstance(handle, EncodeHandle) or flat_like(grad, view) is None:
        return None
    return handle.restore(private=True) if handle.is_needed() else None


def restored_alone(view: View) -> Tensor | None:
    """The tensor of a view, in private memory that its caller may overwrite.

    None where it is kept, or shared with other readers, or the view is not of all that is held.
    """
    slot, geometry = view.slot, view.geometry
    shared = slot.is_window or slot.whole is not None or slot.is_shared or slot.has_many_views
    if shared or not (geometry == slot.base or _is_run_of(geometry, slot.base)):
        return None
    handle = slot.value
    is_code = isinstance(handle, EncodeHandle) and handle.is_needed()
    if not is_code and not isinstance(handle, RebuildHandle):
        return None
    return view.restore_alone()


def _is_run_of(geometry: Geometry, base: Geometry) -> bool:
    """Returns whether a view in order has all elements of a dense tensor."""
    own = 1
    for length, stride in zip(reversed(geometry.shape), reversed(geometry.stride), strict=True):
        if length != 1 and stride != own:
            return False
        own *= length
    return own == prod(base.shape) and geometry.offset == base.offset


def normalized_of(saved: Sequence[Any], grad: Tensor) -> tuple[Encoded, Statistics, Tensor] | None:
    """The code of a norm's xhat, what x was normalized by, and grad as a flat run in its order.

    Of a node that saved x first and mean, rstd last. None where there is no code of its own: the
    input is kept, restored already, or was normalized by the statistics of another norm.
    """
    view = view_of(saved[0])
    handle = None if view is None else view.slot.value
    if view is None or not isinstance(handle, EncodeHandle):
        return None
    normalized, flat = handle.normalized(), flat_like(grad, view)
    if normalized is None or flat is None:
        return None
    encoded, statistics = normalized
    own = [packed(one).restore().data_ptr() for one in saved[-2:]]
    if own != [statistics.mean.data_ptr(), statistics.rstd.data_ptr()]:
        return None
    return encoded, statistics, flat


def wanted(sums: tuple[Tensor, ...], ctx: Any) -> list[Tensor | None]:
    """The gradients of weight and bias, in their dtypes; None for one that is not wanted."""
    each = zip(sums, ctx.dtypes, ctx.needs_input_grad[1:3], strict=True)
    return [
        None if not needed else total if total.dtype is dtype else total.to(dtype)
        for total, dtype, needed in each
    ]
