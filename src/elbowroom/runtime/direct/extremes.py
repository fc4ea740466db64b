"""Extremes over indices, whose backward reads which elements are the extreme: a bit each.

    forward    y = self.scatter_reduce(dim, index, x, "amax")      and "amin"
    saved      self == y and x == y[index], a bit an element; and the index
    backward   grad / n for each element that is the extreme, n of which are equal

torch saves self, x and y, and compares them again in backward, which tolerates no error: x, a
message of each edge of a graph, could have no code, nor could its sources. Here the comparisons are
made in forward, some rows at a time. All ops are torch's own, and so are the bits of the gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.node import Node

_EXTREMES = ("amax", "amin")
_PARTS = 16  # of the rows, within these bytes of one
_MIN_PART_NBYTES = 1 << 20


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Computes torch.scatter_reduce of arguments that pass `fits_extremes`."""
    made: Tensor = _Extremes.apply(input, dim, index, src, reduce, include_self, False)
    return made


def scatter_reduce_(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Computes Tensor.scatter_reduce_ of arguments that pass `fits_extremes`."""
    made: Tensor = _Extremes.apply(input, dim, index, src, reduce, include_self, True)
    return made


def fits_extremes(call: Call, x: Tensor) -> bool:
    """Returns whether a call takes the extremes of a tensor that wants a gradient."""
    dim, index, src = call.arg(1, "dim"), call.arg(2, "index"), call.arg(3, "src")
    if call.arg(4, "reduce") not in _EXTREMES or type(dim) is not int or "out" in call.kwargs:
        return False
    if not isinstance(src, Tensor) or not isinstance(index, Tensor) or not src.requires_grad:
        return False
    if not src.dim() or not src.numel() or src.shape != index.shape or src.dtype is not x.dtype:
        return False
    # Autograd has rules of its own for leaves and views that are changed in place.
    in_place = call.name == "scatter_reduce_"
    return not in_place or not (x._is_view() or (x.is_leaf and x.requires_grad))


class _Extremes(Node):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        index: Tensor,
        src: Tensor,
        reduce: str,
        include_self: bool,
        in_place: bool,
    ) -> Tensor:
        before = x.clone() if in_place else x
        run = x.scatter_reduce_ if in_place else x.scatter_reduce
        made = run(dim, index, src, reduce, include_self=include_self)
        if in_place:
            ctx.mark_dirty(x)
        is_self, is_src = before == made, _are_extreme(made, dim, index, src)
        ctx.save_for_backward(is_self, is_src, index)
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.include_self = dim, include_self
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return (None,) * 7
        is_self, is_src, index = ctx.saved_tensors
        dim = ctx.dim
        count = is_self.to(grad.dtype).scatter_add(dim, index, is_src.to(grad.dtype))
        each = grad / count
        of_self = of_src = None
        if ctx.needs_input_grad[0]:
            of_self = is_self * each
            if not ctx.include_self:
                of_self = of_self.scatter(dim, index, 0)
        if ctx.needs_input_grad[3]:
            of_src = is_src * each.gather(dim, index)
        return of_self, None, None, of_src, None, None, None


def _are_extreme(made: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Returns where an element of src is that of the result at its index [as src] bool."""
    is_src = torch.empty_like(src, dtype=torch.bool)
    of_rows = made.dim() and dim % made.dim() != 0
    for rows in _parts(src):
        found = (made[rows] if of_rows else made).gather(dim, index[rows])
        torch.eq(src[rows], found, out=is_src[rows])
    return is_src


def _parts(x: Tensor) -> Iterator[slice]:
    """All rows of x, a few at a time."""
    nbytes = max(x.nbytes // _PARTS, _MIN_PART_NBYTES)
    rows = max(nbytes * len(x) // x.nbytes, 1)
    return (slice(start, start + rows) for start in range(0, len(x), rows))
