"""Keeps a model's training under a budget of bytes: start safe, measure, plan, verify, watch.

    held before a step   weights, buffers, persistent gradients, optimizer states   counted
  + saved for backward   what the ledger holds                                      counted, chosen
  + transients           workspaces, restored tensors, fresh gradients              measured:
  <= budget                                                                         peak - the rest

Each kind of forward has a plan of its own (`signature.py`), which `planner.py` makes. Forwards that
wait for the same backward are one step (`calls.py`). Models that share a step have one plan
(`guests.py`). This module decides in which mode each forward of the model runs, and to which step
it belongs. The modes are in `forward_modes.py`, measurements of steps in `steps.py`, and the
response to exhausted memory in `shortage.py`. A forward is

    learning   examined: if it would hold more than is allowed, it climbs the ladder
    replaying  settled, and equal to the one before: its script is replayed without examination
    off        the same, if the script does nothing and much memory is free: no hook is open

A budget that no plan meets raises BudgetTooSmall with the least sufficient budget: in forward, as
soon as this is certain, or at the beginning of the step after the measured one. A refused forward
counts its bytes to its end, or to a backward inside it, without holding tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elbowroom.codecs.dropped import dropped, why_dropped
from elbowroom.errors import BudgetTooSmall, ElbowroomError, NothingHeld, PlanError
from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.guests import SharesSteps, next_forward
from elbowroom.fitting.late_optimizers import watch
from elbowroom.fitting.messages import warn_not_called
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.refusals import add_co_resident, add_room, say_unknown
from elbowroom.fitting.replayed import ReplayedForward
from elbowroom.fitting.shortage import Shortage
from elbowroom.fitting.signature import Signature, signature_of
from elbowroom.fitting.state_formats import is_auto
from elbowroom.fitting.together import Together
from elbowroom.measure.rates import rates
from elbowroom.plan.plan import Plan
from elbowroom.plan.registered import still_used
from elbowroom.runtime.attach import Around, Given, called
from elbowroom.runtime.compiler import calls_compiled
from elbowroom.runtime.exhaustion import is_out_of_memory
from elbowroom.runtime.opened_checkpoints import noticing
from elbowroom.runtime.repeats import Unrepeatable
from elbowroom.runtime.undo import Undo

_MAX_MISSED = 3  # steps of the model's optimizers before a forward of it
_MAX_REPEATED = 16  # forwards that are known, until what stands is looked after again


@dataclass
class Repeats:
    """Known forwards in a row.

    parameters  of the model, which they need not collect again
    """

    parameters: list[nn.Parameter]
    forwards: int = 0


class Fitting(SharesSteps):
    """The controller of one fitted model, which runs every forward.

    refusal    why its last forward was refused; None: it was not
    is_called  a forward of the model itself, not of its submodules alone, was run or compiled
    compiled   gives the engine for a model that is called compiled, by what was called; None: this
               one runs it, without the compiler
    successor  that engine, once it has taken over
    """

    refusal: BudgetTooSmall | None = None
    is_called = False
    _missed = 0  # steps of optimizers without a forward
    compiled: "Callable[[Fitting, nn.Module], Around | None] | None" = None
    successor: Around | None = None

    def __init__(
        self,
        model: nn.Module,
        options: FitOptions,
        optimizer: Optimizer | None,
        plan: Plan | None = None,
    ) -> None:
        """plan: the plan of the first step."""
        super().__init__(ModelState(model, optimizer), options, plan)
        watch(self)
        # Once a process: this loads the kernels, so that no step waits for them.
        moves = options.offload is not None
        rates(self.model_state.device.type, lossy=not options.exact, moves=moves)
        self._shortage = Shortage()
        self._together = Together()
        self._copies = True  # until a forward has not changed large tensors (`rewind.py`)
        self._repeats: Repeats | None = None  # while forwards are known
        self._dropped = dropped()  # codecs, until it was asked which of them a plan uses
        # Of weights and gradients at the last forward, once a graph has waited for two backwards.
        self._versions: tuple[object, ...] | None = None

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Counts its states from the next step on; if it has any, learning begins anew."""
        before_nbytes = self.model_state.resident_nbytes()
        self.model_state.add(optimizer)
        if self.model_state.resident_nbytes() > before_nbytes:
            self._plan_cache.forget()
            self._repeats = None
            self._tell_hosts()

    def meet(self, optimizer: Optimizer) -> None:
        """Counts an optimizer that `fit` was not given as it first steps, if it trains this model.

        An optimizer whose state format `fit` is to choose must be passed to it, or to
        `er.add_optimizer`.
        """
        if self.model_state.is_trained_by(optimizer) and not is_auto(optimizer):
            self.add_optimizer(optimizer)

    def miss(self, optimizer: Optimizer) -> None:
        """Warns of a model that is trained without being called.

        A single step may come before the first forward: to create states, or after a late `fit`.
        """
        if self.model_state.is_trained_by(optimizer) and self.model_state.gradients():
            self._missed += 1
            if self._missed == _MAX_MISSED:
                warn_not_called(self.options, _MAX_MISSED, *self.model_state.containers())
                self.is_called = True  # it is said once

    def run(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        """Runs one forward of the model.

        After an out-of-memory error, plans with less.
        """
        self.is_called = True
        wrapper = called()
        if self.compiled and self._neighbors.is_alone and calls_compiled(model, wrapper):
            self.successor = self.compiled(self, model if wrapper is None else wrapper)
            if self.successor is not None:
                return self.successor.run(model, forward, given)
        hooks = self._foreign.around(self.options)
        if hooks is not None:
            self._repeats = None
            run = partial(self._run_with_foreign_hooks, hooks)
            return self._run_together(run, model, forward, given)
        host = None if self._neighbors.is_alone else self._find_host()
        if host is not None:
            return host._run_guest(self, model, forward, given)
        self.ran_at = next_forward()
        return self._run_together(self._run_alone, model, forward, given)

    @property
    def may_go_on(self) -> bool:
        """True while the saved tensors of the last forward wait for backward.

        After one with create_graph=True they wait for another one, unless weights or gradients
        have changed: then the rest of its graph is not needed any more.
        """
        last = self._last
        if last is None or not last.waits or (self._open_step.has_guests and last.backward_began):
            return False
        if last.waits_again:
            before, self._versions = self._versions, self._versions_now()
            if before not in (None, self._versions):
                return False
        return self.planner.calls.may_go_on

    def _versions_now(self) -> tuple[object, ...] | None:
        """Returns the versions of weights and gradients, or the last that were known."""
        now = self.model_state.versions()
        return self._versions if now is None else now

    def run_more(self, loss: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        """Runs forward(), which is loss(*args, **kwargs), as one more forward of the step."""
        hooks = self._foreign.around(self.options)
        if hooks is not None:
            with hooks:
                return forward()
        return self._run_together(self._run_loss, loss, forward, given)

    def _run_together(
        self, run: Callable[..., Any], model: nn.Module, forward: Callable[[], Any], given: Given
    ) -> Any:
        groups = self._together.groups_of(model)
        if not groups:
            return run(model, forward, given)
        try:
            return self._together.run(
                groups,
                lambda noted: run(model, noted, given),
                model,
                forward,
                given,
                lambda: self.planner.settled,
            )
        except BudgetTooSmall:
            self.interrupt()
            raise

    def _run_with_foreign_hooks(
        self,
        hooks: AbstractContextManager[object],
        model: nn.Module,
        forward: Callable[[], Any],
        given: Given,
    ) -> Any:
        """Runs a forward whose saved tensors the program's own hooks hold."""
        self.ran_at = next_forward()
        self._begin_foreign_step()
        with hooks:
            out = forward()
        self._foreign.follow(out)
        return out

    def _run_alone(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        if self._repeats is not None and not self.context.opens_checkpoints:
            return self._run_noticed(model, forward, given)  # as the forward before
        with noticing(self.context):
            return self._run_noticed(model, forward, given)

    def _run_noticed(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        last, known = self._last, self._repeats
        parameters = None if known is None else known.parameters
        signature = signature_of(model, *given, parameters)
        goes_on = self.may_go_on or self._may_resume(given)
        if self._versions is not None and not goes_on:
            self._versions = self._versions_now()
        with self._failures():
            may_repeat = not goes_on and dropped() == self._dropped
            if known is not None and may_repeat and self._repeated(signature, known):
                script = self.planner.repeat()
                if script is not None:
                    self.context.begin_step()
                    out = self._replayed(forward, script)
                    self._outputs.note(out)
                    return out
            if last is not None and goes_on:
                out = self._go_on(model, forward, signature, last, given)
            else:
                out = self._step_with(model, forward, signature, given)
        self._open_step.follow(out, self._last, self.planner.calls.at)
        self._outputs.note(out)
        return out

    def _run_loss(self, loss: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        last = self._last
        assert last is not None
        signature = signature_of(loss, *given)
        with self._failures():
            return self._go_on(loss, forward, signature, last, given)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Says what a refusal leaves out, and learns from an error that says there is no memory."""
        before, self._open_step.runs = self._open_step.runs, True
        try:
            yield
            self.refusal = None
        except BudgetTooSmall as error:
            self.interrupt()  # or no other model could be measured while this one exists
            kinds_nbytes = self._plan_cache.least_of_others(self.planner)
            taken_nbytes = self.planner.state.taken_nbytes
            add_room(error, self._neighbors.savings_nbytes, kinds_nbytes, taken_nbytes)
            others = self.planner.memory.co_resident_nbytes - self.model_state.passing_nbytes
            add_co_resident(error, others)
            if self.context.step <= 1:
                optimizers, may_share = self.model_state.optimizers(), self.planner.leaves_room
                say_unknown(error, optimizers, may_share=may_share)
            # Without its traceback, whose frames hold tensors.
            self.refusal = BudgetTooSmall(
                str(error), least_nbytes=error.least_nbytes, parts=error.parts
            )
            raise
        except Exception as error:
            if is_out_of_memory(error):
                self.exhausted()
            raise
        finally:
            self._open_step.runs = before

    def _repeated(self, signature: Signature, known: Repeats) -> bool:
        """Returns whether this forward equals the last one, and needs no examination.

        From time to time everything is examined: more may be resident beside the model.
        """
        known.forwards += 1
        alike = self.planner.now == signature and self._shortage.ran_out_nbytes is None
        free = self._shortage.less is None and self._step is None and self._neighbors.is_alone
        if alike and free and known.forwards < _MAX_REPEATED:
            return True
        self._repeats = None
        return False

    def _step_with(
        self, model: nn.Module, forward: Callable[[], Any], signature: Signature, given: Given
    ) -> Any:
        """Begins a step with this forward."""
        undo = None if self._shortage.ran_out_nbytes is None else Undo(model, (), given)
        forward = forward if undo is None else undo.watching(forward)
        try:
            self._begin(signature, given)
            return self._run(model, forward, given)
        except BudgetTooSmall as error:
            if undo is None or not self._shortage.relents(self.options, error.least_nbytes):
                raise
            undo.back()
        finally:
            if undo is not None:
                undo.close()
        return self._step_with(model, forward, signature, given)

    def _run(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        planner = self.planner
        script = planner.next_script() if self._step is None else None
        if script is not None and not planner.has_trials:
            self._repeats = Repeats(list(model.parameters()))
            return self._replayed(forward, script)
        self._repeats = None
        follows = not planner.state.may_rehearse or self._step is None
        outgrows = follows and self._step is not None and planner.state.may_be_outgrown
        if follows and not planner.takes_trials() and not outgrows:
            return self._forward(forward)
        undo = Undo(model, (), given, copies=self._copies)
        forward = undo.watching(forward)
        planner.redoes = undo.is_possible and not self._together.runs_once
        try:
            if script is not None:
                return self._replayed(forward, script)
            if follows or not planner.redoes:
                return self._forward(forward)
            return self._learned(forward, undo, given)
        except Unrepeatable:
            undo.back()
            learn = planner.leave_out_unrepeatable
        except BudgetTooSmall:
            if not (outgrows and planner.redoes):
                raise
            undo.back()
            learn = planner.outgrow
        finally:
            planner.redoes = False
            undo.close()
        self._stop()
        learn()
        self._measure(given)
        return self._run(model, forward, given)

    def _go_on(
        self,
        model: nn.Module,
        forward: Callable[[], Any],
        signature: Signature,
        before: FittedSaving | ReplayedForward,
        given: Given,
    ) -> Any:
        """Runs another forward of the model in the same step (`calls.py`)."""
        planner = self.planner
        resumes = self._open_step.has_guests and before.backward_began
        is_known = planner.go_on(signature, self._open_step.waiting if resumes else None)
        learns = planner.state.may_rehearse
        if isinstance(before, ReplayedForward):
            script = planner.next_script() if is_known else None
            if script is not None:
                return self._replayed(forward, script, before)
            last = before.begun()
        else:
            last = before
        if resumes or last.waits_again:
            last.resume()
        if is_known and not learns:
            return self._forward(forward, last)
        undo = Undo(model, (), given)
        forward = undo.watching(forward)
        try:
            if not undo.is_possible or self._together.runs_once:
                return self._forward(forward, last)
            has_guests = self._open_step.has_guests
            is_other = has_guests and planner.calls.is_other(signature)
            # Where the next step is to be planned by a rehearsal, all of its forwards are.
            tries = is_other or (learns and not (has_guests and planner.calls.grew))
            leaves_room = has_guests and learns and not (is_other or is_known)
            kept = self._kept(forward, last, leaves_room=leaves_room) if tries else None
            if kept is not None and is_other:
                planner.calls.note_other(signature)
            elif kept is not None:
                planner.calls.note(signature, None)
            if kept is not None:
                return kept[0]
            undo.back()
            self._stop()
            try:
                stands = given if has_guests else ()
                rest = planner.rehearse_more(
                    forward, signature, last, stands, leaves_room=leaves_room
                )
            except BaseException as error:
                undo.back()
                if _is_ours(error):
                    raise
                return self._fail(forward, error, undo, last)
            undo.back()
        finally:
            undo.close()
        if rest.encoded is not None:
            self.was_exact = False
            self._say(rest.encoded, rounds=False)
        with FittedSaving(rest, after=last) as saving:
            out = forward()
        self._last = saving
        self._note_setting(saving)
        return out

    def _learned(self, forward: Callable[[], Any], undo: Undo, given: Given) -> Any:
        """Runs the forward as it is, if it fits; else undoes it, and plans from a rehearsal.

        One that begins again, without a module that its plan would have run again, is planned from
        the rehearsal that there was.
        """
        planner = self.planner
        known = (
            planner.state.infeasible
            or planner.calls.are_seen
            or planner.forward_profile is not None
        )
        if not known:
            self.planner.leaves_room = self._leaves_room
            kept = self._kept(forward, undo=undo, leaves_room=self.planner.leaves_room)
            self._copies = undo.changed_large
            if kept is not None:
                return kept[0]
            undo.back()
        self._stop()
        is_inside = self._neighbors.is_inside
        try:
            self.planner.rehearse_until_planned(forward, undo, given, is_inside=is_inside)
        except BaseException as error:
            if _is_ours(error):
                raise
            return self._fail(forward, error, undo)
        self.planner.takes_trials()  # this forward is the first of them
        self._measure(given)
        try:
            return self._forward(forward)
        except BudgetTooSmall:
            undo.back()
            raise

    def exhausted(self) -> None:
        """Sets a smaller budget from the next step on, after memory ran out in this one.

        Nothing is planned now, while the step's graph may still exist. Calling it twice is
        harmless.
        """
        if self._shortage.less is None:
            self.interrupt()
            held_nbytes = 0 if self._opened is None else self._opened.ledger.after_nbytes
            self._shortage.note(self.options, self.planner, held_nbytes)

    def close(self) -> None:
        super().close()
        # What holds weights: who asks for a summary later holds this engine.
        self._repeats = self._opened = None
        for one in (self.planner, *self._plan_cache):
            one.forget_scripts()

    def prepare(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plans model(*args, **kwargs), in training mode, before the training begins.

        The forward runs once and holds nothing; RNG, buffers and modes are restored. Raises
        BudgetTooSmall where no plan fits.
        """
        try:
            with _as_in_training(model, (args, kwargs)) as undo:
                signature = signature_of(model, args, kwargs)
                self.planner = self._plan_cache.of(signature)
                self.planner.begin(self._memory(), signature)
                with torch.enable_grad():
                    self.planner.prepare(undo.watching(lambda: model(*args, **kwargs)))
        except BudgetTooSmall as error:
            add_room(error)
            raise
        except NothingHeld as error:
            raise PlanError(
                "worst= runs the model's forward once without storing tensors, but this forward "
                "runs a backward of its own, which needs them. Leave worst= out: the first step "
                "is then measured instead."
            ) from error

    def _loses_codecs(self) -> bool:
        """Returns whether a codec was dropped that the options name, or that some plan uses."""
        if dropped() == self._dropped:
            return False
        self._dropped = dropped()
        if still_used(self.options.codecs) != self.options.codecs:
            return True
        plans = [one.plan for one in self._plan_cache if one.plan is not None]
        return any(why_dropped(type(codec)) for plan in plans for codec in plan.codecs)

    def _begin(self, signature: Signature, given: Given) -> None:
        self.context.begin_step()
        self._learn()
        self._end_other_steps()
        if self._open_step.has_guests:
            self.planner.calls.leave(self._open_step.waiting)
        self._open_step.begin()
        self._neighbors.begin()
        less = self._shortage.taken()
        if less is not None:
            self.options = less
        if self._loses_codecs() or less is not None:
            self.options = replace(self.options, codecs=still_used(self.options.codecs))
            self._plan_cache.use(self.options)
        self.planner = self._plan_cache.of(signature)
        self.planner.begin(self._memory(), signature)
        self._neighbors.learns = not all(planner.settled for planner in self._plan_cache)
        self._measure(given)


@contextmanager
def _as_in_training(model: nn.Module, given: Given) -> Iterator[Undo]:
    """Puts the model into training mode for a forward whose effects are undone."""
    modes = [(module, module.training) for module in model.modules()]
    undo = Undo(model, (), given)
    try:
        if not model.training:
            model.train()
        yield undo
    finally:
        for module, training in modes:
            module.training = training
        try:
            undo.back()
        finally:
            undo.close()


def _is_ours(error: BaseException) -> bool:
    """Returns whether an error in a rehearsal is none that the forward raises by itself."""
    is_own = isinstance(error, ElbowroomError) or not isinstance(error, Exception)
    return is_own or is_out_of_memory(error)
