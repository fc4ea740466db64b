"""Keeping a model's training under a budget of bytes: start safe, measure, plan, verify, watch.

    held before a step   weights, buffers, persistent gradients, optimizer states   counted
  + saved for backward   what the ledger holds                                      counted, chosen
  + transients           workspaces, restored tensors, fresh gradients              measured:
  <= budget                                                                         peak - the rest

How a plan comes about is told in `planning.py`; each kind of forward has its own (`signature.py`).
Forwards that wait for the same backward are one step (`calls.py`).
Here is what belongs to the model: what it owns, the one measurement that may run at a time, and
what was said. Every forward is watched: one that would hold more than is allowed climbs the ladder.

A budget that nothing meets raises BudgetTooSmall with the least that would do: in forward, as soon
as it is certain, or at the beginning of the step after the one that was measured. A forward that is
refused counts to its end without holding anything, or to a backward of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from elbowroom.errors import BudgetTooSmall, NothingHeld, PlanError
from elbowroom.fitting.backward_peak import peak_of_backward
from elbowroom.fitting.co_resident import Neighbours
from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.measurement import Measurement
from elbowroom.fitting.messages import say_exhausted, say_setting, warn_blind
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.plan_cache import PlanCache
from elbowroom.fitting.planning import Planning
from elbowroom.fitting.replayed import ReplayedForward, ReplayedSaving
from elbowroom.fitting.signature import Signature, signature_of
from elbowroom.measure.background import Background
from elbowroom.measure.interval import may_measure
from elbowroom.measure.rates import rates
from elbowroom.plan.ladder import Rung
from elbowroom.plan.plan import Plan
from elbowroom.runtime.context import Context
from elbowroom.runtime.exhaustion import is_out_of_memory
from elbowroom.runtime.repeats import Unrepeatable
from elbowroom.runtime.replay.script import Script
from elbowroom.runtime.undo import Undo

Given = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call
_MOST_REPEATED = 16  # forwards that are known, until what stands is looked after again
_AMPLE = 0.25  # of the budget
_LESS = 0.85  # of a budget that the device did not have


class Fitting:
    """The controller of one fitted model. It runs every forward.

    planning        what the last forward followed
    peak_nbytes     of the last measured step, everything included
    peak_setting    what that step ran at: "plan", or the name of a rung
    highest_nbytes  the highest of all measured peaks
    terms           the budget is smaller than the user's once memory has run out
    was_exact       no forward so far has held a lossy code
    """

    def __init__(
        self,
        model: nn.Module,
        terms: FitOptions,
        optimizer: Optimizer | None,
        plan: Plan | None = None,
    ) -> None:
        """plan: what the first step begins with."""
        self._step: Measurement | None = None
        self._last: FittedSaving | ReplayedForward | None = None
        self.terms = terms
        self.owned = ModelState(model, optimizer)
        rates(self.owned.device.type)  # once a process; it loads the kernels, and no step waits
        self.context = Context()
        self._plannings = PlanCache(terms, self.owned, self.context, plan)
        self.planning = Planning(terms, self.owned, self.context)
        self.peak_nbytes: int | None = None
        self.peak_setting = ""
        self.highest_nbytes: int | None = None
        self.was_exact = True
        self._opened: FittedSaving | ReplayedForward | None = None  # the last context
        self._beside = Neighbours(self.owned)
        self._less: FitOptions | None = None  # from the next step on
        self._ran_out_nbytes: int | None = None  # there was no memory for a step of so many
        self._was_exhausted = False
        self._said_lossy = False
        self._said_blind = False
        self._copies_given = True  # until a forward has left the tensors that it is handed alone
        self._parameters: list[nn.Parameter] | None = None  # while forwards are known
        self._repeated = 0  # known forwards in a row
        self._closed = False

    def run(
        self,
        model: nn.Module,
        forward: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One forward of the model. After an error that says there is no memory, plan with less."""
        last, known = self._last, self._parameters
        signature = signature_of(model, args, kwargs, known)
        given = args, kwargs
        goes_on = last is not None and last.waits and self.planning.calls.may_go_on
        try:
            if known is not None and not goes_on and self._repeats(signature):
                script = self.planning.next_script()
                if script is not None:
                    self.context.begin_step()
                    return self._replayed(forward, script)
            if last is not None and goes_on:
                last = last.begun() if isinstance(last, ReplayedForward) else last
                return self._go_on(model, forward, signature, last, given)
            return self._step_with(model, forward, signature, given)
        except Exception as error:
            if is_out_of_memory(error):
                self.exhausted()
            raise

    def _repeats(self, signature: Signature) -> bool:
        """Return whether this forward is the last one again, and nothing has to be looked after.

        Now and then all is looked after: what stands beside the model may have become more.
        """
        self._repeated += 1
        alike = self.planning.now == signature and self._ran_out_nbytes is None
        free = self._less is None and self._step is None and self._beside.is_alone
        if alike and free and self._repeated < _MOST_REPEATED:
            return True
        self._parameters = None
        return False

    def _step_with(
        self, model: nn.Module, forward: Callable[[], Any], signature: Signature, given: Given
    ) -> Any:
        """A step begins with this forward."""
        undo = None if self._ran_out_nbytes is None else Undo(model, (), given)
        try:
            self._begin(signature)
            return self._run(model, forward, given)
        except BudgetTooSmall as error:
            if undo is None or not self._relents(error.least_nbytes):
                raise
            undo.back()
        finally:
            if undo is not None:
                undo.close()
        return self._step_with(model, forward, signature, given)

    def _relents(self, least_nbytes: int) -> bool:
        """Whether to try what was said to do: a smaller budget was a guess, after memory ran out.

        Not if it ran out within as much.
        """
        known = self._ran_out_nbytes
        if known is None or not self.terms.budget_nbytes < least_nbytes < known:
            return False
        self._less = self.terms.within(least_nbytes)
        return True

    def _run(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        planning = self.planning
        script = planning.next_script() if self._step is None else None
        if script is not None:
            self._parameters, self._repeated = list(model.parameters()), 0
            return self._replayed(forward, script)
        self._parameters = None
        follows = not planning.state.may_rehearse or self._step is None
        if follows and not planning.takes_trials():
            return self._forward(forward)
        undo = Undo(model, (), given, copies=self._copies_given)
        planning.redoes = undo.is_possible
        try:
            if follows or not undo.is_possible:
                return self._forward(forward)
            return self._learned(forward, undo)
        except Unrepeatable:
            undo.back()
        finally:
            planning.redoes = False
            undo.close()
        self._stop()
        planning.leave_out_unrepeatable()
        self._measure()
        return self._run(model, forward, given)

    def _go_on(
        self,
        model: nn.Module,
        forward: Callable[[], Any],
        signature: Signature,
        last: FittedSaving,
        given: Given,
    ) -> Any:
        """The model runs once more in the same step (`calls.py`)."""
        planning = self.planning
        is_known = planning.go_on(signature)
        learns = planning.state.may_rehearse
        if is_known and not learns:
            return self._forward(forward, last)
        undo = Undo(model, (), given)
        try:
            if not undo.is_possible:
                return self._forward(forward, last)
            kept = self._kept(forward, last) if learns else None
            if kept is not None:
                planning.calls.note(signature, None)
                return kept[0]
            undo.back()
            self._stop()
            rest = planning.rehearse_more(forward, signature, last)
            undo.back()
        finally:
            undo.close()
        with FittedSaving(rest, after=last) as saving:
            out = forward()
        self._last = saving
        self._note_setting(saving)
        return out

    def _learned(self, forward: Callable[[], Any], undo: Undo) -> Any:
        """The forward as it is, if there is room; else, undone, by a plan of a rehearsal."""
        if not (self.planning.state.outgrown or self.planning.calls.are_seen):
            kept = self._kept(forward)
            self._copies_given = undo.changed_given
            if kept is not None:
                return kept[0]
            undo.back()
        self._stop()
        while self._rehearsed_in_vain(forward, undo):
            pass
        self._measure()
        try:
            return self._forward(forward)
        except BudgetTooSmall:
            undo.back()
            raise

    def _rehearsed_in_vain(self, forward: Callable[[], Any], undo: Undo) -> bool:
        """Rehearse, and undo it. Whether no plan fits, but there are more to be tried."""
        try:
            self.planning.rehearse(forward)
        except NothingHeld:
            pass  # backward runs inside of forward, as that of a force: it cannot be rehearsed
        except BudgetTooSmall:
            if not self.planning.tries_more():
                raise
            return True
        finally:
            undo.back()
        return False

    def _kept(
        self, forward: Callable[[], Any], after: FittedSaving | None = None
    ) -> tuple[Any] | None:
        """What a forward gives that holds all it should; None if there is no room for that."""
        with self._context(may_climb=False, after=after) as saving:
            try:
                out = forward()
            except NothingHeld:
                return None
        if saving.too_much or (after is None and self._will_be_too_much(out, saving)):
            return None
        self._ended(saving)
        return (out,)

    def _will_be_too_much(self, out: Any, saving: FittedSaving) -> bool:
        """Return whether backward would be above the budget, where a plan could help that."""
        if not may_measure(self.owned.device) and self._step is None:
            return False
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        highest = peak_of_backward(made, saving, self.planning.stock)
        return highest > self.terms.budget_nbytes

    def _forward(self, forward: Callable[[], Any], after: FittedSaving | None = None) -> Any:
        cut_short = False
        with self._context(after=after) as saving:
            try:
                out = forward()
            except NothingHeld:
                if not saving.impossible:
                    raise
                cut_short = True
        if cut_short:
            self._refuse_part(saving)
        self._ended(saving)
        return out

    def _replayed(self, forward: Callable[[], Any], script: Script) -> Any:
        """Run a forward that is known; where it turns out to be another one, look at it."""
        known = ReplayedForward(self.planning, script)
        self._opened = known
        if script.does_nothing and self._has_ample_room:
            out = forward()
        else:
            with ReplayedSaving(self.planning, script) as saving:
                out = forward()
            if saving.strayed:
                self.planning.forget_script()
            if saving.rest is not None and saving.entry is not None:
                known.ledger.follow(out)
                known.ledger.when_over(saving.entry.close)
                self._beside.opened(saving.rest.ledger)
                self._ended(saving.rest)
                return out
        known.ledger.follow(out)
        self._beside.opened(known.ledger)
        self._last = known
        self._note_setting(known)
        return out

    @property
    def _has_ample_room(self) -> bool:
        """Return whether steps are so small that nobody need see whether they are alike."""
        highest = self.highest_nbytes
        return highest is not None and highest <= _AMPLE * self.terms.budget_nbytes

    def _refuse_part(self, saving: FittedSaving) -> None:
        """Refuse a forward that could not go on where it ran a backward of its own."""
        try:
            self.planning.forward_ended(saving)
        except BudgetTooSmall as error:
            raise BudgetTooSmall(
                f"{error} That is what was counted up to a backward inside of forward; the rest of "
                "the step may need more.",
                least_nbytes=error.least_nbytes,
                parts=error.parts,
            ) from None

    def _context(
        self, *, may_climb: bool = True, after: FittedSaving | None = None
    ) -> FittedSaving:
        recorder = None if self._step is None else self._step.recorder
        opened = self.planning.context_of(recorder, may_climb=may_climb, after=after)
        self._opened = opened
        self._beside.opened(opened.ledger)
        return opened

    def exhausted(self) -> None:
        """There was no memory for this step: from the next one on keep to a smaller budget.

        Nothing is planned now, while the step's graph may still be there. Twice is harmless.
        """
        if self._less is not None:
            return
        self.interrupt()
        plan, budget = self.planning.plan, self.terms.budget_nbytes
        knows = plan is not None and not self.planning.calls.grew  # all forwards of the step
        self._ran_out_nbytes = min(budget, plan.peak) if plan is not None and knows else budget
        self._less = self.terms.within(self._smaller_nbytes())
        say_exhausted(self.terms, self._less, again=self._was_exhausted)
        self._was_exhausted = True

    def _smaller_nbytes(self) -> int:
        """Less than the device turned out to have, if that is known; else not less than half."""
        budget, planning = self.terms.budget_nbytes, self.planning
        if planning.plan is not None:
            return int(_LESS * min(budget, planning.plan.peak))
        held = 0 if self._opened is None else self._opened.ledger.after_nbytes
        return min(int(_LESS * budget), max(budget // 2, planning.stock.static_nbytes + held))

    def prepare(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan model(*args, **kwargs), in training mode, before the training begins.

        Its forward runs once and holds nothing; RNG, buffers and modes are put back. Raises
        BudgetTooSmall where no plan fits.
        """
        modes = [(module, module.training) for module in model.modules()]
        undo = Undo(model, (), (args, kwargs))
        try:
            if not model.training:
                model.train()
            signature = signature_of(model, args, kwargs)
            self.planning = self._plannings.of(signature)
            self.planning.begin(self._stock(), signature)
            with torch.enable_grad():
                self.planning.prepare(lambda: model(*args, **kwargs))
        except NothingHeld as error:
            raise PlanError(
                "worst= runs the model's forward once without holding anything, and this one runs "
                "a backward of its own, which asks for what is held. Leave worst= out: the first "
                "step is learned from instead."
            ) from error
        finally:
            for module, training in modes:
                module.training = training
            try:
                undo.back()
            finally:
                undo.close()

    def passes(self) -> None:
        """Evaluation begins: it is no part of the step before, unless backward is still to come."""
        if self._last is not None and self._step is not None and self._last.is_over:
            self._step.end()

    def _begin(self, signature: Signature) -> None:
        self.context.begin_step()
        self._learn()
        self._beside.begin()
        if self._less is not None:
            self.terms, self._less = self._less, None
            self._plannings.use(self.terms)
        self.planning = self._plannings.of(signature)
        self.planning.begin(self._stock(), signature)
        self._measure()

    def _stock(self) -> MemoryState:
        """As a step begins. States that the step will make are given a format that has room."""
        stock = self.owned.stock()
        if self.owned.states.make_room(self.terms, stock):
            stock = self.owned.stock()
        return stock.beside(self._beside.nbytes)

    def _learn(self) -> None:
        """At the beginning of a step: what did the last one need?"""
        last, self._last = self._last, None
        step, self._step = self._step, None
        if step is None:
            return
        step.end()
        if last is None or self._closed or isinstance(last, ReplayedForward):
            return
        planning = self.planning
        if step.peak is not None and not (planning.plan is not None and step.makes_states):
            self._note_peak(step.peak, last)
        planning.learn(last, step, self.owned.stock())

    def _measure(self) -> None:
        """Start to measure the step that begins, if there is something to learn from it."""
        state = self.planning.state
        if self._closed or self._step is not None or not state.wants_measuring:
            return
        self._step = Measurement.start(self.owned, state.stock, writes=state.wants_writing)
        waits = Background.running is not None  # for another model's, and is measured after it
        blind = self._step is None and self.highest_nbytes is None
        if blind and not waits and not self._said_blind:
            self._said_blind = True
            warn_blind(self.terms)

    def _ended(self, saving: FittedSaving) -> None:
        """A forward came to its end, and holds what it saved."""
        self.planning.forward_ended(saving)
        self._last = saving
        self._note_setting(saving)

    def _note_setting(self, saving: FittedSaving | ReplayedForward) -> None:
        chosen, rounds = saving.setting, self.context.runs_again
        self.was_exact = self.was_exact and chosen.exact and not rounds
        self._say(
            replace(chosen, exact=chosen.exact and not rounds), rounds=rounds and chosen.exact
        )

    def _note_peak(self, peak_nbytes: int, last: FittedSaving | ReplayedForward) -> None:
        self.peak_nbytes, self.peak_setting = peak_nbytes, last.setting.name
        self.highest_nbytes = max(peak_nbytes, self.highest_nbytes or 0)

    def finish(self) -> None:
        """The training is over: its last step counts as measured, if none with its setting was."""
        last, step = self._last, self._step
        if step is not None and last is not None and self.peak_setting != self.planning.setting:
            step.end()
            if step.peak is not None:
                self._note_peak(step.peak, last)
        self.close()

    def close(self) -> None:
        """End a measurement that runs. The model is not fitted any more."""
        self.interrupt()
        self._parameters = None
        self._closed = True
        self._beside.leave()

    def interrupt(self) -> None:
        """What is measured now will be no step of a training: forget it."""
        self._stop()
        self._last = None

    def _stop(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.close()

    def __del__(self) -> None:
        self._stop()  # the model died while a step was measured: the profiler must not run on

    def _say(self, chosen: Rung, *, rounds: bool) -> None:
        """One line when the setting of a kind of forward changes. rounds: see `say_setting`."""
        if self.planning.said == (chosen.name, chosen.exact):
            return
        self.planning.said = chosen.name, chosen.exact
        was_lossy, self._said_lossy = self._said_lossy, not chosen.exact
        say_setting(self.terms, chosen, rounds=rounds, was_lossy=was_lossy)
