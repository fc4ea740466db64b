"""Tells which calls read gathered rows in parts, leave them waiting, or need them made first.

    index_select(x, 0, index)       rows that wait, if they are large
    factor * rows                   other rows that wait, if a row of the factor is smaller
    scatter_add, index_add          are added in parts
    shape, new_zeros, expand_as     ask for no values
    all others                      make the rows an ordinary tensor before they run

As long as rows wait, a call that may change x, the index or the factor in place makes them first.
Functions that are known to change nothing, or their first argument alone, are listed here; any
other function may change all that it is given. See `gathered.py`.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from elbowroom.errors import RestoreError
from elbowroom.runtime.computed_rows import FUNCTIONS, apply_rows, compute, computes
from elbowroom.runtime.extremes import EXTREMES, extremes_of_rows, extremes_of_rows_
from elbowroom.runtime.gathered import (
    QUESTIONS,
    Gathered,
    computed_rows,
    here,
    scale_rows,
    scaled_rows,
    sum_rows,
    sum_rows_,
    use_all,
)
from elbowroom.runtime.gathered import index_select as _made
from elbowroom.runtime.row_sources import RowSources

_Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_LEAST_NBYTES = 1 << 20  # of all rows: fewer are not worth it
_FEWER = 2  # a factor has at most one element for so many of the rows
_DTYPES = (torch.float32, torch.float64)  # sums of others are rounded once, not in each part
_INDICES = (torch.int64, torch.int32)
_SCATTERED = (torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_)
_REDUCED = (torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_)
_ADDED = (torch.index_add, Tensor.index_add, Tensor.index_add_)
# Names of our own functions, which read all rows.
SUMS_OF_ROWS = ("sum_rows", "sum_rows_", "extremes_of_rows", "extremes_of_rows_")
_PRODUCTS = (torch.mul, Tensor.mul, torch.multiply, Tensor.multiply)
_NEW = (Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full)
_PURE_NAMES = (
    *("view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "unsqueeze", "squeeze"),
    *("flatten", "unflatten", "select", "narrow", "t", "transpose", "permute", "movedim"),
    *("chunk", "split", "unbind", "__getitem__", "index_select", "gather", "detach", "clone"),
    *("contiguous", "to", "type_as", "float", "double", "long", "int", "cat", "stack"),
    *("max", "min", "amax", "amin", "sum", "mean", "add", "sub", "mul", "multiply", "div"),
    *("neg", "exp", "log", "relu", "sigmoid", "tanh", "softmax", "matmul", "mm", "bmm"),
    *("eq", "ne", "lt", "le", "gt", "ge", "item", "scatter_add", "index_add", "scatter_reduce"),
)
# They change no argument.
_PURE = frozenset(
    (
        *(getattr(of, name) for of in (torch, Tensor) for name in _PURE_NAMES if hasattr(of, name)),
        *(*QUESTIONS, *_NEW, F.linear, _made, scaled_rows, scale_rows, sum_rows),
        *(computed_rows, apply_rows, extremes_of_rows),
    )
)
# They change the first argument alone.
_ONLY_FIRST = frozenset(
    (
        *(Tensor.scatter_add_, Tensor.index_add_, Tensor.scatter_reduce_),
        *(sum_rows_, extremes_of_rows_),
    )
)


def may_wait(dim: Any, index: Any, x: Tensor) -> bool:
    """Returns whether x.index_select(dim, index) is large, and could be made in parts.

    It reads the index, as torch's op does: where that is out of range, torch's op raises.
    """
    if dim not in (0, -x.dim()) or type(index) is not Tensor or index.dim() != 1 or x.dim() < 2:
        return False
    if x.dtype not in _DTYPES or x.device.type != "cpu":
        return False
    nbytes = len(index) * x.shape[1:].numel() * x.itemsize
    if index.device != x.device or nbytes < max(_LEAST_NBYTES, x.nbytes):
        return False
    if torch.is_anomaly_enabled() or torch.are_deterministic_algorithms_enabled():
        return False
    _see_scripts()
    return _is_within(index, len(x))


@cache
def _see_scripts() -> None:
    """Lets TorchScript make rows that wait before it runs: no mode sees what it changes."""
    for cls in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        cls.__call__ = _after_rows(cls.__call__)  # type: ignore[method-assign]


def _after_rows(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def call_after_rows(*args: Any, **kwargs: Any) -> Any:
        end_waiting()
        return call(*args, **kwargs)

    return call_after_rows


def ready(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    ask: Callable[..., Any],
) -> _Call:
    """Makes the rows that a call needs; returns the call to run in its place.

    To be called where `here.alive` is not empty. ask: as in `Gathered.use`.
    """
    kwargs = kwargs or {}
    if func in QUESTIONS:
        return func, args, kwargs
    waiting = _waiting()
    if waiting:
        changed = _storages(_changed(func, args, kwargs))
        for rows in waiting if changed else ():
            if rows.waits and changed & _storages(rows.sources.tensors):
                rows.make(ask)
        del waiting[:]  # nothing but the program refers to them as they are read
        known = _IN_PARTS.get(func)
        if known is not None and known[0](*args, **kwargs):
            return known[1](func, *args, **kwargs)
        if func in FUNCTIONS and computes(_reads_in_parts, func, args, kwargs):
            return *compute(func, args, kwargs), {}
    use_all(args, kwargs, ask)
    return func, args, kwargs


def end_waiting() -> None:
    """Makes all rows of this thread that wait, before code runs that may not be seen.

    As a forward ends, for example: what they are gathered from, a weight for example, may change
    before they are read. What has changed already stays as it is, and raises if it is read.
    """
    if here.alive:
        with torch._C.DisableTorchFunction():  # no op of the model
            for rows in _waiting():
                with suppress(RestoreError), torch.enable_grad():
                    rows.make(lambda func, types, args, kwargs: func(*args, **kwargs))
        here.alive.clear()


def _waiting() -> list[Gathered]:
    """Returns the rows that wait, and forgets others."""
    alive = ((ref, ref()) for ref in here.alive)
    found = [(ref, rows) for ref, rows in alive if type(rows) is Gathered and rows.waits]
    here.alive[:] = [ref for ref, _ in found]
    return [rows for _, rows in found]


def _changed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a call may change in place, as far as is known."""
    if func in _PURE and "out" not in kwargs:
        return ()
    return args[:1] if func in _ONLY_FIRST and args else (args, kwargs)


def _storages(given: Any) -> set[int]:
    """Returns the addresses of the storages of all tensors that have one."""
    found = set()
    with torch._C.DisableTorchFunction():
        for x in tree_leaves(given):
            if isinstance(x, Tensor) and type(x) is not Gathered:
                with suppress(RuntimeError, NotImplementedError):  # sparse, for example
                    found.add(x.untyped_storage()._cdata)
    return found


def _is_within(index: Tensor, length: int) -> bool:
    """Returns whether an index of rows has no place that torch's ops would refuse."""
    if index.dtype not in _INDICES or not index.numel():
        return False
    with torch._C.DisableTorchFunction():
        for _ in range(1, index.dim()):
            index = index.select(-1, 0)
        least, most = index.aminmax()
        return int(least) >= 0 and int(most) < length


def _is_shape_of(x: Any, rows: Any = None, **_: Any) -> bool:
    return type(x) is Tensor and type(rows) is Gathered


def _expand_as(func: Any, x: Tensor, rows: Tensor) -> _Call:
    return Tensor.expand, (x, rows.shape), {}


def _is_kind_of(rows: Any = None, *_: Any, **__: Any) -> bool:
    return type(rows) is Gathered


def _new(func: Any, rows: Tensor, *args: Any, **kwargs: Any) -> _Call:
    return func, (torch.empty(0, dtype=rows.dtype, device=rows.device), *args), kwargs


def _reads_in_parts(rows: Any) -> bool:
    """Returns whether rows wait, and nobody else would see what a node of ours saves."""
    return type(rows) is Gathered and rows.waits and rows.is_in_place and torch.is_grad_enabled()


def _is_scaled(*args: Any, **kwargs: Any) -> bool:
    """Returns whether rows that wait are multiplied by a smaller factor of their own."""
    if len(args) != 2 or kwargs:
        return False
    rows, factor = args if type(args[0]) is Gathered else args[::-1]
    if type(factor) is not Tensor or not _reads_in_parts(rows):
        return False
    known = rows.sources
    if not isinstance(known, RowSources) or known.factor is not None:
        return False
    if factor.dtype is not rows.dtype:
        return False
    if factor.dim() != rows.dim() or _FEWER * factor.numel() > rows.numel():
        return False
    pairs = zip(factor.shape[1:], rows.shape[1:], strict=True)
    alike = len(factor) == len(rows) and all(one in (1, other) for one, other in pairs)
    return alike and factor.is_contiguous() and factor.device == rows.device


def _scaled(func: Any, *args: Tensor) -> _Call:
    rows, factor = args if type(args[0]) is Gathered else args[::-1]
    assert type(rows) is Gathered
    here.rows = rows
    return scale_rows, (*rows.sources.tensors, factor), {}


def _is_scattered(
    into: Any = None, dim: Any = None, index: Any = None, src: Any = None, **kwargs: Any
) -> bool:
    """Returns whether rows that wait are summed over, by torch.scatter_add."""
    alike = isinstance(index, Tensor) and type(src) is Gathered and index.shape == src.shape
    # Not by an index of each element.
    return alike and not any(index.stride()[1:]) and _is_summed(into, dim, index, src, **kwargs)


def _is_added(
    into: Any = None, dim: Any = None, index: Any = None, source: Any = None, **kwargs: Any
) -> bool:
    """Returns whether rows that wait are summed over, by torch.index_add."""
    alike = isinstance(index, Tensor) and type(source) is Gathered and index.dim() == 1
    return alike and len(index) == len(source) and _is_summed(into, dim, index, source, **kwargs)


def _is_reduced(
    into: Any = None, dim: Any = None, index: Any = None, src: Any = None, *rest: Any, **kwargs: Any
) -> bool:
    """Returns whether an extreme of rows that wait is taken, by torch.scatter_reduce."""
    named = dict(kwargs)
    include_self = named.pop("include_self", True)
    kind = rest[0] if len(rest) == 1 else named.pop("reduce", None)
    if len(rest) > 1 or kind not in EXTREMES or type(include_self) is not bool:
        return False
    return _is_scattered(into, dim, index, src, **named)


def _extreme(
    func: Any, into: Tensor, dim: int, index: Tensor, src: Gathered, *rest: str, **kwargs: Any
) -> _Call:
    here.rows = src
    run = extremes_of_rows_ if func.__name__.endswith("_") else extremes_of_rows
    kind = rest[0] if rest else kwargs["reduce"]
    return run, (into, index, kind, kwargs.get("include_self", True), *src.sources.tensors), {}


def _is_summed(into: Any, dim: Any, index: Tensor, rows: Gathered, **kwargs: Any) -> bool:
    if kwargs or type(into) is not Tensor or not _reads_in_parts(rows):
        return False
    if dim not in (0, -rows.dim()) or type(index) is not Tensor:
        return False
    if into.dtype is not rows.dtype or into.device != rows.device or index.device != rows.device:
        return False
    if into.shape[1:] != rows.shape[1:]:
        return False
    # Autograd has rules of its own for leaves and views that are changed in place.
    if into._is_view() or (into.is_leaf and into.requires_grad) or into.is_inference():
        return False
    return _is_within(index, len(into))


def _summed(func: Any, into: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> _Call:
    (rows,) = (*args, *kwargs.values())
    here.rows = rows
    run = sum_rows_ if func.__name__.endswith("_") else sum_rows
    return run, (into, index, *rows.sources.tensors), {}


_IN_PARTS: dict[Callable[..., Any], tuple[Callable[..., bool], Callable[..., _Call]]] = {
    Tensor.expand_as: (_is_shape_of, _expand_as),
    **dict.fromkeys(_NEW, (_is_kind_of, _new)),
    **dict.fromkeys(_PRODUCTS, (_is_scaled, _scaled)),
    **dict.fromkeys(_SCATTERED, (_is_scattered, _summed)),
    **dict.fromkeys(_ADDED, (_is_added, _summed)),
    **dict.fromkeys(_REDUCED, (_is_reduced, _extreme)),
}
