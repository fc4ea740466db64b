"""Tells which calls of torch.scatter_reduce may run as the node of `runtime/extremes.py`.

And what torch's own op takes beside: it saves what the node has compared, and compares it in
backward.
"""

from torch import Tensor

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.extremes import EXTREMES

_COMPARES = 3  # tensors of the rows' size that torch's backward makes beside those of the node


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


def extremes_nbytes(call: Call) -> int:
    """Bytes that torch's own op saves, or makes in backward, and the node does not."""
    src, x = call.arg(3, "src"), call.arg(0, "input")
    return int((1 + _COMPARES) * src.nbytes + 2 * x.nbytes)
