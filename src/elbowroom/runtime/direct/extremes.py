"""Tells which calls of torch.scatter_reduce may run as the node of `runtime/extremes.py`."""

from torch import Tensor

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.extremes import EXTREMES


def fits_extremes(call: Call, x: Tensor) -> bool:
    """Returns whether a call takes the extremes of a tensor that wants a gradient."""
    dim, index, src = call.arg(1, "dim"), call.arg(2, "index"), call.arg(3, "src")
    if call.arg(4, "reduce") not in EXTREMES or type(dim) is not int or "out" in call.kwargs:
        return False
    if not isinstance(src, Tensor) or not isinstance(index, Tensor) or not src.requires_grad:
        return False
    if not src.dim() or not src.numel() or src.shape != index.shape or src.dtype is not x.dtype:
        return False
    # Autograd has rules of its own for leaves and views that are changed in place.
    in_place = call.name == "scatter_reduce_"
    return not in_place or not (x._is_view() or (x.is_leaf and x.requires_grad))
