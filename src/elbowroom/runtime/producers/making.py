"""What recipes of all families are made by: where an op's operands are held, and its statistics."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.handles.rebuild import Expected, Op, Recipe, followed, same_order
from elbowroom.runtime.identity import Identity, Origin, untouchable
from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.slot import Geometry, Slot, View
from elbowroom.runtime.storage import storage_nbytes, version_of

Source: TypeAlias = Slot | Recipe | Expected
_EXPANDED = 8  # a result is at least so many times as large as a copy of what it is made of
VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
REORDERED = (*VIEWS, "TransposeBackward0", "PermuteBackward0", "TBackward0")


def source_of(call: Call, identity: Identity) -> tuple[Source | None, Geometry]:
    """Returns what the op can be run on again, and where in it the op's input lies.

    It is the input as the op saved it, the recipe of its input, what an earlier op saved, or what a
    later one may save.
    """
    x = call.first
    seen = Geometry.of(x)
    held = identity.slot(x) if version_of(x) == call.version else None
    if held is not None and held.value is not None and (held in call.saved or held.is_shared_now):
        return held, seen
    for slot in call.saved:  # a cast that autocast made
        if (
            slot.dtype is not x.dtype
            and slot.dtype.is_floating_point
            and slot.base.shape == seen.shape
            and torch.is_autocast_enabled(x.device.type)
        ):
            return slot, slot.base
    origin = identity.origin(x, call.version)
    if origin is not None and origin.recipe is not None:
        return _cheapest(origin.recipe, x, identity, call.version), seen
    if held is not None and held.value is not None:
        return held, seen
    return expected(x, identity, call.version), seen


def _cheapest(recipe: Recipe, x: Tensor, identity: Identity, version: int | None = None) -> Source:
    """Returns the recipe of x; if it costs much or is not ready, what an op saves comes first."""
    if not identity.is_exact or not (recipe.op.products or recipe.ready() is None):
        return recipe
    held = identity.slot(x) if version in (None, version_of(x)) else None
    if held is not None and held.value is not None:
        return held
    return identity.expected(x, version, recipe)


def expected(x: Tensor, identity: Identity, version: int | None = None) -> Expected | None:
    """Returns a link to what a later op may save of x, in contexts where that is worth it."""
    if not identity.is_exact or type(x) is nn.Parameter or untouchable(x):
        return None
    if version is not None and version_of(x) != version:
        return None  # the op has changed it in place
    return identity.expected(x, version)


def origin_of(
    call: Call, out: Tensor, identity: Identity, op: Op | None, *, has_zeros: bool = False
) -> Origin:
    """The origin of `out`, with a recipe if there is an op, and something to run it on again."""
    recipe = None
    if op is not None:
        source, seen = source_of(call, identity)
        if source is not None:
            recipe = Recipe.of(in_order(op, seen, out), source, seen, out, identity.slot(out))
    return Origin(call.name, has_zeros, recipe)


def in_order(op: Op, seen: Geometry, out: Tensor) -> Op:
    """Returns the op without its lossy form if the output lies in another order than the input.

    Only a lossy form that goes by memory order is dropped.
    """
    if op.affine is None or same_order(seen.shape, seen.stride, out.stride()):
        return op
    bound = op.bound
    again = None if bound is None else lambda *given: bound(*given).changed(affine=None)
    return op.changed(affine=None, bound=again)


def view_of(saved: Any) -> View | None:
    """The view that a node holds under one of its names; None for a parameter, or for nothing."""
    packed = getattr(saved, "data", None)
    held = packed.held if isinstance(packed, Deferred) else packed
    return held if isinstance(held, View) else None


def is_held(y: Tensor, identity: Identity) -> bool:
    """Returns whether y is held as a saved tensor, or is a parameter."""
    if type(y) is nn.Parameter:
        return True
    held = None if untouchable(y) else identity.slot(y)
    return held is not None and held.value is not None


def operand(x: Tensor, call: Call, identity: Identity) -> Source | None:
    """Returns what x can be made from: its slot, if this op saved it, else a recipe, or a slot."""
    held = identity.slot(x)
    if held is not None and held.value is None:
        held = None
    if held is not None and (held in call.saved or held.is_shared_now):
        return held
    origin = identity.origin(x)
    if origin is None or origin.recipe is None:
        return held
    return _cheapest(origin.recipe, x, identity)


def operand_or_spare(x: Tensor, call: Call, out: Tensor, identity: Identity) -> Source | None:
    """The same, or a copy of x, where nothing that is held by now could make x."""
    source = operand(x, call, identity)
    if isinstance(source, Slot) or (source is not None and followed(source) is not None):
        return source
    return spare(x, call, out, identity) or source


def spare(x: Tensor, call: Call, out: Tensor, identity: Identity) -> Slot | None:
    """A copy of x, which no op has saved: rows that are gathered many times, a bias of two parts.

    It takes no more than a code of the result would.
    """
    if untouchable(x) or storage_nbytes(x) * _EXPANDED > storage_nbytes(out):
        return None
    return identity.spare(x, call.name, out)


def of_statistics(bound: Callable[..., Op], *given: Tensor) -> Op:
    """An op that reads statistics of this forward."""
    return bound(*given).changed(given=given, bound=bound)


def as_now(parameter: Tensor | None) -> Tensor | None:
    """A parameter's memory of this moment: `p.data = other` before backward does not reach it."""
    return None if parameter is None else parameter.detach()


def present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Those of the tensors that are there."""
    return tuple(tensor for tensor in tensors if tensor is not None)
