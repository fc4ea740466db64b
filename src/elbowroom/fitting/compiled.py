"""A fitted model that is compiled: its budget is kept inside torch.compile, not by hooks.

    er.fit(torch.compile(model), budget=...)      its mode, options, dynamic and fullgraph stay
    er.fit(model, budget=..., compile=True)       torch.compile's defaults

A model that was fitted first, and is called compiled later, gets there at that call
(`compiled_later.py`).
The model's forwards run through a compiled twin, whose backend is `elbowroom.compiled`. The memory
that the step may use is known before it is compiled (`compiled_room.py`). What it has taken is
measured until a settled step has kept to the budget (`compiled_steps.py`). After one that has not,
the model is compiled again for as much less, or for the least; where that is above the budget, a
warning says it.

Each shape that Dynamo compiles gets a plan of its own. A graph with symbols in its sizes serves
many: its plan holds for calls of N elements as long as peak * (N / planned)^2 stays inside the
room. For larger calls another twin is compiled, for 1.5 times their size if that fits.

Outputs of the forward before that the program still holds stand until the next one has ended. Where
plans have no room for them, all twins are compiled anew before that forward runs.

A forward that begins while gradients stand (micro-batches, `zero_grad(set_to_none=False)`) runs
through a twin of its own, whose room is less by these. Forwards that begin before earlier ones had
their backward share the room with them: after such a step all twins are compiled anew.

The eager engine takes over, and logs this once, for a model that cannot be compiled, for a budget
that its graphs cannot reach (unless `exact` is True, since eager codes may be coarser), and for
shapes that come after the last that Dynamo compiles one by one.
"""

import itertools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elbowroom.compiled import Decision, in_whole
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.compiled_least import refusal_that_holds
from elbowroom.fitting.compiled_loss import CompiledLoss
from elbowroom.fitting.compiled_noise import CompiledNoise
from elbowroom.fitting.compiled_plans import Plans
from elbowroom.fitting.compiled_room import CompiledRoom
from elbowroom.fitting.guests import next_forward
from elbowroom.fitting.inside import settings_of
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.session import Fitting
from elbowroom.fitting.signature import signature_of
from elbowroom.fitting.summary import Summary, summary_of_regions
from elbowroom.fitting.summary import summary as summary_of
from elbowroom.fitting.twin import CompileSettings, Twin, with_hooks
from elbowroom.fitting.uncompiled import Examined, tensors_in
from elbowroom.fitting.why_eager import NothingCompiled, failures, why_eager
from elbowroom.measure.rates import rates
from elbowroom.runtime.attach import Given
from elbowroom.runtime.calls import pass_through
from elbowroom.runtime.compiler import eagerly, has_said, original
from elbowroom.runtime.undo import Undo
from elbowroom.units import show_nbytes

_MAX_SHAPES = 8  # compilations of one code object after which Dynamo stops
_PROBES = 4  # about as many parameters tell whether gradients stand
_ABOVE = 1.05  # of the room: as much as a region may take at most
_SPARE = 1.5  # a graph with symbolic sizes is planned for this factor of the call's elements


class _Thread(threading.local):
    """Thread-local flag that is set while the compiled twin runs on this thread."""

    runs = False


class CompiledFitting:
    """Runs the forwards of one model, compiled inside a budget.

    steps     forwards that recorded gradients
    room      the memory that the budget leaves to its regions
    ran_at    number of its last forward, counted over all models; 0: none yet
    """

    ran_at = 0

    def __init__(
        self,
        model: nn.Module,
        options: FitOptions,
        optimizer: Optimizer | None,
        how: CompileSettings,
    ) -> None:
        self.options, self.how = options, how
        self.model_state = ModelState(original(model), optimizer)
        # Once a process, and in no step: the eager engine reads them, if it has to take over.
        moves = options.offload is not None
        rates(self.model_state.device.type, lossy=not options.exact, moves=moves)
        self.steps = 0
        self.room = CompiledRoom(self.model_state, options)
        self._plans = Plans(self.room)
        self._noise = CompiledNoise(self.room, self._plans.measured)
        self._probes: Sequence[Tensor] = ()
        self._losses: weakref.WeakKeyDictionary[nn.Module, CompiledLoss] = (
            weakref.WeakKeyDictionary()
        )
        self._shapes: Counter[object] = Counter()  # by code: those that were compiled
        self._is_fixed = False  # the last of them has no symbols
        self._is_full = False  # Dynamo compiles one of them no more
        # Of compiled calls, the one of the most bytes: its message, the bytes, and their parts.
        self._refusal: tuple[str, int, Mapping[str, int]] | None = None
        self._eager: Fitting | None = None  # for new kinds of calls
        self._many = ""  # the advice to log where there are many shapes
        self._here = _Thread()

    @property
    def regions(self) -> list[Decision]:
        """Decisions that were made for the compiled regions, in order."""
        return [one for twin in self._plans.twins for one in twin.regions.decisions]

    @property
    def eager(self) -> Fitting | None:
        """Eager engine, where it has taken over."""
        return self._eager

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Counts its states in regions that are compiled from now on."""
        self.model_state.add(optimizer)

    def counts_shape(self, frame: object, *, symbolic: bool) -> None:
        """Counts a shape that is compiled, and notes the advice for many shapes."""
        self._shapes[frame] += 1
        self._is_fixed = not symbolic
        if self._shapes[frame] == _MAX_SHAPES:
            self._is_full = True
            remedy = (
                "Pad inputs to a few lengths, or begin with the largest."
                if symbolic
                else "Compile with dynamic=True, so that one graph serves all, or pad inputs to a "
                "few lengths. Other shapes run in the eager engine from now on."
            )
            self._many = (
                f"{_MAX_SHAPES} shapes of one model were compiled, each with a plan of its own. "
                f"{remedy}"
            )

    def run(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        """Runs one forward of the model through its compiled twin."""
        if self._here.runs:  # the twin runs eagerly, inside of a context
            return forward()
        self._here.runs = True
        self.steps += 1
        self.ran_at = next_forward()
        try:
            return self._run(model, forward, given)
        finally:
            self._here.runs = False

    def _run(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        # Each small tensor has its own shape: so Dynamo tells calls apart.
        kind = signature_of(model, *given, (), joins_small=False)
        self._probes = self._probes or _probes(original(model))
        stands = any(p.grad is not None for p in self._probes)
        is_waiting = self.room.count_waiting()
        if not is_waiting:
            self._plans.judge()
            self._noise.end()
        if self._eager is None and not is_waiting:
            self._counts_waiting()
            self._counts_previous(model, given)
        is_known = self._plans.serves((kind, stands))
        twin = self._plans.twin_for(kind.numel, stands) if is_known else None
        if self._plans.measured.wants(twin, kind.numel) and not is_waiting:
            self._plans.measured.begin(self.room.outputs())
        if twin is not None and not self._is_full:
            twin.numel = kind.numel
            watching = nullcontext() if is_waiting else self._noise.watching(twin, kind.numel)
            try:
                with watching:
                    out = with_hooks(twin.call, *given)
                return self._waits(twin, out, compiled=False)
            except failures() as error:  # it is compiled again where other things change
                self._fails_again(model, twin, error)
                self._plans.drop((kind, stands))
        elif self._eager is None or is_known:
            was_corrected = self._plans.are_corrected
            twin, out = self._first(model, kind, stands, given)
            if twin is None and was_corrected and self._eager is None:
                return self._run(model, forward, given)  # by the plans before
            if twin is not None:
                return self._waits(twin, out, compiled=True)
            self._plans.drop((kind, stands))
        self._plans.measured.close()  # the eager engine has measurements of its own
        assert self._eager is not None
        try:
            with eagerly():  # it may have nothing to do, and then opens no context
                return self._eager.run(model, forward, given)
        except BudgetTooSmall as error:  # a compiled step may need less
            if self._refusal is None or self._refusal[1] >= error.least_nbytes:
                raise
        raise self._refused_most()

    def limit(self, options: FitOptions) -> None:
        """Plans within these options from now on."""
        self.options = self.room.options = options

    def forget(self) -> None:
        """Forgets all that was compiled, and that it was."""
        for twin in self._plans.twins:
            twin.leave()
        self._plans.forget()
        self._shapes.clear()
        self._is_full, self._many = False, ""

    @property
    def may_go_on(self) -> bool:
        """True while the last forward waits for its backward."""
        if self._eager is not None and self._eager.may_go_on:
            return True
        return self.room.last_waits

    def run_more(self, loss: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        """Runs a loss after a forward of the model, compiled in what that leaves of the room."""
        if self._eager is not None and self._eager.may_go_on:
            with eagerly():
                return self._eager.run_more(loss, forward, given)
        known = self._losses.get(loss)
        if known is None:
            settings = replace(settings_of(self.options), offloads=self.room.offloads)
            known = CompiledLoss(loss, settings, self.how.options, self.how.dynamic)
            self._losses[loss] = known
        try:
            return known.run(max(self.room.nbytes - self.room.held_nbytes, 0), *given)
        except failures() as error:
            self._reserve(type(loss).__name__, error)
        with eagerly():
            return forward()

    def _reserve(self, loss: str, error: Exception) -> None:
        """Compiles the model again for less, if that helps a loss that has too little room."""
        if not isinstance(error, BudgetTooSmall):
            why = f"torch.compile has failed ({type(error).__name__})"
        elif (
            error.least_nbytes <= self.room.reserved_nbytes or error.least_nbytes > self.room.nbytes
        ):
            raise in_whole(
                error,
                self.options.budget_nbytes,
                {"what the model holds": self.room.held_nbytes, **self.room.outside()},
                None if self.options.exact else self.options.noise,
            ) from None
        else:
            self.room.reserved_nbytes = error.least_nbytes
            self.room.held_nbytes = 0
            self._losses.clear()
            self._plans.forget()
            why = (
                f"it needs {show_nbytes(error.least_nbytes)} beside what the model holds, whose "
                "plan has left less. The model is compiled again"
            )
        warnings.warn(
            f"the loss {loss} runs eagerly in this step, which may exceed the budget: {why}.",
            stacklevel=5,
        )

    def _fails_again(self, model: nn.Module, twin: Twin, error: Exception) -> None:
        """Begins the eager engine after a settled call, of which nothing has run yet.

        Else the error is raised: before the second region of a forward, buffers may have changed.
        """
        reason = self._refused_most(twin.refused or error)
        is_one = not twin.regions.shares and twin.regions.runs == 1
        if not is_one or not self._may_go_eager(reason):
            raise reason if twin.refused is None else reason.with_traceback(None) from None
        self._go_eager(model, reason)

    def _refused_most(self, error: Exception | None = None) -> Exception:
        """Returns the refusal of the most bytes, of all shapes that were refused until now.

        Given back, it holds for each of these. Other errors are returned as they are. Nothing is
        kept of an error but what it says: its traceback holds tensors.
        """
        if isinstance(error, BudgetTooSmall):
            said = str(error), error.least_nbytes, error.parts
            if self._refusal is None or self._refusal[1] <= error.least_nbytes:
                self._refusal = said
                return error
        elif error is not None:
            return error
        assert self._refusal is not None
        message, least_nbytes, parts = self._refusal
        return BudgetTooSmall(message, least_nbytes=least_nbytes, parts=parts)

    def _waits(self, twin: Twin, out: Any, *, compiled: bool) -> Any:
        """Notes that a forward waits for its backward; returns what it gave."""
        self._plans.measured.ran(twin, twin.numel, self.room.note_output(out), compiled=compiled)
        return out

    def _counts_waiting(self) -> None:
        """Plans for several forwards at a time, after a step in which some were waiting."""
        if not self.room.admit_waiting():
            return
        self._plans.forget()
        warnings.warn(
            f"{self.room.forwards} forwards of one model have waited for backward at the same "
            "time, for which its budget was not planned. That step may have exceeded it. The model "
            "is compiled again for such steps.",
            stacklevel=5,
        )

    def _counts_previous(self, model: nn.Module, given: Any) -> None:
        """Compiles anew where plans have no room for outputs that the program still holds.

        Those of forwards that wait for backward are a part of what these hold.
        """
        resident = itertools.chain(model.parameters(), model.buffers(), tensors_in(given))
        if not self.room.admit_outputs(self.room.outputs(), resident):
            return
        if not all(twin.leaves_room(self.room.standing_nbytes) for twin in self._plans.twins):
            self._plans.forget()

    def _first(
        self, model: nn.Module, kind: Any, stands: bool, given: Given
    ) -> tuple[Twin | None, Any]:
        """Runs a kind of call that was not seen before, or that Dynamo may not compile again.

        Returns the twin that has run, None if that was not possible, and the result.
        """
        if self._is_full and self._is_fixed and not self._plans.serves((kind, stands)):
            self._begin_eager(model)  # Dynamo would run it outside of any budget
            return None, None
        self._probes = _probes(original(model))  # wrappers may have replaced them
        known = self._plans.twin_for(kind.numel, stands)
        undo = Undo(model, (), given, copies=known is None or not known.leaves_alone)
        room = self.room.nbytes if stands else 0
        for twin in self._plans.twins if stands else ():
            twin.stands = twin.stands or twin.fits(room)
        run = partial(self._runs_first, model, kind, stands, given, undo)
        try:
            twin, out = run(known)
        except failures() as error:
            self._recovers(model, error, undo, run)
            return None, None
        finally:
            undo.close()
        if twin.refused is not None:  # Dynamo was told to suppress errors, and ran it plainly
            self._go_eager(model, twin.refused)
            return twin, out
        if self._many:
            warnings.warn(self._many, stacklevel=4)
            self._many = ""
        held = self.room.forwards * sum(twin.ran)
        self.room.held_nbytes = max(self.room.held_nbytes, held)
        self._plans.serve((kind, stands))
        return twin, out

    def _runs_first(
        self,
        model: nn.Module,
        kind: Any,
        stands: bool,
        given: Given,
        undo: Undo,
        known: Twin | None = None,
    ) -> tuple[Twin, Any]:
        """Runs a call by a twin, and compiles another one if its regions hold more than the room.

        known: a twin that was made for such calls
        """
        twin = known or self._plans.twin_for(kind.numel, stands) or self._grown(model, stands)
        out, is_above = self._examined(twin, model, kind.numel, given, undo)
        resident = [*model.parameters(), *model.buffers(), *tensors_in(given)]
        is_above = is_above or (self.room.note_graph(out, resident) and twin.may_exceed())
        # Or a graph runs several times.
        if (is_above or twin.excess_nbytes() > 0) and _may_go_back(undo):
            out = None
            undo.back()
            runs = self.room.forwards * len(twin.ran)
            twin = self._plans.twins[-1] = Twin(self, model, 1, stands=stands, runs=runs)
            out = twin.run(kind.numel, *given)
            twin.check()
        if not twin.compiles and _may_go_back(undo) and any(map(_records, tensors_in(out))):
            out = None
            raise NothingCompiled
        return twin, out

    def _recovers(
        self, model: nn.Module, error: Exception, undo: Undo, run: Callable[[], Any]
    ) -> None:
        """Has the plans from before a correction, or the eager engine, run what was not compiled.

        Raises the error where neither can. Here, since a frame that an error has passed must not
        hold it: both would live on, with all tensors of the program's frames.
        """
        if self._plans.are_corrected and _may_go_back(undo):
            undo.back()
            least = error.least_nbytes if isinstance(error, BudgetTooSmall) else None
            if least is None or not self._plans.try_least(least):
                self._plans.take_back()
            return
        is_final = isinstance(error, BudgetTooSmall) and not self._may_go_eager(error)
        if is_final and not self._plans.is_one_graph and _may_go_back(undo):
            assert isinstance(error, BudgetTooSmall)
            error = refusal_that_holds(error, self, run, undo)
        refusal = self._refused_most(error)
        if not self._may_go_eager(error) or not _may_go_back(undo):
            self._plans.measured.close()  # or no other model's step could be measured
            raise refusal from (None if refusal is not error else error.__cause__)
        undo.back()
        self._go_eager(model, error)

    def _examined(
        self, twin: Twin, model: nn.Module, numel: int, given: Given, undo: Undo
    ) -> tuple[Any, bool]:
        """Runs a first forward, of which what is saved is dropped if it does not fit.

        Returns its result, and whether that has been dropped; it cannot be where forward could not
        run again.
        """
        if not undo.is_possible:
            return twin.run(numel, *given, on_whole=undo.let_go), False
        resident = [*model.parameters(), *model.buffers(), *tensors_in(given)]
        examined = Examined(_ABOVE * self.room.nbytes, resident)
        with examined:
            out = twin.run(numel, *given, on_whole=undo.let_go)
        if not examined.is_over:
            return out, False
        if not twin.ran:  # all of it is of uncompiled code
            raise NothingCompiled
        self.room.note_uncompiled(examined.nbytes)
        return None, True

    def _grown(self, model: nn.Module, stands: bool) -> Twin:
        """Creates another twin, for larger calls, or for those that begin beside gradients."""
        spare = _SPARE if any(twin.stands == stands for twin in self._plans.twins) else 1
        self._plans.twins.append(Twin(self, model, spare, stands=stands, runs=self.room.forwards))
        pass_through()  # now that Dynamo is there
        return self._plans.twins[-1]

    def _may_go_eager(self, error: Exception) -> bool:
        if isinstance(error, BudgetTooSmall):
            return not self.options.exact
        return not self.how.fullgraph  # a user who sets fullgraph wants the error

    def _go_eager(self, model: nn.Module, error: Exception) -> None:
        if self._eager is not None:  # which was said
            return
        warnings.warn(why_eager(type(model).__name__, error), stacklevel=4)
        self._begin_eager(model)

    def _begin_eager(self, model: nn.Module) -> None:
        has_said()
        optimizers = self.model_state.optimizers()
        self._eager = Fitting(model, self.options, optimizers[0] if optimizers else None)
        for other in optimizers[1:]:
            self._eager.model_state.add(other)

    def passes(self, forward: Callable[[], Any]) -> Any:
        """Runs a forward without gradients as the user has compiled it."""
        return forward() if self._eager is None else self._eager.passes(forward)

    def finish(self) -> None:
        """Ends the training."""
        self._plans.judge()
        self._noise.end()
        if self._eager is not None:
            self._eager.finish()

    def close(self) -> None:
        """Releases the model, which is not fitted any more."""
        self._plans.close()
        if self._eager is not None:
            self._eager.close()
        self._losses.clear()

    def summary(self, model: str) -> Summary:
        """Returns a summary of the plans, and of the steps that were measured.

        If nothing could be compiled, it is that of the eager engine.
        """
        if self._eager is not None and not self.regions:
            return summary_of(self._eager, model)
        summary = summary_of_regions(
            model, self.model_state, self.options, 0, self.regions, self.steps
        )
        each = [
            (twin.resident, one) for twin in self._plans.twins for one in twin.regions.decisions
        ]
        return replace(
            summary,
            noise=summary.noise if self._noise.error is None else self._noise.error,
            last_nbytes=self._plans.measured.last_nbytes,
            highest_nbytes=self._plans.measured.highest_nbytes,
            plain_nbytes=max((resident + one.plain_nbytes for resident, one in each), default=None),
            predicted_nbytes=max(
                (resident + one.peak_nbytes for resident, one in each), default=None
            ),
        )


def _probes(model: nn.Module) -> Sequence[Tensor]:
    """Returns a few of the parameters that are trained, to see whether gradients stand."""
    trained = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
    return trained[:: max(len(trained) // _PROBES, 1)]


def _records(x: Tensor) -> bool:
    return x.grad_fn is not None


def _may_go_back(undo: Undo) -> bool:
    """Returns whether a forward may begin again: nothing has changed of which there is no copy."""
    return undo.is_possible and not undo.is_lost
