"""A compiled copy of a model, whose regions keep to the room that its budget leaves.

    Twin            compiles each region that Dynamo finds, and runs the model's calls
    CompileSettings how the user has compiled the model

Dynamo calls the twin as its backend, once for each region and shape. A region gets a plan for the
room at that time (`elbowroom.compiled`). The room belongs to the controller of the model, which
creates twins (`compiled.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf, sqrt
from types import CodeType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, fx, nn

from elbowroom.compiled import (
    Regions,
    compile_region,
    counted,
    frame_of,
    in_whole,
    redrawable,
    reporting_to,
)
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.compiled_room import CompiledRoom
from elbowroom.fitting.inside import settings_of
from elbowroom.fitting.options import FitOptions
from elbowroom.runtime.attach import called
from elbowroom.runtime.compiler import (
    compiled_forward,
    context_of,
    inductor_options,
    is_compiled,
    original,
)
from elbowroom.runtime.tensor_values import SMALL
from elbowroom.units import show_at_least, show_nbytes


@dataclass(frozen=True)
class CompileSettings:
    """Arguments that torch.compile was given for a model. options: those of Inductor."""

    dynamic: bool | None = None
    fullgraph: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def compile_settings(model: nn.Module) -> CompileSettings | None:
    """Returns the arguments that torch.compile was given for a model; None without Inductor."""
    options = inductor_options(model) if is_compiled(model) else None
    if options is None:
        return None
    context = context_of(model)
    dynamic = getattr(context, "_dynamic", None)
    return CompileSettings(dynamic, bool(getattr(context, "fullgraph", False)), options)


class Controller(Protocol):
    """Interface of the controller of a compiled model: what its twins ask of it."""

    options: FitOptions
    how: CompileSettings
    room: CompiledRoom

    def counts_shape(self, frame: object, *, symbolic: bool) -> None: ...


class Twin:
    """Compiled copy of a model, and its backend.

    regions   the decision for each compiled region
    limit     the most elements of inputs that graphs with symbols may serve
    stands    whether its room is beside gradients that stand
    resident  resident bytes beside its room
    refused   the error by which a region of the current call was not compiled
    compiles  whether Dynamo has found anything to compile
    leaves_alone  whether it is one graph, which changes no large input in place
    is_one_graph  whether the graph that was compiled last is all of the model's forward
    """

    compiler_name = "elbowroom.fit"

    def __init__(
        self, fitting: Controller, model: nn.Module, spare: float, *, stands: bool, runs: int = 1
    ) -> None:
        self._fitting, self._spare, self.stands = fitting, spare, stands
        self.resident = self._room_nbytes = 0
        self.regions = Regions(settings_of(fitting.options), runs=runs)
        self.regions.reserved_nbytes = fitting.room.reserved_nbytes
        self.limit: float = inf
        self.refused: BudgetTooSmall | None = None
        self.compiles = self.leaves_alone = self.is_one_graph = False
        self._codes: set[CodeType] = set()  # that it has compiled
        self._forward = getattr(original(model).forward, "__code__", None)
        self._on_whole: Callable[[], None] | None = None
        self.ran: list[int] = []  # bytes that each run of a region holds, of a new kind of call
        self.numel = 0  # of the call that runs
        how = fitting.how

        def compiled(what: Any) -> Callable[..., Any]:
            return torch.compile(what, backend=self, dynamic=how.dynamic, fullgraph=how.fullgraph)

        self.call: Callable[..., Any]
        if model._compiled_call_impl is not None:  # by model.compile()
            self.call = compiled(model._call_impl)
        elif (given := compiled_forward(model)) is not None:
            forward = compiled(given._torchdynamo_orig_callable)  # type: ignore[attr-defined]
            self.call = partial(_with_forward, model, forward)
        else:
            self.call = compiled(model)

    def __deepcopy__(self, memo: object) -> Self:
        """Returns itself: Lightning copies all that torch.compile is given, which has the model."""
        return self

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a region. Dynamo calls this for each region and shape."""
        self.leaves_alone = _leaves_alone(gm) and (self.leaves_alone or not self.compiles)
        self._note_code(gm)
        self.compiles = True
        room = self._room_nbytes = self._fitting.room.nbytes
        self.resident = self._fitting.options.budget_nbytes - room
        symbolic = any(map(_has_symbols, example_inputs))
        self._fitting.counts_shape(frame_of(gm), symbolic=symbolic)
        compiled, before = None, len(self.regions.decisions)
        if symbolic and self._spare > 1:
            with suppress(BudgetTooSmall):
                compiled = self._compiled(gm, example_inputs, int(room / self._spare**2))
        try:
            compiled = compiled or self._compiled(gm, example_inputs, room)
        except BudgetTooSmall as error:
            budget, outside = self._fitting.options.budget_nbytes, self._fitting.room.outside()
            self.refused = in_whole(error, budget, outside, self.regions.settings.limit)
            raise self.refused from None
        made = self.regions.decisions[before:]
        if symbolic and (made or _may_record(example_inputs)):
            # Of a graph from a cache the plan may not be known: it serves no larger calls.
            spare = sqrt(room / max(made[-1].peak_nbytes, 1)) if made else 1.0
            self.limit = min(self.limit, self.numel * max(1.0, spare))
        if self.leaves_alone and self._on_whole is not None:
            self._on_whole()
        return compiled

    def _note_code(self, gm: fx.GraphModule) -> None:
        """Notes the function that Dynamo compiles."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        code = InstructionTranslator.current_tx().f_code
        breaks = getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", True)
        self.is_one_graph = code is self._forward and not breaks
        self._codes.add(code)

    def leave(self) -> None:
        """Removes what it has compiled from Dynamo's cache, which has room for a few versions."""
        dynamo: Any = torch._dynamo.eval_frame
        for code in self._codes:
            dynamo.reset_code(code)

    def run(
        self,
        numel: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        on_whole: Callable[[], None] | None = None,
    ) -> Any:
        """Runs a kind of call that may be compiled now. Our own errors are raised unwrapped.

        on_whole: called once it is compiled as one graph that leaves its inputs alone, before that
        """
        self.numel, self.refused, self._on_whole = numel, None, on_whole
        try:
            self.ran.clear()
            with reporting_to(lambda _, held, __: self.ran.append(held)), _refusing_to_stop():
                return with_hooks(self.call, args, kwargs)
        except Exception:  # of any class: Dynamo wraps what a backend raises
            if self.refused is None:
                raise
        finally:
            self._on_whole = None  # Dynamo holds each twin
        # Not above: the error would hold the one that Dynamo raises, which holds it, and the
        # frames that both have passed would live on with all their tensors.
        raise self._refusal().with_traceback(None)

    def _refusal(self) -> BudgetTooSmall:
        """Returns the error that is to be raised, and forgets it."""
        refused, self.refused = self.refused, None
        assert refused is not None
        return refused

    def may_exceed(self) -> bool:
        """Returns whether its plans may need more than the room is now."""
        peak = max((one.peak_nbytes for one in self.regions.decisions), default=0)
        return peak + self.regions.elsewhere_nbytes > self._fitting.room.nbytes

    def excess_nbytes(self) -> int:
        """Returns the least number of bytes by which the last forward exceeded the room.

        What the backend has accepted, with a warning, does not count.
        """
        spent = min((d.peak_nbytes - d.saved_nbytes for d in self.regions.decisions), default=0)
        room = self._fitting.room.nbytes + self.regions.above_nbytes
        return self._fitting.room.forwards * sum(self.ran) + spent - room

    def unused_nbytes(self) -> int:
        """Returns the bytes of the room that its plans were not predicted to need."""
        is_one = not self.regions.shares and self.regions.runs == 1
        peaks = [one.peak_nbytes for one in self.regions.decisions]
        return max(self._room_nbytes - max(peaks), 0) if is_one and peaks else 0

    def leaves_room(self, standing_nbytes: int) -> bool:
        """Returns whether so many bytes may stand beside the forward graphs of its plans."""
        most = max((one.forward_nbytes for one in self.regions.decisions), default=0)
        others = standing_nbytes + self.regions.elsewhere_nbytes
        return most + others <= self._fitting.room.nbytes

    def fits(self, room_nbytes: int) -> bool:
        """Returns whether its plans are known to need no more than this."""
        peaks = [one.peak_nbytes for one in self.regions.decisions]
        is_one = not self.regions.shares and self.regions.runs == 1 and self.limit == inf
        return is_one and bool(peaks) and max(peaks) <= room_nbytes

    def check(self) -> None:
        """Raises BudgetTooSmall if the room is exceeded."""
        excess = self.excess_nbytes()
        if excess <= 0:
            return
        budget, forwards = self._fitting.options.budget_nbytes, self._fitting.room.forwards
        held_nbytes = forwards * sum(self.ran)
        parts = {"held by compiled regions": held_nbytes, **self._fitting.room.outside()}
        parts["one of them while it runs"] = max(budget + excess - sum(parts.values()), 0)
        held = ", ".join(f"{what} {show_nbytes(size)}" for what, size in parts.items() if size)
        raise BudgetTooSmall(
            f"budget {show_nbytes(budget)} is below the {show_nbytes(budget + excess)} that "
            f"{forwards * len(self.ran)} runs of compiled regions need until backward: {held}. "
            f"Give {show_at_least(budget + excess)}, compile the model as a whole, or halve the "
            "batch.",
            least_nbytes=budget + excess,
            parts=parts,
        )

    def _compiled(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], room: int
    ) -> Callable[..., Any]:
        fitting = self._fitting
        self.regions.restrict(
            room, offloads=fitting.room.offloads, standing_nbytes=fitting.room.standing_nbytes
        )
        # At once: a region that raises when it is called would stay in Dynamo's cache.
        options = self._fitting.how.options
        region = compile_region(gm, example_inputs, self.regions, options, True)
        return redrawable(counted(region))


def _with_forward(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns a call of the model, hooks and all, with another forward."""
    held, model.forward = model.forward, forward
    try:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        model.forward = held


def with_hooks(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a compiled twin gives, with the hooks of the wrapper that was called.

    torch.compile's wrapper is a module of its own, whose hooks run outside of the graph.
    """
    wrapper = called()
    if wrapper is None or original(wrapper) is wrapper or not _has_hooks(wrapper):
        return call(*args, **kwargs)
    # Not `call` itself: a module that is set on another one would become its child.
    return _with_forward(wrapper, lambda *given, **named: call(*given, **named), *args, **kwargs)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _has_symbols(x: Any) -> bool:
    if isinstance(x, torch.SymInt):
        return True
    return isinstance(x, Tensor) and not all(isinstance(n, int) for n in x.shape)


def _leaves_alone(gm: fx.GraphModule) -> bool:
    """Returns whether a graph is the last of its code, and changes no large input in place.

    Dynamo runs the ops of a graph on fake inputs, so a change raises the version of one.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or getattr(reason, "graph_break", True):
        return False
    given = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    return not any(isinstance(x, Tensor) and x._version and not _is_small(x) for x in given)


def _is_small(x: Tensor) -> bool:
    """Returns whether a copy of the tensor is kept in any case (`runtime/rewind.py`)."""
    return not _has_symbols(x) and x.numel() * x.itemsize <= SMALL


def _may_record(example_inputs: Sequence[Any]) -> bool:
    """Returns whether a region may have a backward."""
    given = (x for x in example_inputs if isinstance(x, Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def _refusing_to_stop() -> AbstractContextManager[Any]:
    """A context in which Dynamo raises an error where it would run uncompiled, after its limit."""
    from torch._dynamo import config

    return (
        nullcontext() if config.suppress_errors else config.patch(fail_on_recompile_limit_hit=True)
    )
