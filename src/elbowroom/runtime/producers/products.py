"""Recipes of arithmetic: functions of one tensor, sums and products of two, small matmuls."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.handles.rebuild import Op, Recipe
from elbowroom.runtime.identity import Identity, Origin, untouchable
from elbowroom.runtime.producers.making import VIEWS, is_held, operand, origin_of, spare, view_of
from elbowroom.runtime.slot import Geometry
from elbowroom.runtime.storage import storage_nbytes

_MUCH_LARGER = 4  # a result is at least so many times as large as a constant copied to remake it
_FEW = 256  # the most elements that a product may sum: the columns of an attention head
_CONTRACTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "BmmBackward0": torch.bmm,
    "MmBackward0": torch.mm,
}


def elementwise(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """A function of one tensor, and of numbers: from its input as anybody has saved it."""
    x, rest, named, func = call.first, call.args[1:], dict(call.kwargs), call.func
    named.pop("input", None)
    if any(isinstance(one, Tensor) for one in (*rest, *named.values())) or out.dtype != x.dtype:
        return None
    op = Op(lambda x, _: func(x, *rest, **named), lambda x: func(x, *rest, **named))
    return origin_of(call, out, identity, op)


def binary(
    combine: Callable[..., Tensor], call: Call, out: Tensor, identity: Identity
) -> Origin | None:
    """Returns a recipe of an op with two operands.

    One is saved or made again, the other is saved, a parameter or a number.
    """
    x, y = call.first, call.arg(1, "other")
    if not isinstance(y, Tensor):
        return elementwise(call, out, identity)
    named = {key: value for key, value in call.kwargs.items() if key not in ("input", "other")}

    def forward(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        return combine(x, y, out=out, **named)

    def backward(y: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        return combine(x, y, out=out, **named)

    run: Callable[..., Tensor] = forward
    is_there = type(x) is not nn.Parameter and is_held(y, identity)
    if not is_there and is_held(x, identity):
        x, y, run, is_there = y, x, backward, True
    if untouchable(x) or torch.result_type(x, y) is not out.dtype:
        return None
    source = operand(x, call, identity) or spare(x, call, out, identity)
    if source is None:
        return None
    held = identity.slot(y)
    if not is_there:
        if untouchable(y) or storage_nbytes(y) * _MUCH_LARGER > storage_nbytes(out):
            return None
        made_of = source.ready() if isinstance(source, Recipe) else source
        held = identity.constant(y, call.name) if made_of is not None and made_of.exact else None
        if held is None:
            return None
    if type(y) is nn.Parameter or held is None:
        factor = y.detach()
        op = Op(lambda x, _: run(x, factor), lambda x: run(x, factor), fixed=(factor,))
    else:  # `Ready` combines
        op = Op(lambda x, _: x, lambda x: x, other=(weakref.ref(held), Geometry.of(y)), combine=run)
    recipe = Recipe.of(op, source, Geometry.of(x), out, identity.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def contraction(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """The recipe of a matrix product from both of its operands, as its node has saved them.

    Only products that sum at most `_FEW` elements are made again: attention's logits, which cost
    little beside the memory they take. Only exact operands serve, because softmax turns an error in
    a logit into a factor.
    """
    node = out.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    run = None if node is None else _CONTRACTIONS.get(node.name())
    if run is None:
        return None
    x, y = (view_of(getattr(node, f"_raw_saved_{field}")) for field in ("self", "mat2"))
    if x is None or y is None or not x.slot.dtype is y.slot.dtype is out.dtype:
        return None
    if x.geometry.shape[-1] > _FEW or not (x.slot.exact and y.slot.exact):
        return None
    made = Geometry.of(out)

    def combine(x: Tensor, y: Tensor, _: Tensor | None = None) -> Tensor:
        return made.on(run(x, y))

    op = Op(lambda x, _: x, other=(weakref.ref(y.slot), y.geometry), combine=combine)
    recipe = Recipe.of(op, x.slot, x.geometry, out, identity.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def softmax(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """The recipe of a softmax, from an exact input: `elementwise` for a function of rows."""
    x, rest, named, func = call.first, call.args[1:], dict(call.kwargs), call.func
    named.pop("input", None)
    if out.dtype is not x.dtype and torch.is_autocast_enabled(x.device.type):
        return None
    return origin_of(call, out, identity, Op(lambda x, _: func(x, *rest, **named)))
