"""Rows that are gathered when they are read: a sum over them never has them all at once.

    rows[e] = x[index[e]]        or factor[e] * x[index[e]]         [E, ...], x [N, ...]
    y[at[e]] += rows[e]          e in parts of 1 MiB of rows

The messages of a graph network, one for each of its edges, are the largest tensors of its step in
forward and in backward, and most are summed at once by the nodes that they go to. `gather_later`
returns a `Gathered` in their place. A sum reads it in parts, and the gradient that it gives to the
rows is a `Gathered`, too: rows of its own gradient, which are added to that of x in parts. Ops and
orders of sums are torch's own, and so are the bits of forward and backward. For all other readers
the rows are made as a whole, once. `without_rows` decides which it is.

Each op has its node, as in torch: the gradients of several readers are added up for the rows
themselves (which makes them) before they are added to that of x. So code that does not call torch
through Python is right, too; it reads a new copy of the rows each time. A `Gathered` holds x, and
raises RestoreError if x, the index or the factor was changed in place before the rows are read.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from elbowroom.errors import RestoreError

_Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_LEAST_NBYTES = 1 << 20  # of all rows: fewer are not worth it
_PART_NUMEL = 1 << 18  # of rows that are made at once
_FEWER = 2  # a factor has at most one element for so many of the rows
_DTYPES = (torch.float32, torch.float64)  # sums of others are rounded once, not in each part
_QUESTIONS = frozenset(
    (
        *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.stride, Tensor.is_contiguous),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.__len__),
        *(Tensor.get_device, Tensor.ndimension, Tensor.nelement),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda"),
                *("is_sparse", "is_leaf", "grad_fn", "nbytes", "itemsize"),
            )
        ),
    )
)


class _Handed(threading.local):
    """The rows whose sources are the arguments of the function of ours that runs next."""

    rows: "Gathered"


_handed = _Handed()


class Gathered(Tensor):
    """Rows of a tensor, perhaps times a factor, that do not exist yet."""

    _sources: tuple[Tensor, Tensor, Tensor | None]
    _versions: tuple[int, ...]
    _made: Tensor | None

    @classmethod
    def like(cls, x: Tensor, index: Tensor) -> Self:
        """Returns a tensor without memory or graph, in the shape of x[index]."""
        shape = (len(index), *x.shape[1:])
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=x.dtype, device=x.device)
        return made

    def made_of(self, x: Tensor, index: Tensor, factor: Tensor | None = None) -> Self:
        """Notes what the rows are gathered from; returns itself.

        index: [E], or [E, ...] as in `torch.gather`
        """
        self._sources, self._made = (x, index, factor), None
        self._versions = _versions(self._sources)
        return self

    @property
    def waits(self) -> bool:
        """True if the rows were not made as a whole yet."""
        return self._made is None

    @property
    def sources(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, index and factor. Raises RestoreError if any was changed since."""
        if _versions(self._sources) != self._versions:
            raise RestoreError(
                "rows of a tensor were to be gathered when they are read, and it was changed in "
                "place before that. Change it after they are read, or copy it first (x.clone())"
            )
        return self._sources

    def rows(self, part: slice = slice(None)) -> Tensor:
        """Returns a new copy of some of the rows, outside of the graph."""
        x, index, factor = self.sources
        with torch.no_grad():
            at = index[part]
            rows = x.index_select(0, at) if at.dim() == 1 else x.gather(0, at)
            return rows if factor is None else factor[part] * rows

    def whole(self, ask: Callable[..., Any]) -> Tensor:
        """Returns all rows as a plain tensor, which is made now if it was not before.

        ask: runs a torch function of the arguments (function, types, args, kwargs)
        """
        if self._made is None:
            x, index, factor = self.sources
            _handed.rows = self
            with torch.inference_mode(False), torch.enable_grad():
                if factor is None:
                    self._made = ask(index_select, (), (x, 0, index), {})
                else:
                    self._made = ask(scaled_rows, (), (x, index, factor), {})
        assert self._made is not None
        return self._made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        func, args, kwargs = without_rows(func, args, kwargs, _run)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map_only(Gathered, Gathered.rows, (args, kwargs or {}))
        return func(*args, **kwargs)


def may_wait(dim: Any, index: Any, x: Tensor) -> bool:
    """Returns whether x.index_select(dim, index) is large, and could be made in parts."""
    if dim not in (0, -x.dim()) or type(index) is not Tensor or index.dim() != 1 or x.dim() < 2:
        return False
    if x.dtype not in _DTYPES or not x.requires_grad or x.device.type != "cpu":
        return False
    nbytes = len(index) * x.shape[1:].numel() * x.itemsize
    return index.device == x.device and nbytes >= max(_LEAST_NBYTES, x.nbytes)


def without_rows(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    ask: Callable[..., Any],
) -> _Call:
    """Returns a call that gives the same, and has no `Gathered` among its arguments.

    A question about the rows stays as it is. ask: as in `Gathered.whole`.
    """
    kwargs = kwargs or {}
    if func in _QUESTIONS:
        return func, args, kwargs
    known = _IN_PARTS.get(func)
    if known is not None and known[0](*args, **kwargs):
        return known[1](func, *args, **kwargs)
    args, kwargs = tree_map_only(Gathered, lambda one: one.whole(ask), (args, kwargs))
    return func, args, kwargs


def _run(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _versions(tensors: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    return tuple(-1 if x is None or x.is_inference() else x._version for x in tensors)


# ----------------------------------------------- functions that run in place of torch's, with nodes


def gather_later(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Computes torch.index_select of arguments that pass `may_wait`, when its rows are read."""
    rows: Gathered = _GatherRows.apply(input, index)  # type: ignore[no-untyped-call]
    return rows.made_of(input, index)


def scale_rows(x: Tensor, index: Tensor, factor: Tensor) -> Tensor:
    """Computes factor * x[index] of the handed rows, when they are read."""
    rows: Gathered = _ScaleRows.apply(_handed.rows, x, index, factor)  # type: ignore[no-untyped-call]
    return rows.made_of(x, index, factor)


def sum_rows_(input: Tensor, x: Tensor, index: Tensor, factor: Tensor | None, at: Tensor) -> Tensor:
    """Adds the handed rows to the input at these places, in parts, and returns it."""
    made: Tensor = _SumOfRows.apply(input, _handed.rows, at)  # type: ignore[no-untyped-call]
    return made


def sum_rows(input: Tensor, x: Tensor, index: Tensor, factor: Tensor | None, at: Tensor) -> Tensor:
    """Computes `sum_rows_` of a copy of the input."""
    rows, input = _handed.rows, input.clone()
    made: Tensor = _SumOfRows.apply(input, rows, at)  # type: ignore[no-untyped-call]
    return made


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Makes the handed rows as a whole; the arguments are those of torch.index_select."""
    made: Tensor = _WholeRows.apply(_handed.rows)  # type: ignore[no-untyped-call]
    return made


def scaled_rows(x: Tensor, index: Tensor, factor: Tensor) -> Tensor:
    """Makes the handed rows as a whole, which are factor * x[index]."""
    made: Tensor = _WholeRows.apply(_handed.rows)  # type: ignore[no-untyped-call]
    return made


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Gathered:
        ctx.save_for_backward(index)
        ctx.shape, ctx.workspace_nbytes = x.shape, 3 * _PART_NUMEL * x.itemsize
        return Gathered.like(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (index,) = grads, ctx.saved_tensors
        made = torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device)
        if _is_in_parts(grad):
            for part in _parts(index, ctx.shape):
                made.index_add_(0, index[part], grad.rows(part))
            return made, None
        return made.index_add(0, index, grad), None


class _ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, x: Tensor, index: Tensor, factor: Tensor) -> Gathered:
        ctx.save_for_backward(x if factor.requires_grad else None, index, factor)
        ctx.workspace_nbytes = 3 * _PART_NUMEL * x.itemsize
        return Gathered.like(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, index, factor) = grads, ctx.saved_tensors
        of_factor: Tensor | None = None
        if not _is_in_parts(grad):
            if x is not None:
                of_factor = (grad * x.index_select(0, index)).sum_to_size(factor.shape)
            return grad * factor, None, None, of_factor
        if x is not None:
            of_factor = torch.empty_like(factor)
            for part in _parts(index, x.shape):
                own = grad.rows(part) * x.index_select(0, index[part])
                of_factor[part] = own.sum_to_size(factor[part].shape)
        summed, at, _ = grad.sources
        of_rows = Gathered.like(summed, at).made_of(summed, at, factor)
        return of_rows, None, None, of_factor


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, into: Tensor, rows: Gathered, at: Tensor) -> Tensor:
        add = into.scatter_add_ if at.dim() > 1 else into.index_add_
        for part in _parts(at, rows.shape):
            add(0, at[part], rows.rows(part))
        ctx.mark_dirty(into)
        ctx.save_for_backward(at)
        return into

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (at,) = grads, ctx.saved_tensors
        if torch.is_grad_enabled() or type(grad) is not Tensor:
            of_rows = grad.gather(0, at) if at.dim() > 1 else grad.index_select(0, at)
        else:
            of_rows = Gathered.like(grad, at).made_of(grad, at)
        return grad, of_rows, None


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Gathered) -> Tensor:
        return rows.rows()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _is_in_parts(grad: Tensor) -> TypeGuard[Gathered]:
    """Returns whether a gradient is that of a sum over rows alone, and is read in parts."""
    return type(grad) is Gathered and grad.waits and not torch.is_grad_enabled()


def _parts(index: Tensor, of: torch.Size) -> Iterator[slice]:
    """The places of an index into a tensor of this shape, a few at a time."""
    rows = max(_PART_NUMEL // max(of[1:].numel(), 1), 1)
    return (slice(start, start + rows) for start in range(0, len(index), rows))


# ------------------------------------------------------------- functions that do not need all rows


def _is_shape_of(x: Any, rows: Any) -> bool:
    return type(x) is Tensor and type(rows) is Gathered


def _expand_as(func: Any, x: Tensor, rows: Tensor) -> _Call:
    return Tensor.expand, (x, rows.shape), {}


def _is_kind_of(rows: Any, *_: Any, **__: Any) -> bool:
    return type(rows) is Gathered


def _new(func: Any, rows: Tensor, *args: Any, **kwargs: Any) -> _Call:
    return func, (torch.empty(0, dtype=rows.dtype, device=rows.device), *args), kwargs


def _is_scaled(*args: Any, **kwargs: Any) -> bool:
    """Returns whether rows that wait are multiplied by a smaller factor of their own."""
    if len(args) != 2 or kwargs:
        return False
    rows, factor = args if type(args[0]) is Gathered else args[::-1]
    if type(rows) is not Gathered or type(factor) is not Tensor or not rows.waits:
        return False
    if rows.sources[2] is not None or factor.dtype is not rows.dtype:
        return False
    if factor.dim() != rows.dim() or _FEWER * factor.numel() > rows.numel():
        return False
    pairs = zip(factor.shape[1:], rows.shape[1:], strict=True)
    alike = len(factor) == len(rows) and all(one in (1, other) for one, other in pairs)
    return alike and factor.is_contiguous() and factor.device == rows.device


def _scaled(func: Any, *args: Tensor) -> _Call:
    rows, factor = args if type(args[0]) is Gathered else args[::-1]
    assert type(rows) is Gathered
    x, index, _ = rows.sources
    _handed.rows = rows
    return scale_rows, (x, index, factor), {}


def _is_summed(
    into: Any, dim: Any = None, index: Any = None, rows: Any = None, **kwargs: Any
) -> bool:
    """Returns whether rows that wait are summed over, by torch.scatter_add or index_add."""
    rows = kwargs.pop("src", kwargs.pop("source", rows))
    if kwargs or type(rows) is not Gathered or not rows.waits or type(into) is not Tensor:
        return False
    if dim not in (0, -rows.dim()) or type(index) is not Tensor or not index.dim():
        return False
    if into.dtype is not rows.dtype or into.device != rows.device or index.device != rows.device:
        return False
    if into.shape[1:] != rows.shape[1:] or index.shape not in (rows.shape, rows.shape[:1]):
        return False
    # Autograd has rules of its own for leaves and views that are changed in place.
    return not (into._is_view() or (into.is_leaf and into.requires_grad))


def _summed(func: Any, into: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> _Call:
    (rows,) = (*args, *kwargs.values())
    _handed.rows = rows
    run = sum_rows_ if func.__name__.endswith("_") else sum_rows
    return run, (into, *rows.sources, index), {}


_IN_PARTS: dict[Callable[..., Any], tuple[Callable[..., bool], Callable[..., _Call]]] = {
    Tensor.expand_as: (_is_shape_of, _expand_as),
    **dict.fromkeys(
        (Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full), (_is_kind_of, _new)
    ),
    **dict.fromkeys(
        (torch.mul, Tensor.mul, torch.multiply, Tensor.multiply), (_is_scaled, _scaled)
    ),
    **dict.fromkeys(
        (
            *(torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_),
            *(torch.index_add, Tensor.index_add, Tensor.index_add_),
        ),
        (_is_summed, _summed),
    ),
}
