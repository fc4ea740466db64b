"""Rows that are gathered when they are read: a sum over them never has them all at once.

    rows[e] = x[index[e]]        or factor[e] * x[index[e]]         [E, ...], x [N, ...]
    y[at[e]] += rows[e]          e in parts of 1 MiB of rows

The messages of a graph network, one for each of its edges, are the largest tensors of its step in
forward and in backward, and most are summed at once by the nodes that they go to. `gather_later`
returns a `Gathered` in their place. A sum reads it in parts, and the gradient that it gives to the
rows is a `Gathered`, too: rows of its own gradient, which are added to that of x in parts. Ops and
orders of sums are torch's own, and so are the bits of forward and backward (`waiting.py` decides
which calls read in parts).

1. For all other readers the rows `become` an ordinary tensor before the call: the same Python
   object, a plain torch.Tensor then, with its hooks, its attributes and its place in the graph. The
   node that gives the rows (`_GiveRows`) has saved its own result, and gives it back with its edge.
2. Code that does not call torch through Python, another thread, or the forward of an autograd
   function gets the values through `__torch_dispatch__`, as with any wrapper of a tensor.
3. A sum gives the rows a gradient without memory only if nobody could look at it: the rows are
   gone, and were never used in another way than by sums, and backward is not differentiated.
4. x, the index and the factor are held as they were: what may change them in place makes the rows
   first. What changes them unseen is found by their versions, and raises RestoreError; a numpy
   array that shares their memory has none.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from elbowroom.errors import RestoreError
from elbowroom.runtime.row_sources import (
    GradientSum,
    RowSources,
    WaitingRows,
    assembled,
    part_nbytes,
    parts,
    sources_of,
)

_lock = threading.RLock()  # two threads may read the same rows


@dataclass(eq=False)
class RowsUse:
    """Knowledge that nodes share of rows: of those that they gave or have read.

    ref    the rows, unless nothing refers to them any more
    used   whether they were used in another way than by sums, or by somebody who looks at gradients
    """

    ref: Callable[[], Tensor | None] = lambda: None
    used: bool = False

    @property
    def is_whole(self) -> bool:
        """True if somebody may look at the gradient of the rows."""
        return self.used or self.ref() is not None or torch.is_anomaly_enabled()


@dataclass(eq=False)
class _WaitingState:
    """sources: None once all rows were made. hooks: those of saved tensors, at the gather."""

    sources: WaitingRows | None
    mark: RowsUse
    hooks: Any = None
    values: Tensor | None = None


class Gathered(Tensor):
    """Rows of a tensor, perhaps times a factor, that do not exist yet."""

    _state: _WaitingState | None

    @classmethod
    def like(cls, x: Tensor, index: Tensor) -> Self:
        """Returns a tensor without memory or graph, in the shape of x[index]."""
        return cls.empty((len(index), *x.shape[1:]), x)

    @classmethod
    def empty(cls, shape: Sequence[int], x: Tensor) -> Self:
        """Returns a tensor without memory or graph, of this shape, and of the dtype of x."""
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=x.dtype, device=x.device)
        made._state = None
        return made

    def of(self, sources: WaitingRows, mark: RowsUse | None = None) -> Self:
        """Notes what the rows are made of. Returns itself."""
        mark = mark or RowsUse()
        mark.ref = weakref.ref(self)
        self._state = _WaitingState(sources, mark, _innermost_hooks(True))
        return self

    @property
    def waits(self) -> bool:
        """True if the rows were not made yet."""
        return self.state.values is None

    @property
    def state(self) -> _WaitingState:
        """What is known of them."""
        assert self._state is not None
        return self._state

    @property
    def sources(self) -> WaitingRows:
        """What they are made of, as long as they wait."""
        found = self.state.sources
        assert found is not None
        return found

    @property
    def is_in_place(self) -> bool:
        """True if the hooks of saved tensors are those of the gather."""
        return bool(self.state.hooks == _innermost_hooks(True))

    def values(self) -> Tensor:
        """Returns all rows as a plain tensor outside of the graph, which is made once."""
        with _lock:
            state = self.state
            state.mark.used = True
            if state.values is None:
                with torch._C.DisableTorchFunction(), _unseen():
                    state.values = assembled(self.sources, self.shape, self.shape)
                state.sources = None
            return state.values

    def use(self, ask: Callable[..., Any]) -> None:
        """Makes an ordinary tensor of the rows, where autograd allows it, before they are used.

        ask: runs a torch function of the arguments (function, types, args, kwargs)
        """
        state = self.state
        state.mark.used = True
        if not torch.is_grad_enabled():  # the forward of an autograd function may hold them
            return
        if state.sources is None:
            self.become()
            return
        here.rows = self
        if not isinstance(state.sources, RowSources):
            ask(computed_rows, (), state.sources.tensors, {})
        elif state.sources.factor is None:
            ask(index_select, (), (state.sources.x, 0, state.sources.at), {})
        else:
            ask(scaled_rows, (), state.sources.tensors, {})

    def make(self, ask: Callable[..., Any]) -> None:
        """Makes the rows, if not an ordinary tensor of them; ask: as in `use`."""
        self.use(ask)
        if type(self) is Gathered:
            self.values()

    def become(self) -> Tensor:
        """Becomes an ordinary tensor, and returns itself.

        Rows whose graph is gone stay a wrapper of their values, which is an ordinary tensor for
        everything but `type`.
        """
        with _lock, torch._C.DisableTorchFunction(), _unseen(), torch.inference_mode(False):
            if type(self) is not Gathered:  # another thread was faster
                return self
            values, state, version = self.values(), self.state, self._version
            if self.grad_fn is not None and not self.is_as_given:
                _give(self, state.mark, is_changed=True)  # a function has changed them in place
            node: Any = self.grad_fn
            try:
                if node is None:
                    plain = values.detach()
                else:
                    node.place.values = values
                    plain = node.saved_tensors[0]
                torch._C._swap_tensor_impl(self, plain)
            except RuntimeError:  # backward has freed the node, or C++ refers to the rows weakly
                return self
            finally:
                if node is not None:
                    node.place.values = None
            plain.__class__ = Gathered  # for C++ that still refers to it
            plain.__dict__["_state"] = state
            torch._C._autograd._unsafe_set_version_counter((self,), (version,))
            del self.__dict__["_state"]  # it is an attribute of the object, not of its class
            self.__class__ = Tensor  # type: ignore[assignment]
            return self

    @property
    def is_as_given(self) -> bool:
        """True if no function has changed the rows, or their graph, since they were given."""
        return getattr(self.grad_fn, "mark", None) is self.state.mark and not self._version

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Registers a hook, which gets a whole gradient; also where no torch function is seen."""
        self.state.mark.used = True
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def retain_grad(self) -> None:
        """Keeps the gradient, as a whole; likewise."""
        self.state.mark.used = True
        super().retain_grad()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in QUESTIONS:
            use_all(args, kwargs, _run)
            if getattr(func, "__name__", "") in _OUTSIDE:
                args, kwargs = tree_map_only(Gathered, _alike, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, kwargs = args[0] if args else None, kwargs or {}
        if func is torch.ops.aten.add.Tensor and _are_gradients(*args):
            one, other = args
            return cls.empty(one.shape, one).of(GradientSum(one.sources, other.sources))
        if type(first) is Gathered and first._state is None:  # a node of ours saves its own result
            assert func is torch.ops.aten.detach.default
            return Gathered.like(first, first)
        given = [x for x in tree_leaves((args, kwargs)) if type(x) is Gathered]
        shapes = [x.shape for x in given]
        made = tree_map_only(Gathered, Gathered.values, (args, kwargs))
        out = func(*made[0], **made[1])
        if func._schema.is_mutable:
            if any(x.values().shape != shape for x, shape in zip(given, shapes, strict=True)):
                raise RestoreError(
                    f"{func} changes the shape of gathered rows: copy them first (x.clone())"
                )
            changed = {id(x.values()): x for x in given}
            out = tree_map_only(Tensor, lambda one: changed.get(id(one), one), out)
        return out


class _Thread(threading.local):
    """Rows of the forward that this thread runs.

    rows   those whose sources are the arguments of the function of ours that runs next
    call   what that function is to compute of rows, and its arguments (`computed_rows.py`)
    made   what the rows are made of that were made last
    alive  all that may wait
    """

    def __init__(self) -> None:
        self.rows: Gathered | None = None
        self.made: WaitingRows | None = None
        self.call: tuple[Any, tuple[Any, ...]] | None = None
        self.alive: list[weakref.ref[Gathered]] = []

    def taken(self) -> Gathered:
        """Returns the rows, to which nothing refers from here any more."""
        rows, self.rows = self.rows, None
        assert rows is not None
        return rows

    def taken_call(self) -> tuple[Any, tuple[Any, ...]]:
        """Returns what is to be computed of rows; nothing refers to them from here any more."""
        call, self.call = self.call, None
        assert call is not None
        return call


here = _Thread()
_innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# These ask for no values.
QUESTIONS = frozenset(
    (
        *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.stride, Tensor.is_contiguous),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.__len__),
        *(Tensor.get_device, Tensor.ndimension, Tensor.nelement, Tensor.__hash__),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda"),
                *("is_sparse", "is_leaf", "nbytes", "itemsize"),
            )
        ),
    )
)
# These read memory in other ways than by ops.
_OUTSIDE = frozenset(
    (
        *("numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"),
        *("__dlpack_device__", "_typed_storage", "__reduce_ex__", "__deepcopy__", "is_shared"),
        *("__repr__", "__format__"),
    )
)


def _are_gradients(*args: Any) -> bool:
    """Returns whether two gradients of rows wait, which a running backward adds."""
    if len(args) != 2 or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    return all(type(x) is Gathered and x._state is not None and x.waits for x in args)


def use_all(args: tuple[Any, ...], kwargs: dict[str, Any], ask: Callable[..., Any]) -> None:
    """Makes ordinary tensors of all rows among the arguments of a call."""
    for rows in tree_leaves((args, kwargs)):
        if type(rows) is Gathered:
            rows.use(ask)


def _run(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _alike(rows: Gathered) -> Tensor:
    """Returns a plain tensor in the memory of the rows."""
    return rows.values().detach().requires_grad_(rows.requires_grad)


# ----------------------------------------------- functions that run in place of torch's, with nodes


def gather_later(input: Tensor, dim: int, index: Tensor) -> Gathered:
    """Computes torch.index_select of arguments that pass `waiting.may_wait`, when it is read."""
    rows = _GatherRows.apply(input, index)  # type: ignore[no-untyped-call]
    return wait_for(rows, sources_of(input, index))


def scale_rows(x: Tensor, index: Tensor, factor: Tensor) -> Gathered:
    """Computes factor * x[index] of the handed rows, when it is read."""
    given = here.taken()
    given.sources.check()
    rows = _ScaleRows.apply(given, x, index, factor, given.state.mark)  # type: ignore[no-untyped-call]
    return wait_for(rows, sources_of(x, index, factor))


def sum_rows_(input: Tensor, at: Tensor, *tensors: Tensor) -> Tensor:
    """Adds the handed rows to the input at these places, in parts, and returns it.

    tensors: what the rows are made of
    """
    rows = here.taken()
    made: Tensor = _SumOfRows.apply(input, rows, at, rows.state.mark)  # type: ignore[no-untyped-call]
    return made


def sum_rows(input: Tensor, at: Tensor, *tensors: Tensor) -> Tensor:
    """Computes `sum_rows_` of a copy of the input."""
    return sum_rows_(input.clone(), at, *tensors)


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Makes the handed rows; the arguments are those of torch.index_select."""
    return here.taken().become()


def scaled_rows(x: Tensor, index: Tensor, factor: Tensor) -> Tensor:
    """Makes the handed rows, which are factor * x[index]."""
    return here.taken().become()


def computed_rows(*tensors: Tensor) -> Tensor:
    """Makes the handed rows, which are computed of these."""
    rows = here.taken()
    here.made = rows.state.sources
    return rows.become()


def wait_for(rows: Tensor, sources: WaitingRows) -> Gathered:
    """Returns rows that wait, which the node of these gives, and that are made of the sources."""
    mark = RowsUse()
    waits = _give(rows, mark)
    here.alive.append(weakref.ref(waits))
    return waits.of(sources, mark)


def _give(rows: Tensor, mark: RowsUse, *, is_changed: bool = False) -> Gathered:
    """Returns rows whose node can give its result again; is_changed: the same ones."""
    place = _RowValues()
    with saved_tensors_hooks(lambda own: place, lambda place: place.given()), torch.enable_grad():
        given: Gathered = _GiveRows.apply(rows, mark, place, is_changed)  # type: ignore[no-untyped-call]
    return given


def _unseen() -> AbstractContextManager[Any]:
    """Returns a context in which dispatch modes of the program do not see what runs."""
    watched = torch._C._len_torch_dispatch_stack() > 0
    return _disable_current_modes() if watched else nullcontext()


class _RowValues:
    """Where the node that gives the rows finds their values, when it is asked for its result."""

    values: Tensor | None = None

    def given(self) -> Tensor:
        return torch.empty(0) if self.values is None else self.values


class _GiveRows(torch.autograd.Function):
    """Gives the rows. It has saved its own result, so that `become` gets one with its edge."""

    @staticmethod
    def forward(
        ctx: Any, rows: Gathered, mark: RowsUse, place: _RowValues, is_changed: bool
    ) -> Gathered:
        ctx.set_materialize_grads(False)
        ctx.mark, ctx.place = mark, place
        if is_changed:
            ctx.mark_dirty(rows)
        made = rows if is_changed else Gathered.like(rows, rows)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None


class _RowsBackward(_GiveRows._backward_cls):  # type: ignore[name-defined, misc]
    """The node that gives the rows: who adds a hook to it looks at their gradient."""

    mark: RowsUse

    def register_hook(self, *args: Any, **kwargs: Any) -> Any:
        self.mark.used = True
        return super().register_hook(*args, **kwargs)

    def register_prehook(self, *args: Any, **kwargs: Any) -> Any:
        self.mark.used = True
        return super().register_prehook(*args, **kwargs)


_GiveRows._backward_cls = _RowsBackward


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Gathered:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        made, ctx.shape = Gathered.like(x, index), x.shape
        ctx.workspace_nbytes = 2 * part_nbytes(made.shape, x.itemsize)  # gathered, and scaled
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,), (index,) = grads, ctx.saved_tensors
        if grad is None:
            return None, None
        made = torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device)
        if is_in_parts(grad):
            for part in parts(index, ctx.shape):
                made.index_add_(0, index[part], grad.sources.part(part))
            return made, None
        return made.index_add(0, index, grad), None


class _ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Gathered, x: Tensor, index: Tensor, factor: Tensor, mark: RowsUse
    ) -> Gathered:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if factor.requires_grad else None, index, factor)
        made, ctx.mark = Gathered.like(x, index), mark
        ctx.workspace_nbytes = 3 * part_nbytes(made.shape, x.itemsize)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,), (x, index, factor) = grads, ctx.saved_tensors
        of_rows: Tensor | None = None
        of_factor: Tensor | None = None
        if grad is None:
            return (None,) * 5
        if is_in_parts(grad):
            if x is not None:
                of_factor = torch.empty_like(factor)
                for part in parts(index, x.shape):
                    own = grad.sources.part(part) * x.index_select(0, index[part])
                    of_factor[part] = own.sum_to_size(factor[part].shape)
            known = grad.sources
            if not ctx.mark.is_whole and isinstance(known, RowSources) and known.factor is None:
                known.check()
                of_rows = Gathered.empty(grad.shape, grad).of(sources_of(*known[:2], factor))
        elif x is not None:
            of_factor = (grad * x.index_select(0, index)).sum_to_size(factor.shape)
        of_rows = grad * factor if of_rows is None else of_rows
        return of_rows, None, None, of_factor, None


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, into: Tensor, rows: Gathered, at: Tensor, mark: RowsUse) -> Tensor:
        ctx.set_materialize_grads(False)
        add = into.scatter_add_ if at.dim() > 1 else into.index_add_
        for part in parts(at, rows.shape):
            add(0, at[part], rows.sources.part(part))
        ctx.mark_dirty(into)
        ctx.save_for_backward(at)
        ctx.mark = mark
        return into

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,), (at,) = grads, ctx.saved_tensors
        if grad is None:
            return (None,) * 4
        # What else gets the gradient might change it before the rows of it are read.
        shares = ctx.needs_input_grad[0]
        if shares or torch.is_grad_enabled() or type(grad) is not Tensor or ctx.mark.is_whole:
            of_rows = grad.gather(0, at) if at.dim() > 1 else grad.index_select(0, at)
        else:
            # A copy: another function may get the same gradient, and change it in place.
            of_rows = Gathered.like(grad, at).of(sources_of(grad.clone(), at))
        return grad, of_rows, None, None


def is_in_parts(grad: Tensor) -> TypeGuard[Gathered]:
    """Returns whether a gradient is that of a sum over rows alone, and is read in parts."""
    return type(grad) is Gathered and grad.waits and not torch.is_grad_enabled()
