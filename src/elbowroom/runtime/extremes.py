"""Extremes over indices, whose backward reads which elements are the extreme: a bit each.

    forward    y = self.scatter_reduce(dim, index, x, "amax")      and "amin"
    saved      self == y and x == y[index], a bit an element; and the index
    backward   grad / n for each element that is the extreme, n of which are equal

torch saves self, x and y, and compares them again in backward, which tolerates no error: x, a
message of each edge of a graph, could have no code, nor could its sources. Here the comparisons are
made in forward, some rows at a time. All ops are torch's own, and so are the bits of the gradient.

Rows that wait (`gathered.py`) are read in parts, and the gradient that they get waits, too.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from elbowroom.runtime.gathered import Gathered, here
from elbowroom.runtime.node import Node
from elbowroom.runtime.row_sources import parts, sources_of

EXTREMES = ("amax", "amin")
_PARTS = 16  # of the rows, within these bytes of one
_MIN_PART_NBYTES = 1 << 20


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Computes torch.scatter_reduce of arguments that pass `direct.extremes.fits_extremes`."""
    made: Tensor = _Extremes.apply(input, dim, index, src, reduce, include_self, False)
    return made


def scatter_reduce_(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Computes Tensor.scatter_reduce_ of arguments that pass `direct.extremes.fits_extremes`."""
    made: Tensor = _Extremes.apply(input, dim, index, src, reduce, include_self, True)
    return made


def extremes_of_rows_(
    input: Tensor, index: Tensor, reduce: str, include_self: bool, *tensors: Tensor
) -> Tensor:
    """Computes Tensor.scatter_reduce_ of the handed rows, in parts; tensors: what these are of."""
    rows = here.taken()
    made: Tensor = _Extremes.apply(input, 0, index, rows, reduce, include_self, True)
    return made


def extremes_of_rows(
    input: Tensor, index: Tensor, reduce: str, include_self: bool, *tensors: Tensor
) -> Tensor:
    """Computes `extremes_of_rows_` of a copy of the input."""
    return extremes_of_rows_(input.clone(), index, reduce, include_self, *tensors)


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
        if type(src) is Gathered:
            made = _reduced(x, index, src, reduce, include_self)
        else:
            run = x.scatter_reduce_ if in_place else x.scatter_reduce
            made = run(dim, index, src, reduce, include_self=include_self)
        if in_place:
            ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.include_self = dim, include_self
        ctx.mark = src.state.mark if type(src) is Gathered else None
        if any(ctx.needs_input_grad):
            is_self, is_src = before == made, _are_extreme(made, dim, index, src)
            ctx.save_for_backward(is_self, is_src, index)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return (None,) * 7
        is_self, is_src, index = ctx.saved_tensors
        dim = ctx.dim
        count = _added(is_self.to(grad.dtype), dim, index, is_src)
        each = grad / count
        of_self = of_src = None
        if ctx.needs_input_grad[0]:
            of_self = is_self * each
            if not ctx.include_self:
                of_self = of_self.scatter(dim, index, 0)
        if ctx.needs_input_grad[3]:
            if ctx.mark is None or ctx.mark.is_whole or torch.is_grad_enabled():
                of_src = is_src * each.gather(dim, index)
            else:
                of_src = Gathered.empty(is_src.shape, each).of(sources_of(each, index, is_src))
        return of_self, None, None, of_src, None, None, None


def _reduced(x: Tensor, index: Tensor, src: Gathered, reduce: str, include_self: bool) -> Tensor:
    """Computes x.scatter_reduce_(0, index, src, ...) of rows that wait."""
    if not include_self:
        x.scatter_(0, index, float("-inf" if reduce == "amax" else "inf"))
    for part in parts(index, src.shape):
        x.scatter_reduce_(0, index[part], src.sources.part(part), reduce)
    return x


def _added(into: Tensor, dim: int, index: Tensor, bits: Tensor) -> Tensor:
    """Returns into.scatter_add_(dim, index, bits), some rows at a time."""
    if not bits.dim() or dim % bits.dim():
        return into.scatter_add(dim, index, bits.to(into.dtype))
    for rows in _parts(bits):
        into.scatter_add_(dim, index[rows], bits[rows].to(into.dtype))
    return into


def _are_extreme(made: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Returns where an element of src is that of the result at its index [as src] bool.

    In the order of src, from which the gradient has its own.
    """
    if type(src) is Gathered:
        is_src = torch.empty(src.shape, dtype=torch.bool, device=src.device)
        for part in parts(index, src.shape):
            found = made.gather(0, index[part])
            torch.eq(src.sources.part(part), found, out=is_src[part])
        return is_src
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
