"""Rows that functions make of other rows, part by part: the messages of a graph network.

    rows = f(x[index], h[other], factor, ...)    f works on each row alone: relu, +, *, sum(-1)

Rows that wait (`gathered.py`) may go through such functions without being made. What comes out
waits, too, as an expression of the tensors that are there (`Computed`). Where it has far fewer
elements than its rows, it is made in parts, at once. Its gradient is an expression as well
(`RowGradient`): autograd runs f again with a part of the rows. So all bits are those of torch's own
ops, and an edge of the graph takes memory only while its part is made.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from elbowroom.runtime.gathered import Gathered, here, is_in_parts, wait_for
from elbowroom.runtime.node import itself
from elbowroom.runtime.row_sources import (
    GradientSum,
    RowSources,
    assembled,
    check_versions,
    part_nbytes,
    versions_of,
)

_NOTHING = torch.empty(0)
_MAX_FUNCTIONS = 12  # of an expression, each of which runs again for each reader of its result
_FEWER = 2  # times fewer elements than the rows: what is made of them is made at once
_PAIRS = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide")
_ONES = ("relu", "sigmoid", "tanh", "exp", "neg", "negative", "square", "abs", "log", "sqrt")
_ACTIVATIONS = ("relu", "leaky_relu", "elu", "silu", "gelu", "softplus", "sigmoid", "tanh")
_REVERSED = ("__radd__", "__rsub__", "__rmul__", "__rtruediv__", "__rdiv__")
_JOINS = frozenset((torch.cat, torch.concat, torch.concatenate))
_SUMS = frozenset((torch.sum, Tensor.sum, torch.mean, Tensor.mean))
_SUMS_OF_TWO = frozenset((torch.add, Tensor.add))
_PRODUCTS = frozenset((torch.mul, Tensor.mul, torch.multiply, Tensor.multiply))
# Kernels for the last elements of a thread's share round in another way than those of vectors do.
_VECTORIZED = frozenset(
    (
        *(torch.sigmoid, Tensor.sigmoid, F.sigmoid),
        *(getattr(F, name) for name in ("silu", "elu", "gelu", "softplus")),
    )
)
# Functions whose gradient needs no value.
_LINEAR = _SUMS_OF_TWO | {torch.sub, Tensor.sub, torch.subtract, Tensor.subtract}
FUNCTIONS = frozenset(
    (
        *(*_SUMS, *_JOINS),
        *(getattr(of, name) for of in (torch, Tensor) for name in (*_PAIRS, *_ONES)),
        *(getattr(Tensor, name) for name in _REVERSED if hasattr(Tensor, name)),
        *(getattr(F, name) for name in _ACTIVATIONS),
    )
)


class Each(NamedTuple):
    """Argument of a function: a tensor with one row for each row."""

    x: Tensor


class All(NamedTuple):
    """Argument of a function: a tensor that all rows share."""

    x: Tensor


Argument: TypeAlias = Any  # Rows | Each | All, or a constant


@dataclass(frozen=True, eq=False)
class Computed:
    """Rows that a function makes of its arguments.

    versions  those of the tensors that the arguments are made of, as they were then
    """

    function: Callable[..., Tensor]
    args: tuple[Argument, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that the rows are made of."""
        return tuple(x for one in self.args for x in _tensors(one))

    @property
    def functions(self) -> int:
        """How many functions run for a part of the rows."""
        return 1 + sum(getattr(one, "functions", 0) for one in self.args)

    def check(self) -> None:
        """Raises RestoreError if a source was changed in place since."""
        check_versions(self.tensors, self.versions)

    def part(self, part: slice = slice(None)) -> Tensor:
        """Returns some of the rows, outside of the graph; raises RestoreError as `check` does."""
        self.check()
        with torch.inference_mode(False), torch.no_grad():
            return self.function(*self.values(part), **self.kwargs)

    def values(self, part: slice) -> list[Any]:
        """Returns the arguments of the function for these rows."""
        return [_part_of(one, part) for one in self.args]

    def of(self, tensors: Iterator[Tensor]) -> "Computed":
        """Returns the same of other tensors, such as those that backward restores."""
        args = tuple(_of_others(one, tensors) for one in self.args)
        new = replace(self, args=args)
        return replace(new, versions=versions_of(*new.tensors))

    def with_graph(self) -> Tensor:
        """Returns all rows, with a graph, to differentiate a gradient."""
        return self.function(*map(_with_graph, self.args), **self.kwargs)


@dataclass(frozen=True, eq=False)
class RowGradient:
    """The gradient of an argument of `of`, from that of its result."""

    of_rows: Computed
    number: int
    grad: Argument  # Rows | Each

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it is made of."""
        return (*self.of_rows.tensors, *_tensors(self.grad))

    @property
    def functions(self) -> int:
        """How many functions run for a part of it."""
        return 2 * self.of_rows.functions + getattr(self.grad, "functions", 0)

    def check(self) -> None:
        """Raises RestoreError if a source was changed in place since."""
        self.of_rows.check()
        if not isinstance(self.grad, Each):
            self.grad.check()

    def part(self, part: slice = slice(None)) -> Tensor:
        """Returns a part of it, outside of the graph; raises RestoreError as `check` does."""
        self.of_rows.check()
        with torch.inference_mode(False), torch.enable_grad(), _unpacked():
            values = [
                one.detach() if isinstance(one, Tensor) else one
                for one in self.of_rows.values(part)
            ]
            wanted = values[self.number].requires_grad_()
            made = self.of_rows.function(*values, **self.of_rows.kwargs)
            grad = _part_of(self.grad, part)
            (found,) = torch.autograd.grad(made, wanted, grad)
        return found


ROWS = (RowSources, GradientSum, Computed, RowGradient)


def gradient_of(computed: Computed, number: int, shape: torch.Size, grad: Tensor) -> Argument:
    """Returns the gradient of an argument of this shape, where the result has this gradient."""
    known = grad.sources if is_in_parts(grad) else Each(_plain(grad))
    if shape == grad.shape and not computed.kwargs and len(computed.args) == 2:
        if computed.function in _SUMS_OF_TWO:
            return known
        other = computed.args[1 - number]
        if computed.function in _PRODUCTS and not isinstance(other, All):
            args = (known, other)
            tensors = (x for one in args for x in _tensors(one))
            return Computed(torch.mul, args, {}, versions_of(*tensors))
    return RowGradient(computed, number, known)


def _unpacked() -> saved_tensors_hooks:
    """Returns a context in which nothing that is saved is given to hooks of others."""
    return saved_tensors_hooks(itself, itself)


def _tensors(one: Argument) -> tuple[Tensor, ...]:
    if isinstance(one, (Each, All)):
        return (one.x,)
    return one.tensors if isinstance(one, ROWS) else ()


def _part_of(one: Argument, part: slice) -> Any:
    if isinstance(one, ROWS):
        return one.part(part)
    if isinstance(one, Each):
        return one.x[part]
    return one.x if isinstance(one, All) else one


def _of_others(one: Argument, tensors: Iterator[Tensor]) -> Argument:
    if isinstance(one, (RowSources, Computed)):
        return one.of(tensors)
    return type(one)(next(tensors)) if isinstance(one, (Each, All)) else one


def _with_graph(one: Argument) -> Any:
    if isinstance(one, (RowSources, Computed)):
        return one.with_graph()
    return one.x if isinstance(one, (Each, All)) else one


# ---------------------------------------------------------------------------------- what may wait


def computes(reads: Callable[[Any], bool], func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Returns whether a function of FUNCTIONS works on each row of rows that wait, alone.

    reads: whether rows may be read in parts
    """
    if func in _JOINS:
        return _joins(reads, args, kwargs)
    given = [x for x in args if type(x) is Gathered]
    if not given or not all(map(reads, given)) or any(x is True for x in args):
        return False
    if torch._C._len_torch_dispatch_stack():  # a mode of the program sees each op
        return False
    if func in _VECTORIZED and torch.get_num_threads() > 1:
        return False
    rows = given[0]
    if any(x is True or isinstance(x, Tensor) for key, x in kwargs.items() if key != "keepdim"):
        return False
    if func in _SUMS and not _sums_within_rows(rows, args, kwargs):
        return False
    if sum(getattr(x.sources, "functions", 0) for x in given) >= _MAX_FUNCTIONS:
        return False
    return all(_argument(x, rows) is not None for x in args if isinstance(x, Tensor))


def _joins(reads: Callable[[Any], bool], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether rows that wait are joined, each with others."""
    dim = args[1] if len(args) == 2 else kwargs.get("dim")
    if not args or not isinstance(args[0], (tuple, list)) or type(dim) is not int:
        return False
    rows = next((x for x in args[0] if type(x) is Gathered), None)
    if rows is None or len(args) + len(kwargs) != 2 or not dim % rows.dim():
        return False
    return computes(reads, _joined, args[0], {}) and not any(
        isinstance(_argument(x, rows), All) for x in args[0]
    )


def _joined(*rows: Tensor, dim: int) -> Tensor:
    return torch.cat(rows, dim)


def _sums_within_rows(rows: Gathered, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = (dims,) if type(dims) is int else dims
    if not isinstance(dims, (tuple, list)) or not dims or "dtype" in kwargs or len(args) > 3:
        return False
    return all(type(dim) is int and dim % rows.dim() for dim in dims)


def _argument(x: Tensor, rows: Gathered) -> Argument | None:
    """Returns x as an argument of a function of rows; None: it is not of each row alone."""
    if type(x) is Gathered:
        alike = x.dim() == rows.dim() and len(x) == len(rows) and x.dtype is rows.dtype
        return x.sources if alike and x.device == rows.device else None
    if type(x) is not Tensor or x.device != rows.device or x.dim() > rows.dim():
        return None
    if x.dim() == rows.dim() and len(x) == len(rows) > 1:
        return Each(x) if x.dtype is rows.dtype else None
    if x.dim() and x.dtype is not rows.dtype and (x.is_floating_point() or x.is_complex()):
        return None  # which would give another dtype
    shares = x.dim() < rows.dim() or len(x) == 1
    # Its gradient would be a sum over all rows, whose order is torch's own.
    return All(x) if shares and not x.requires_grad else None


def compute(
    func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Has `apply_rows` compute a function that passes `computes`; returns it, and its arguments."""
    if func in _JOINS:
        dim = args[1] if len(args) == 2 else kwargs["dim"]
        func, args, kwargs = _joined, args[0], {"dim": dim}
    rows = next(x for x in args if type(x) is Gathered)
    made = tuple(_argument(x, rows) if isinstance(x, Tensor) else x for x in args)
    tensors = tuple(x for one in made for x in _tensors(one))
    here.call = Computed(func, made, dict(kwargs), versions_of(*tensors)), tuple(args)
    return apply_rows, tensors


def apply_rows(*tensors: Tensor) -> Tensor:
    """Computes the handed function of rows, when it is read; now, if it gives far fewer elements.

    tensors: all that its rows are made of
    """
    computed, args = here.taken_call()
    given = [x for x in args if isinstance(x, Tensor)]
    rows = next(x for x in given if type(x) is Gathered)
    sample = computed.part(slice(0, 1))
    shape = torch.Size((len(rows), *sample.shape[1:]))
    if _FEWER * shape.numel() <= rows.numel():
        made: Tensor = _Apply.apply(computed, shape, args, False, *given)  # type: ignore[no-untyped-call]
        return made
    return wait_for(_Apply.apply(computed, shape, args, True, *given), computed)  # type: ignore[no-untyped-call]


class _Apply(torch.autograd.Function):
    """A function of rows. It saves the tensors that its rows are made of."""

    @staticmethod
    def forward(
        ctx: Any, computed: Computed, shape: torch.Size, args: Any, waits: bool, *given: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        first, each = computed.tensors[0], set()
        if computed.function in _LINEAR:  # backward reads no more than their shapes
            each = {id(one.x) for one in computed.args if isinstance(one, Each)}
        ctx.shapes = [x.shape if id(x) in each else None for x in computed.tensors]
        ctx.save_for_backward(*(x for x in computed.tensors if id(x) not in each))
        ctx.computed = computed.of(repeat(_NOTHING))  # which backward restores
        ctx.given = [
            (at, x.shape, x.state.mark if type(x) is Gathered else None)
            for at, x in enumerate(args)
            if isinstance(x, Tensor)
        ]
        widest = next(x.shape for x in given if type(x) is Gathered)
        ctx.workspace_nbytes = 3 * part_nbytes(widest, first.itemsize)
        if waits:
            return Gathered.empty(shape, first)
        return assembled(computed, shape, widest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,), needs = grads, ctx.needs_input_grad[4:]
        if grad is None:
            return (None,) * (4 + len(needs))
        saved = iter(ctx.saved_tensors)
        tensors = [
            next(saved) if shape is None else grad.new_zeros(()).expand(shape)
            for shape in ctx.shapes
        ]
        computed = ctx.computed.of(iter(tensors))
        if torch.is_grad_enabled():
            return (None,) * 4 + _differentiable(computed, grad, ctx.given, needs)
        found: list[Tensor | None] = []
        for (number, shape, mark), is_needed in zip(ctx.given, needs, strict=True):
            if not is_needed:
                found.append(None)
                continue
            own = gradient_of(computed, number, shape, grad)
            if isinstance(own, Each):
                found.append(own.x)
            elif mark is None or mark.is_whole:
                found.append(assembled(own, shape, grad.shape))
            else:
                found.append(Gathered.empty(shape, tensors[0]).of(own))
        return (None,) * 4 + tuple(found)


def _differentiable(
    computed: Computed, grad: Tensor, given: list[Any], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Returns gradients with graphs of their own."""
    values = [_with_graph(one) for one in computed.args]
    numbers = [number for (number, *_), is_needed in zip(given, needs, strict=True) if is_needed]
    for number in numbers:
        if not values[number].requires_grad:
            values[number] = values[number].detach().requires_grad_()
    made = computed.function(*values, **computed.kwargs)
    wanted = [values[number] for number in numbers]
    found = iter(torch.autograd.grad(made, wanted, grad, create_graph=True))
    return tuple(next(found) if is_needed else None for is_needed in needs)


def _plain(grad: Tensor) -> Tensor:
    return grad.values() if type(grad) is Gathered else grad
