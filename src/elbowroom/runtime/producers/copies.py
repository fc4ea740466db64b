"""Recipes of copies: in another order, in another dtype, of some rows."""

import weakref

import torch
from torch import Tensor

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.handles.base import KeepHandle
from elbowroom.runtime.handles.rebuild import Op, Recipe
from elbowroom.runtime.identity import Identity, Origin
from elbowroom.runtime.producers.making import VIEWS, operand, spare, view_of
from elbowroom.runtime.slot import Geometry, Slot
from elbowroom.runtime.storage import version_of

_REORDERED = (*VIEWS, "TransposeBackward0", "PermuteBackward0", "TBackward0")


def moved(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """The recipe of a copy in another order of what an op holds as its own result.

    Backward reads that on the way from the copy, so that a change of it in place is an error in
    plain autograd, too; of what is held for another reader it is not. And it is one pass: what is
    itself made again would be made for the copy, too.
    """
    x, rest, named, func = call.first, call.args[1:], dict(call.kwargs), call.func
    named.pop("input", None)
    held, before = identity.slot(x), identity.origin(x, call.version)
    if held is None or version_of(x) != call.version or not _is_own_result(x, held):
        return None
    op = Op(lambda x, _: func(x, *rest, **named))
    recipe = Recipe.of(op, held, Geometry.of(x), out, identity.slot(out))
    has_zeros = before is not None and before.has_zeros
    return None if recipe is None else Origin(call.name, has_zeros, recipe)


def _is_own_result(x: Tensor, held: Slot) -> bool:
    """Returns whether x is a view of its op's own result, which that op has saved."""
    node = x.grad_fn
    while node is not None and node.name() in _REORDERED:
        node = node.next_functions[0][0]
    saved = (getattr(node, f"_raw_saved_{field}", None) for field in ("result", "output"))
    views = (view for one in saved if (view := view_of(one)) is not None)
    return isinstance(held.value, KeepHandle) and any(view.slot is held for view in views)


def gather(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """The recipe of `x[index]` and `x.index_select(dim, index)`, whose index is saved."""
    x, by_dim = call.first, call.name == "index_select"
    dim = call.arg(1, "dim") if by_dim else 0
    index = call.arg(2, "index") if by_dim else call.arg(1, "index")
    if not isinstance(index, Tensor) or index.dtype is not torch.int64 or index.dim() != 1:
        return None
    held = identity.slot(index)
    if held is None or held.value is None:
        return None
    source = operand(x, call, identity) or spare(x, call, out, identity)
    if source is None:
        return None

    def combine(x: Tensor, index: Tensor, _: Tensor | None = None) -> Tensor:
        return x.index_select(dim, index) if by_dim else x[index]  # which counts from the end, too

    other = weakref.ref(held), Geometry.of(index)
    op = Op(lambda x, _: x, lambda x: x, other=other, combine=combine)
    recipe = Recipe.of(op, source, Geometry.of(x), out, identity.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def cast(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """x in another floating dtype."""
    x = call.first
    source = operand(x, call, identity)
    if source is None or not x.is_floating_point() or x.device != out.device:
        return None
    dtype = out.dtype
    op = Op(lambda x, _: x.to(dtype, copy=True), lambda x: x.to(dtype))  # x stays its holder's
    recipe = Recipe.of(op, source, Geometry.of(x), out, identity.slot(out))
    before = identity.origin(x)
    has_zeros = before is not None and before.has_zeros
    return None if recipe is None else Origin(call.name, has_zeros, recipe)
