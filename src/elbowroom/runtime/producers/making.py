"""Functions from which producers of all families build their recipes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.handles.rebuild import Op, Recipe
from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.slot import Geometry, View, same_order
from elbowroom.runtime.sources import Source, Sources
from elbowroom.runtime.storage import Origin

VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
REORDERED = (*VIEWS, "TransposeBackward0", "PermuteBackward0", "TBackward0")


def origin_of(
    call: Call,
    out: Tensor,
    sources: Sources,
    op: Op | None,
    *,
    has_zeros: bool = False,
    source: Source | None = None,
) -> Origin:
    """The origin of `out`, with a recipe if there are an op and a source to recompute it from.

    source: of the op's first argument; None: what is known of it
    """
    recipe = None
    if op is not None:
        found = call.source(sources) if source is None else (source, Geometry.of(call.first))
        source, seen = found
        if source is not None:
            recipe = Recipe.of(in_order(op, seen, out), source, seen, out, sources.slot(out))
    return Origin(call.name, has_zeros, recipe)


def in_order(op: Op, seen: Geometry, out: Tensor) -> Op:
    """Returns the op without its lossy form if the output lies in another order than the input.

    Only a lossy form that goes by memory order is dropped.
    """
    if op.affine is None or same_order(seen.shape, seen.stride, out.stride()):
        return op
    bound = op.bound
    none = {"affine": None, "of_normal": None}
    again = None if bound is None else lambda *given: bound(*given).changed(**none)
    return op.changed(**none, bound=again)


def view_of(saved: Any) -> View | None:
    """The view that a node holds under one of its names; None for a parameter, or for nothing."""
    packed = getattr(saved, "data", None)
    held = packed.held if isinstance(packed, Deferred) else packed
    return held if isinstance(held, View) else None


def of_statistics(bound: Callable[..., Op], *given: Tensor) -> Op:
    """An op that reads statistics of this forward."""
    return bound(*given).changed(given=given, bound=bound)


def as_now(parameter: Tensor | None) -> Tensor | None:
    """A parameter's current memory: `p.data = other` before backward does not affect it."""
    return None if parameter is None else parameter.detach()


def present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors without None."""
    return tuple(tensor for tensor in tensors if tensor is not None)
