"""One plan, from the first forward of its kind to a step that is known to fit.

1. The first forward starts at the safest exact rung of the ladder (`plan/ladder.py`). Transients
   are not known yet; six tensors of the largest size are set aside for them. If what is held comes
   closer to the budget than that, nothing is held any more, and forward runs twice again: once to
   be written down (`rehearse`), then by a plan whose backward is an estimate
   (`plan/rehearsal.py`). Where that cannot be measured (not on the main thread, or under somebody's
   profiler), three are set aside, and forward climbs to a stricter rung on the spot instead.
2. That step is measured by the allocator, moment by moment if it makes the optimizer's states, so
   that those count once. With its transients known, the mildest rung that fits is
   taken, and the next step is written down moment by moment.
3. From that profile a plan is made (`plan/make.py`), each tensor with an action of its own, and
   followed. The first step under it is measured: if it needs more than was predicted, the plan is
   made again with that much less, up to three times. What one plan was wrong by says little of
   another: so if none is left, those of the least predicted peak are measured, too. If they are
   above the budget, it is refused with the least that they took; or, where the uniform rung has
   been seen to fit before, that is measured again, and what took least of all stays.
4. A plan with lossy codes that has been verified is watched for a few steps, if it can be made so
   that there is room to look (`measure/shares.py`). Then it is known what each code adds to the
   gradient, and the plan is made, and verified, again.

A plan that is given to begin with (`er.fit(..., plan=)`) takes the place of 1 and 2: the first step
follows it, and is measured. If it does not fit, or does not know the step, all is learned as above.

Shapes may vary inside a bucket (`signature.py`). Whatever is learned counts for the largest that
was seen: what a smaller step needs above what stands grows with the number of its elements. When a
larger one comes, the plan is made again for it from the same profile, and the next step of about
that size is measured. If no such plan fits, all is learned again, from steps of the largest size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from elbowroom.errors import BudgetTooSmall, NothingHeld
from elbowroom.fitting.attempts import Attempts, KnownStep, Taken
from elbowroom.fitting.calls import Calls, Rest, plan_rest
from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.measurement import Measurement
from elbowroom.fitting.messages import (
    say_measured,
    say_noise,
    say_unknown,
    say_unscripted,
    warn_above,
    warn_given,
    warn_outside,
    warn_runs_again,
    warn_smallest,
    warn_stray,
    warn_uncorrected,
    warn_unexpected,
)
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.noise_probing import room_nbytes
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.planner_settings import PlannerSettings
from elbowroom.fitting.refusal import measured_refusal, refusal
from elbowroom.fitting.rehearse import plan_by_forward, rehearsed
from elbowroom.fitting.signature import Signature
from elbowroom.fitting.state_formats import Chosen
from elbowroom.measure.interval import may_measure
from elbowroom.measure.meter import NoiseMeter
from elbowroom.measure.recorder import StepRecorder
from elbowroom.measure.shares import STEPS, menu_meter, shares_of
from elbowroom.plan.ladder import choose
from elbowroom.plan.make import LOSSY_HELPS
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.plan.rehearsal import CAREFUL, LIKELY, Heard, with_backward
from elbowroom.runtime.context import Context
from elbowroom.runtime.repeats import TRIED
from elbowroom.runtime.replay.scribe import Scribe
from elbowroom.runtime.replay.script import Script

_SAFEST_EXACT = 1  # index of "exact" in every ladder
_SLACK = 0.1  # of what is not static: unused by a plan of a rehearsal, it is worth another plan
_NEAR = 0.75  # of the largest call: large enough to verify a plan by
_NEARLY = 1.05  # of the budget: a plan that was given and takes no more is corrected, not dropped
_MUCH = 0.01  # of the budget: if as much more stands beside the model, it is planned again
_MOST_ROUNDS = 3  # plans that are made again because a measurement broke the budget
_MOST_STRAYS = 3  # steps that held more than those before, and were learned from anew
_MOST_SCRIPTS = 16  # for calls of several sizes, and for the forwards of a step
_LOOKS_AGAIN = 256  # forwards that are known, until one is looked at all the same
_MOST_UNWRITTEN = 4  # forwards without a script, or that strayed from it, until none is written
_MOST_TRIES = 5  # forwards without a backward of their own, before a plan is given up


class _Fitted(NamedTuple):
    """What steps with so many forwards were settled on."""

    plan: Plan | None
    profile: Profile | None
    rung: int
    transient_nbytes: int | None
    calls: int


class Planning:
    """What forwards of one kind run at, and how it is found.

    stock      as this step began
    profile    of the step that was written down
    rehearsed  its backward is an estimate
    plan       that is followed; None: all tensors are at `terms.rungs[rung]`
    settled    nothing more is to be learned
    outgrown   the least rung has been measured, and is too much
    given      a plan to begin with; None: there is none, or not any more
    meter      watches what codes add to the gradient; None: nobody does
    now        the call that runs, or has run last; of a step that has several, the first
    calls      the forwards of a step
    largest    the least signature that covers all of them
    redoes     the forward that runs can begin again, if the plan turns out to be no good
    said       the setting that the user was told of last, and whether it is exact
    """

    def __init__(self, terms: FitOptions, owned: ModelState, context: Context) -> None:
        self.terms = terms
        self.context = context
        self.stock = MemoryState(0)
        self.now = self.largest = Signature(None)
        self._running = 0, self.now  # which forward of a step runs, and what it is given
        self.redoes = False
        self.said: tuple[str, bool] | None = None
        self._untried = 0  # forwards in which modules that run again are tried (`repeats.py`)
        self._profiled = self.largest  # the call that was written down
        self._started_over = False
        self.calls = Calls()
        self._owned = owned
        self._allowance = Headroom()
        self._beside_nbytes = 0  # what stood beside the model in the profile
        self._strays = 0
        self._varies = False  # a step was within the budget, and another one not like it
        self._chosen: Chosen | None = None  # what the plan is a part of
        self._is_recurrent = False  # of what was written down, layers could run again
        self._gave_up: Taken | None = None  # the least that was measured, when no plan was left
        self._fitted: _Fitted | None = None  # what was settled before a step had more forwards
        self._start_over()

    def _start_over(self) -> None:
        """Forget what was measured: as before the first forward."""
        self.plan: Plan | None = None
        self.given: Plan | None = None
        self.profile: Profile | None = None
        self._allowance = self._allowance.forgotten()
        self.rung = _SAFEST_EXACT
        # By which plans have been too hopeful: where modules run again, and where none does.
        self._margins = {True: 0, False: 0}
        self._rounds = self._tries = 0
        self.rehearsed = self.settled = self.outgrown = False
        self.meter: NoiseMeter | None = None
        self._was_watched = self._has_strayed = self._has_fit = self._is_last_resort = False
        self._tried = Attempts()
        self._was_rehearsed = False  # so the uniform rung was not seen to fit
        self._forget_scripts()

    def _forget_scripts(self) -> None:
        self._scripts: dict[tuple[int, Signature], Script] = {}  # of settled forwards, in steps
        self._unwritten = _MOST_UNWRITTEN  # forwards that may yet turn out to have no script
        self._replayed = 0  # forwards

    @property
    def setting(self) -> str:
        """What forwards run at: "plan", or the name of a rung."""
        return "plan" if self.plan is not None else self.terms.rungs[self.rung].name

    @property
    def numel(self) -> int:
        """Elements of the largest call."""
        return self.largest.numel

    def covers(self, signature: Signature) -> bool:
        """Whether what was learned is safe for this call, too."""
        learned = self.plan is not None or self.settled
        return learned and self.largest.covers(signature)

    def inherit(self, larger: "Planning") -> None:
        """Until its own are measured, transients are at most those of a larger kind."""
        self._allowance = self._allowance.inherited(larger._allowance)

    def begin(self, stock: MemoryState, signature: Signature) -> None:
        """A step begins with its first forward."""
        if self.calls.grew or self._has_strayed:
            fitted = self._as_fitted() if self.calls.grew and not self.may_refuse else None
            self._varies = self._has_strayed and not self.may_refuse
            self._start_over()
            self._fitted, self.outgrown = fitted, self.calls.grew
        self.calls.begin()
        self.stock, self.now, self._running = stock, signature, (0, signature)
        if self.largest.structure is None:
            self.largest, self.plan = signature, self.given
            if self.given is not None:
                self._untried = TRIED if self.given.recompute else 0
                self._owned.states.begin_with(self.given, self, self.terms)
                self.stock = stock = self._stands()
                stands = stock.static_nbytes + stock.unborn_nbytes
                rest = self.given.peak - stands - self.given.held_nbytes
                self._allowance = self._allowance.learned(rest)
        elif not self.largest.covers(signature):
            before, self.largest = self.largest, self.largest.joined(signature)
            self._varies = False
            self._plan_again(self.largest.numel / before.numel)
        self._make_room_beside()

    def takes_trials(self) -> bool:
        """Whether a module may turn out in this forward not to give the same when it runs again.

        Ask once a forward.
        """
        self._untried -= 1
        return self._untried >= 0

    def leave_out_unrepeatable(self) -> None:
        """Such a module was found: plan without it."""
        if self.profile is None:
            self._start_over()
            return
        self.profile = self._repeatable(self.profile)
        self._plan_again(1.0)

    def _make_room_beside(self) -> None:
        """More stands beside the model than when the step was written down: plan with it."""
        more = self.stock.beside_nbytes - self._beside_nbytes
        if self.profile is None or more <= _MUCH * self.terms.budget_nbytes:
            return
        self.profile = self.profile.shifted(more)
        self._beside_nbytes += more
        self._plan_again(1.0)

    def use(self, terms: FitOptions) -> None:
        """Replace the options, and plan again."""
        self.terms = terms
        self._plan_again(1.0)

    def _plan_again(self, growth: float) -> None:
        """The largest call has grown, or the budget is another."""
        if self._allowance.transient_nbytes is None or self.rehearsed or self.outgrown:
            self._start_over()
            return
        self._allowance = self._allowance.grown(growth)
        self.settled, self._rounds, self._tries = False, 0, 0
        self._forget_scripts()
        self._has_fit = self._is_last_resort = False
        self._tried = Attempts()
        if self.profile is not None:
            self._tried = self._tried.knowing(self.profile)
        self.rung = max(self.rung, _SAFEST_EXACT)
        try:
            if self.profile is not None:
                self._plan(self.profile)
        except BudgetTooSmall:
            self._start_over()

    def _as_fitted(self) -> "_Fitted":
        transient = self._allowance.transient_nbytes
        return _Fitted(self.plan, self.profile, self.rung, transient, self.calls.before_it_grew)

    def _go_back(self) -> None:
        """A step with more forwards has no plan: so it was an odd one, or is above the budget."""
        fitted, self._fitted = self._fitted, None
        assert fitted is not None
        self.plan, self.profile, self.rung = fitted.plan, fitted.profile, fitted.rung
        self.calls.forget(fitted.calls)
        if fitted.transient_nbytes is not None:
            self._allowance = self._allowance.learned(fitted.transient_nbytes)
        self.outgrown = self.rehearsed = False
        self.settled = self._has_fit = True

    @property
    def _ratio(self) -> float:
        """How much larger than the profiled call the largest is."""
        return self.largest.numel / self._profiled.numel if self.profile is not None else 1.0

    @property
    def _making(self) -> PlannerSettings:
        helps = self._owned.states.lossy_helps() or LOSSY_HELPS
        once, again = self._margins[False], self._margins[True]
        return PlannerSettings(self.terms, self._ratio, once, again, helps)

    @property
    def _margin_nbytes(self) -> int:
        """The margin of plans of the kind that is followed."""
        return self._margins[bool(self.recompute)]

    @property
    def recompute(self) -> frozenset[str]:
        """Modules whose forward runs again in backward."""
        return frozenset() if self.plan is None else self.plan.recompute

    def context_of(
        self,
        recorder: StepRecorder | None,
        *,
        may_climb: bool = True,
        after: FittedSaving | None = None,
    ) -> FittedSaving:
        """For the forward that begins now. after: that of the one before in the same step."""
        scribe = Scribe() if self._is_written_down(recorder, after) else None
        return FittedSaving(self, recorder, may_climb=may_climb, after=after, scribe=scribe)

    def _is_written_down(self, recorder: StepRecorder | None, after: FittedSaving | None) -> bool:
        """Return whether the forward that begins is to be written down, to be followed."""
        if recorder is not None or self._untried >= 0 or not self._may_be_followed:
            return False
        is_planned = after is None or not after.climbed
        return is_planned and self._running not in self._scripts and self._unwritten > 0

    @property
    def _may_be_followed(self) -> bool:
        return self.settled and self.meter is None and not self.calls.grew

    def repeat(self) -> Script | None:
        """The step before begins once more. Return what its first forward follows."""
        self.calls.begin()
        self._running = 0, self.now
        return self.next_script()

    def next_script(self) -> Script | None:
        """Return the script that the forward that begins follows; None: it is looked at."""
        script = self._scripts.get(self._running) if self._may_be_followed else None
        if script is not None:
            self._replayed += 1
            if self._replayed % _LOOKS_AGAIN == 0:  # what no guard sees would go on for ever
                self._unwritten = _MOST_UNWRITTEN
                return None
        return script

    def forget_script(self) -> None:
        """The forward was another one than its script says."""
        self._scripts.pop(self._running, None)
        self._unwritten -= 1

    def prepare(self, forward: Callable[[], Any]) -> None:
        """Rehearse before the first step. If all may be kept, that step is better measured."""
        self.rehearse(forward)
        if self.plan is not None and self.plan.changes_nothing:
            self._start_over()

    def rehearse(self, forward: Callable[[], Any]) -> None:
        """Write down a forward that holds nothing; plan the step by it.

        Raises BudgetTooSmall where no plan of it fits. Does nothing where it cannot be measured.
        """
        heard = rehearsed(self, self._owned, forward)
        if heard is None:
            return
        self._profiled, self._beside_nbytes = self.now, self.stock.beside_nbytes
        self._is_recurrent = heard.profile.is_recurrent
        try:
            self._plan_by_forward(self.calls.joined(heard).beside(self._beside_nbytes))
        except BudgetTooSmall:
            if self._fitted is None:
                raise
            self._go_back()

    def lets_layers_run_again(self, *, now: bool = False) -> bool:
        """No plan fits what recurrent layers save. Whether they do without it from now on.

        now: in the middle of a forward, of which nothing is known yet
        """
        learned = self.plan is not None or self.profile is not None or self.settled
        if self.terms.exact or (learned if now else not self._may_run_layers_again):
            return False
        warn_runs_again(self.terms)
        self.context.runs_again = True
        if not now:
            self._start_over()
        return True

    def _repeatable(self, profile: Profile) -> Profile:
        """Without modules that cannot run again."""
        names = self.context.unrepeatable
        return profile.never_again(names, alike=self.context.blames_classes)

    def tries_more(self) -> bool:
        """No plan fits. Whether there may be more of them, for which all is learned again."""
        if self.context.unrepeatable and self.context.blames_classes:
            self.context.blames_classes = False
            self._start_over()
            return True
        return self.lets_layers_run_again()

    @property
    def _may_run_layers_again(self) -> bool:
        return self._is_recurrent and not (self.context.runs_again or self.terms.exact)

    def go_on(self, signature: Signature) -> bool:
        """The step goes on with another forward. Whether what stands was made with it in mind."""
        given = self.plan if self.plan is self.given else None
        known = self.calls.go_on(signature, given, rehearsed=self.rehearsed)
        self._running = self.calls.at, signature
        if known and given is not None:
            self.calls.note(signature, None)
        return known

    def rehearse_more(
        self, forward: Callable[[], Any], signature: Signature, last: FittedSaving
    ) -> Rest:
        """Write down a forward that the step was not planned with; give it what is left.

        last: the saving of the one before
        """
        try:
            heard = rehearsed(self, self._owned, forward, after=last)
        except NothingHeld:  # backward runs inside of forward
            heard = None
        self.calls.note(signature, heard)
        self.calls.grew = True
        plan = None
        if heard is not None:
            alone = self._with_backward(heard.beside(last.ledger.held_nbytes), CAREFUL)
            plan = plan_rest(
                alone, replace(self._making, ratio=1.0, margin_nbytes=0, again_nbytes=0)
            )
        if plan is None or plan.peak > self.terms.budget_nbytes:
            warn_unexpected(self.terms, plan)
        return Rest(self.terms, self.context, plan)

    def _with_backward(self, heard: Heard, care: float) -> Profile:
        born = self._owned.unborn_gradients(), self.stock.unborn_state_nbytes
        seen = self._repeatable(heard.profile)
        return with_backward(replace(heard, profile=seen), *born, care)

    def _plan_by_forward(self, heard: Heard) -> None:
        standing = self._owned.standing()
        heard = replace(heard, profile=replace(heard.profile, standing=standing))
        steps = {care: self._with_backward(heard, care) for care in (CAREFUL, LIKELY)}
        chosen = plan_by_forward(
            steps.__getitem__,
            self._owned.states,
            self,
            self._making,
            measures=not self._may_run_layers_again,
        )
        self._tried = Attempts(tuple(KnownStep(step, rehearsed=True) for step in steps.values()))
        self._was_rehearsed = True
        self._follow(self._taken(chosen))
        self.rehearsed, self.outgrown = True, False

    def _taken(self, chosen: Chosen) -> Plan:
        """The plan, once states are held as it was made for."""
        chosen = self._owned.states.take(chosen, self, self.terms)
        self._chosen, self.stock = chosen, self._stands()
        self.profile = chosen.candidate.profile
        return chosen.plan

    def _stands(self) -> MemoryState:
        """Once states are held in another format."""
        return self._owned.stock().beside(self.stock.beside_nbytes)

    def allowed_nbytes(self, guessed_nbytes: int) -> int:
        """What may be held for backward. As long as nothing is measured, the rest is guessed."""
        return self._allowance.allowed_nbytes(self.terms, self.stock, self.plan, guessed_nbytes)

    def surely_allowed_nbytes(self) -> int:
        """The same without guesses."""
        return self._allowance.surely_allowed_nbytes(self.terms, self.stock, self.plan)

    @property
    def may_refuse(self) -> bool:
        """Not a step of a kind that was measured within the budget: it is another one for once.

        Nor while all is learned anew from such a step, where the next may be another again.
        """
        return not (self._has_fit or self.settled or self._varies)

    def stray(self) -> None:
        """This step is another than those before, and holds more: learn again.

        Some models take another path in each step; those are not learned for ever.
        """
        self._strays += 1
        self._has_strayed = self._strays <= _MOST_STRAYS
        if self._strays > _MOST_STRAYS + 1:
            return
        warn_stray(self.terms, learns=self._has_strayed)

    def forward_ended(self, saving: FittedSaving) -> None:
        """Note how far this forward had to climb; refuse a budget that cannot be met."""
        if saving.impossible:
            least = self._gave_up if self._is_last_resort else self._tried.least
            if least is not None and least.peak_nbytes > self.terms.budget_nbytes:
                raise self._measured_refusal(least)
            raise self._refusal(saving)
        if self._allowance.transient_nbytes is None:
            self.rung = saving.rung
        scribe = saving.scribe
        if scribe is None:
            return
        if scribe.script is None or saving.climbed:
            self._unwritten -= 1
            say_unscripted(scribe.why)
            return
        while len(self._scripts) >= _MOST_SCRIPTS:
            del self._scripts[next(iter(self._scripts))]
        self._scripts[self._running] = scribe.script

    @property
    def wants_measuring(self) -> bool:
        """Whether there is something to learn from the step that begins."""
        if self.settled:
            return False
        if self.meter is not None:
            return True
        if self._started_over:
            return self.now == self.largest
        if self.profile is None or self._is_last_resort:
            return True
        if self.plan is None:
            return self.now.numel > self._profiled.numel
        return self.now.numel >= _NEAR * self.largest.numel

    @property
    def wants_writing(self) -> bool:
        """Whether the step that begins should be written down, not just measured."""
        unborn_states = self.stock.unborn_state_nbytes > 0
        if self._is_last_resort:
            return False
        if self.plan is None:  # when backward was over tells what it needs beside those states
            return self._allowance.transient_nbytes is not None or unborn_states
        if self.plan is self.given:  # written down it would take more than the plan says (no turns)
            return False
        better = self.rehearsed or self.now.numel > self._profiled.numel
        return unborn_states or (better and not self.plan.recompute)

    def learn(self, last: FittedSaving, step: Measurement, stock: MemoryState) -> None:
        """What did the last step need? stock: as the next one begins."""
        if self.settled or not self.calls.is_whole:
            return
        self.stock = stock = stock.beside(step.stock.beside_nbytes)
        if self.meter is not None:
            self._look(step)
            return
        if self._is_last_resort:
            self._settle_last_resort(step)
            return
        if last.climbed and self.plan is not None and self.plan is self.given:
            self._drop_given()
            return
        born = max(0, stock.static_nbytes - step.stock.static_nbytes)
        if step.writes and not step.makes_states:
            self._take_profile(step, last)
        elif step.peak is None or (step.writes and step.profile is None):
            return
        elif self.plan is None:
            self._relax(last, step, born)
        elif step.profile is not None:
            self._verify(last, step, step.profile.peak_with(born))
        else:
            self._verify(last, step, step.peak)

    def _relax(self, last: FittedSaving, step: Measurement, born_nbytes: int) -> None:
        """After the first step: its transients are known now. born: the optimizer's states."""
        assert step.peak is not None
        seen, peak_nbytes = step.profile, step.peak + born_nbytes
        if seen is not None:
            peak_nbytes = seen.peak_with(born_nbytes)
        self._learn_transient(last, step, step.peak if seen is None else seen.backward_peak)
        rungs, budget_nbytes = self.terms.rungs, self.terms.budget_nbytes
        self._has_fit = peak_nbytes <= budget_nbytes
        found = choose(rungs, last.storages, self.allowed_nbytes(0))
        if peak_nbytes <= budget_nbytes and (found is None or found > last.rung):
            found = last.rung
        if found is None and (step.peak > budget_nbytes or not born_nbytes):
            if not may_measure(self._owned.device):
                raise self._refusal(last)
            self.outgrown = True  # no rung fits, but a plan may
        lossy = found is not None and not rungs[found].exact
        self.rung = last.rung if found is None or lossy else found  # a plan may do with exact ones

    def _take_profile(self, step: Measurement, last: FittedSaving) -> None:
        """The step was written down: plan, or stay at the rung that it ran at."""
        self._tries += 1
        if step.profile is None or last.climbed:
            self._try_again(last, step)
            return
        self._note(self._at_largest(step, step.profile.peak))
        seen = self._repeatable(step.profile)
        self.profile = replace(seen, standing=self._owned.standing())
        self._profiled, self._beside_nbytes = self.now, step.stock.beside_nbytes
        self.rehearsed, self._margins = False, {True: 0, False: 0}
        self._tried = replace(self._tried.knowing(self.profile), is_smallest=False)
        self._learn_transient(last, step, self.profile.peak)
        self._plan(self.profile)

    def _try_again(self, last: FittedSaving, step: Measurement) -> None:
        """The measurement was inconclusive. After some that were, stay with what there is."""
        self.settled = self._tries >= _MOST_TRIES
        budget_nbytes = self.terms.budget_nbytes
        if not self.settled or step.peak is None or step.peak <= budget_nbytes:
            return
        if last.climbed:
            warn_above(self.terms, step.peak, "hold more than was planned for")
            return
        warn_outside(self.terms, step.peak, last.ledger.before_nbytes)

    def _settle_last_resort(self, step: Measurement) -> None:
        """No plan was found by corrections: how is it without? What took least stays."""
        if step.peak is None:
            return
        self.settled, self._is_last_resort = True, False
        peak_nbytes, least = self._at_largest(step, step.peak), self._tried.least or self._gave_up
        if peak_nbytes <= self.terms.budget_nbytes:
            self._has_fit = True
            return
        if self._was_rehearsed and least is not None:
            raise self._measured_refusal(least)
        if least is not None and least.peak_nbytes < peak_nbytes:
            self._follow(self._taken(least.chosen))
            peak_nbytes = least.peak_nbytes
        if peak_nbytes > self.terms.budget_nbytes:
            warn_above(self.terms, peak_nbytes, "took no less by what else was tried")

    def _plan(self, profile: Profile) -> None:
        try:
            chosen = self._owned.states.choose(
                profile, self, self._making, estimated=self.rehearsed
            )
        except BudgetTooSmall:
            if self._is_scaled:
                self._learn_anew()
                return
            if self._rounds > 0 or self.rehearsed:
                self._go_smaller()
                return
            self.plan, self._is_recurrent = None, profile.is_recurrent
            if self.tries_more():
                return
            if profile.peak > self.terms.budget_nbytes:
                raise
            self.settled = True  # the uniform rung has been seen to fit
            return
        plan = self._taken(chosen)
        self._follow(plan)
        if plan.changes_nothing:
            self.plan, self.rung, self.settled = None, 0, self._ratio == 1

    def _go_smaller(self) -> None:
        """Plans have needed more than the budget, and no other is left by what they were wrong by.

        Of one that is rehearsed, and runs no module again, the next step is written down: that ends
        all guessing. Else the plans of the least predicted peak are measured, one after another.
        """
        assert self.plan is not None
        least = self._tried.least
        assert least is not None
        if least.peak_nbytes <= self.terms.budget_nbytes:
            self._follow(self._taken(least.chosen))
            self.settled = True
            return
        if self.tries_more():
            return
        self._margins = {True: 0, False: 0}
        if self.rehearsed and not self.plan.recompute:
            self._follow(self.plan)
            return
        states, making = self._owned.states, self._making
        self._tried, found = self._tried.next_smallest(
            lambda step, again: states.smallest(step, self, making, recompute=again)
        )
        if found is None:
            self._give_up(least)
            return
        if not self._tried.is_smallest:
            warn_smallest(self.terms, least.peak_nbytes)
        self.rehearsed, self._tried = found.rehearsed, replace(self._tried, is_smallest=True)
        self._follow(self._taken(found.chosen))

    def _give_up(self, least: Taken) -> None:
        """No plan has fit. The uniform rung may: it holds little at all moments, not at the worst.

        Where none was seen to fit before the first plan, that is the strictest of them.

        least: of what was measured
        """
        if self._was_rehearsed:
            self.rung = len(self.terms.rungs) - 1
        self.plan, self._is_last_resort, self._gave_up = None, True, least
        warn_uncorrected(self.terms, least.peak_nbytes, self.terms.rungs[self.rung].name)

    def _measured_refusal(self, least: Taken) -> BudgetTooSmall:
        """The refusal that names the least measured peak: a budget that does if it is given."""
        least = self._tried.least_of_smallest or least
        plan, nbytes = least.chosen.plan, least.peak_nbytes
        if not plan.exact:  # what codes hold varies a little with the data
            nbytes += plan.held_nbytes // 256
        return measured_refusal(self.terms, self._owned, self.stock, plan, nbytes)

    def _follow(self, plan: Plan) -> None:
        assert self.profile is not None
        self._forget_scripts()
        self.plan, self._untried = plan, TRIED if plan.recompute else 0
        peak_nbytes = plan.peak + self._margin_nbytes
        above = peak_nbytes > self.terms.budget_nbytes  # followed all the same, to measure it
        other = 0 if above else peak_nbytes - self.profile.static - plan.held_nbytes
        self._allowance = self._allowance.learned(other)

    def _verify(self, last: FittedSaving, step: Measurement, peak_nbytes: int) -> None:
        """A step under the plan was measured."""
        assert self.plan is not None
        budget_nbytes = self.terms.budget_nbytes
        peak_nbytes = self._at_largest(step, peak_nbytes)
        say_measured(self.terms, self.plan, peak_nbytes)
        self._tries += 1
        if self.profile is None and peak_nbytes > budget_nbytes:
            self._correct_given(peak_nbytes)
            return
        strayed = last.climbed and not self._tried.is_smallest  # what is above the budget may climb
        if strayed or (step.makes_states and peak_nbytes <= budget_nbytes):
            # A step that makes the optimizer's states has a peak of its own: the next one tells.
            self._try_again(last, step)
            return
        if self.profile is None:
            self._settle_given()
            return
        self._learn_transient(last, step, peak_nbytes)
        self._note(peak_nbytes)
        slack = budget_nbytes - peak_nbytes
        if slack >= 0:
            self._has_fit = True
            if self.now == self.largest:
                most = step.stock.static_nbytes + last.ledger.most_nbytes
                self._allowance = self._allowance.fitting(most + slack)
        estimated = self.rehearsed or self._ratio > 1
        useful = estimated and slack > _SLACK * (budget_nbytes - self.profile.static)
        if slack >= 0 and not (useful and self._rounds < _MOST_ROUNDS):
            self.settled = not self._begin_to_watch()
            return
        if self._rounds < _MOST_ROUNDS and not self._tried.is_smallest:
            self._rounds += 1
            margin = peak_nbytes - self.plan.peak
            if slack > 0:  # half of it: an estimate is not too careful by the same at all moments
                margin += slack // 2
            self._margins[bool(self.recompute)] = margin
            self._plan(self.profile)
            return
        if self._is_scaled:
            self._learn_anew()
            return
        self._go_smaller()

    @property
    def _is_scaled(self) -> bool:
        """What was measured was another call than the largest: no ground to refuse."""
        return self.now != self.largest or self._ratio > 1

    def _learn_anew(self) -> None:
        """From steps of the largest size."""
        self._start_over()
        self._started_over = True

    def _note(self, peak_nbytes: int) -> None:
        """A step under the plan took so much."""
        if self._chosen is not None and self._chosen.plan is self.plan:  # not one that was given
            self._tried = self._tried.after(self._chosen, peak_nbytes)

    def _settle_given(self) -> None:
        """The plan that was given fits: keep it, if it knows the step."""
        assert self.plan is not None
        if self.plan.strangers:
            self._drop_given()
            return
        self.settled = self._has_fit = True
        if self.plan.watched:
            say_noise(self.terms, self.plan)
        elif self.plan.is_lossy:
            say_unknown(self.terms, "the plan was made without")

    def _correct_given(self, peak_nbytes: int) -> None:
        """The plan that was given is above the budget: if by little, write down a step of it.

        Not a lossy one, which takes more in a step that is written down (no turns), nor one that
        runs modules again, which cannot be.
        """
        assert self.plan is not None
        near = peak_nbytes <= _NEARLY * self.terms.budget_nbytes
        writable = self.plan.exact and not (self.plan.recompute or self.plan.strangers)
        if near and writable and self.plan is self.given:
            self.given, self.rehearsed = None, True
        else:
            self._drop_given()

    def _drop_given(self) -> None:
        """The step of the plan that was given does not fit, or is not the one that it knows."""
        assert self.plan is not None
        warn_given(self.terms, self.plan)
        self._start_over()

    def _begin_to_watch(self) -> bool:
        """Go on with a plan that leaves room for a meter. False: nothing to watch, or no room."""
        assert self.plan is not None
        assert self.profile is not None
        if not self.plan.is_lossy or self._was_watched:
            return False
        self._was_watched = True
        margin = self._margin_nbytes + room_nbytes(self.plan)
        watched = self._making.plan_for(self.profile, margin, exact=self.terms.exact)
        if watched is None:
            say_unknown(self.terms, "the budget leaves no room to look")
            return False
        self._follow(watched)
        self.meter = menu_meter(probes=1)
        return True

    def _look(self, step: Measurement) -> None:
        """A step was watched. Plan again once it is known what the codes add."""
        assert self.meter is not None
        assert self.profile is not None
        too_much = step.peak is not None and step.peak > self.terms.budget_nbytes
        if self.meter.step < STEPS and not too_much:
            return
        self.meter.harvest()
        shares, self.meter = shares_of(self.meter.table), None
        self.profile, self._rounds = replace(self.profile, noise=shares), 0
        if self.terms.noise is not None:  # what is refused now must not fall back to a rung
            self._owned.states.choose(self.profile, self, self._making)
        self._plan(self.profile)
        if shares is None:
            say_unknown(self.terms, "the watched steps did not tell")
        elif self.plan is not None and self.plan.is_lossy:
            say_noise(self.terms, self.plan)

    def _at_largest(self, step: Measurement, peak_nbytes: int) -> int:
        """What this step would have needed if it had been the largest."""
        static = step.stock.static_nbytes
        return static + int((peak_nbytes - static) * self.largest.numel / self.now.numel)

    def _learn_transient(self, last: FittedSaving, step: Measurement, peak_nbytes: int) -> None:
        rest = peak_nbytes - step.stock.static_nbytes - last.ledger.after_nbytes
        self._allowance = self._allowance.learned(rest * self.largest.numel / self.now.numel)

    def _refusal(self, saving: FittedSaving) -> BudgetTooSmall:
        return refusal(
            saving, self.terms, self._owned, self.stock, self._allowance.transient_nbytes
        )
