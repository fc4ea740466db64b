"""Recipes of copies: in another order, in another dtype, of some rows."""

import weakref
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from elbowroom.runtime.computed_rows import Computed
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.gathered import here
from elbowroom.runtime.handles.rebuild import Op, Recipe
from elbowroom.runtime.producers.making import REORDERED, VIEWS, view_of
from elbowroom.runtime.row_sources import assembled
from elbowroom.runtime.slot import Geometry, KeepHandle, Slot
from elbowroom.runtime.sources import Source, Sources
from elbowroom.runtime.storage import Origin, WeakStorage, storage_nbytes, version_of

_MAX_RESHAPES = 4
_COPYING = (
    *VIEWS,
    *("CloneBackward0", "ExpandBackward0", "ReshapeAliasBackward0", "ToCopyBackward0"),
)


def moved(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of a copy in another order of what an op holds as its own result.

    Backward reads this result on the way from the copy, so changing it in place is an error in
    plain autograd, too; this does not apply to tensors that are held for another reader. And it
    costs a single pass: a source that is itself rebuilt would have to be rebuilt for the copy, too.
    """
    x, rest, named, func = call.first, call.args[1:], dict(call.kwargs), call.func
    named.pop("input", None)
    held, before = sources.slot(x), sources.origin(x, call.version)
    if held is None or version_of(x) != call.version or not _is_own_result(x, held):
        return None
    op = Op(lambda x: func(x, *rest, **named), any_size=True)
    recipe = Recipe.of(op, held, Geometry.of(x), out, sources.slot(out))
    has_zeros = before is not None and before.has_zeros
    return None if recipe is None else Origin(call.name, has_zeros, recipe)


def _is_own_result(x: Tensor, held: Slot) -> bool:
    """Returns whether x is a view of its op's own result, which that op has saved."""
    node = x.grad_fn
    while node is not None and node.name() in REORDERED:
        node = node.next_functions[0][0]
    saved = (getattr(node, f"_raw_saved_{field}", None) for field in ("result", "output"))
    views = (view for one in saved if (view := view_of(one)) is not None)
    return isinstance(held.value, KeepHandle) and any(view.slot is held for view in views)


def reordered(call: Call, copy: Tensor, sources: Sources) -> Origin | None:
    """The recipe of a contiguous copy of its input that an op has made, and saves.

    A linear layer that reads a transposed tensor makes one. Three layers that read the same tensor
    make three: the second and third are rebuilt from the first. In exact contexts.
    """
    x = call.first
    if not copy.is_contiguous() or copy.numel() * copy.element_size() != storage_nbytes(copy):
        return None
    if copy.numel() != x.numel() or sources.origin(copy) is not None:
        return None
    if version_of(x) != call.version or not is_copy(copy, x):
        return None
    shape, dtype, seen, slot = copy.shape, copy.dtype, Geometry.of(x), sources.slot(copy)
    key = _key(x, call.version, dtype)
    _, ref, first = sources.reordered.get(key, (None, None, None))
    before = None if ref is None else ref()

    def exact(x: Tensor) -> Tensor:
        return x.to(dtype).clone(memory_format=torch.contiguous_format).view(shape)

    source: Source | None
    if before is not None and before.value is not None and first is not None:
        source, seen, op = before, before.base, Op(exact, equal_ops=(first,), is_extra=True)
    else:
        source = sources.operand(x, call) or sources.expected(x, call.version)
        op = Op(exact, is_extra=True)
    recipe = None if source is None else Recipe.of(op, source, seen, copy, slot)
    if recipe is None:
        return None
    if source is not before and slot is not None:
        sources.reordered[key] = WeakStorage(x), weakref.ref(slot), recipe.op
    origin = Origin(call.name, recipe=recipe)
    sources.made(copy, origin)
    return origin


def reordered_slot(call: Call, dtype: torch.dtype, sources: Sources) -> Slot | None:
    """The slot of a copy in order that this or an earlier call has made of the call's input."""
    known = sources.reordered.get(_key(call.first, call.version, dtype))
    slot = None if known is None else known[1]()
    return None if slot is None or slot.value is None else slot


def _key(x: Tensor, version: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, version, x.dtype, Geometry.of(x), dtype


def is_copy(copy: Tensor, x: Tensor) -> bool:
    """Returns whether a clone of x, maybe cast, expanded and reshaped, is what `copy` is."""
    node, is_cloned = copy.grad_fn, False
    for _ in range(_MAX_RESHAPES):
        if node is None or not node.next_functions:
            return False
        is_cloned = is_cloned or node.name() == "CloneBackward0"
        if node.name() not in _COPYING:
            return False
        if is_cloned and node.next_functions[0] == (x.grad_fn, x.output_nr):
            return x.grad_fn is not None
        node = node.next_functions[0][0]
    return False


def gather(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of `x[index]` and `x.index_select(dim, index)`, whose index is saved."""
    x, by_dim = call.first, call.name == "index_select"
    dim = call.arg(1, "dim") if by_dim else 0
    index = call.arg(2, "index") if by_dim else call.arg(1, "index")
    if not isinstance(index, Tensor) or index.dtype is not torch.int64 or index.dim() != 1:
        return None
    held = sources.slot(index)
    if held is None or held.value is None:
        return None
    source = sources.operand_or_spare(x, call, out)
    if source is None:
        return None

    def combine(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
        return x.index_select(dim, index) if by_dim else x[index]  # which counts from the end, too

    other = weakref.ref(held), Geometry.of(index)
    op = Op(lambda x: x, lambda x: x, others=(other,), combine=combine, any_size=True)
    recipe = Recipe.of(op, source, Geometry.of(x), out, sources.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def computed(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of rows that functions have made of other rows (`computed_rows.py`)."""
    made, here.made = here.made, None
    if not isinstance(made, Computed):
        return None
    x, *rest = made.tensors
    held = [sources.slot(one) for one in rest]
    source = sources.operand_or_spare(x, call, out)
    if source is None or any(slot is None or slot.value is None for slot in held):
        return None
    shape, template = out.shape, made.of(repeat(x.new_empty(0)))

    def combine(*tensors: Tensor, out: Tensor | None = None) -> Tensor:
        return assembled(template.of(iter(tensors)), shape, shape)

    others = tuple(
        (weakref.ref(slot), Geometry.of(one))
        for slot, one in zip(held, rest, strict=True)
        if slot is not None
    )
    op = Op(lambda x: x, others=others, combine=combine)
    recipe = Recipe.of(op, source, Geometry.of(x), out, sources.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def cast(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """Returns the origin of a copy of x in another floating dtype."""
    x = call.first
    source = sources.operand(x, call)
    if source is None or not x.is_floating_point() or x.device != out.device:
        return None
    dtype = out.dtype
    # x stays its holder's
    op = Op(lambda x: x.to(dtype, copy=True), lambda x: x.to(dtype), any_size=True)
    recipe = Recipe.of(op, source, Geometry.of(x), out, sources.slot(out))
    before = sources.origin(x)
    has_zeros = before is not None and before.has_zeros
    return None if recipe is None else Origin(call.name, has_zeros, recipe)
