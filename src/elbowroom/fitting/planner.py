"""One plan, from the first forward of its kind to a step that is known to fit.

1. The first forward starts at the safest exact preset of the ladder (`plan/presets.py`). Transients
   are not known yet; six tensors of the largest size are reserved for them. If the held bytes come
   closer to the budget than that, nothing is held any more, and forward runs twice more: once to be
   recorded (`rehearse`), then with a plan whose backward is an estimate (`plan/rehearsal.py`).
   Where that cannot be measured (on another thread than the main one, or under another profiler),
   three are reserved, and forward climbs to a stricter preset immediately instead.
2. The allocator measures this step; if the step creates the optimizer's states, it records the
   memory over time, so that these states count once. Now the transients are known, so the mildest
   preset that fits is chosen, and the next step is profiled.
3. A plan is made from this profile (`plan/make.py`), with an action for each tensor, and followed.
   Its first step is measured: if the peak is higher than predicted, a new plan is made for a budget
   that is smaller by the difference, up to three times. The error of one plan's prediction says
   little about another plan: so if no such plan fits, the plans of the least predicted peak are
   measured, too. If these exceed the budget, the last resort is a uniform preset. A preset that was
   measured to fit before is measured again, and the setting with the lowest peak is kept; without
   such a preset the strictest one is measured, if it may fit; otherwise the step is refused, with
   the lowest measured peak.
4. A verified plan with lossy codes is watched for a few steps, if a plan leaves enough memory for
   this measurement (`measure/shares.py`). Then the noise that each code adds to the gradient is
   known, and another plan is made and verified. Where no plan leaves enough, and `noise=` limits
   it, the noise is predicted from how the gradient is distributed over the weights in as many
   steps (`measure/reach.py`). Until then it is predicted from sizes. No plan or preset that is
   predicted to add more than the limit is followed, not even to measure what it takes.

A given plan (`er.fit(..., plan=)`) replaces 1 and 2: the first step follows it, and is measured. If
it does not fit, or was made for another step, learning begins as above.

Shapes may vary inside a bucket (`signature.py`). Measurements are scaled to the largest size that
was seen: the bytes of a step beyond the resident ones grow with its number of elements. When a
larger step comes, a new plan is made for it from the same profile, and the next step of about that
size is measured. If no such plan fits, learning begins anew, from steps of the largest size.

Micro-batches whose gradients accumulate are steps, too. The first begins without gradients and
needs the least memory. So once a step begins with more gradients than the steps before, and may not
fit, learning begins anew from such steps, and steps that begin with fewer are not measured.

`phase.py` has a diagram of the phases, and `transitions.py` the transitions.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elbowroom.errors import BudgetTooSmall, NothingHeld
from elbowroom.fitting.calls import Calls, Rest, least_rest, plan_rest
from elbowroom.fitting.commands import Line
from elbowroom.fitting.execute import (
    chosen_by_forward,
    execute,
    fallbacks_of,
    observed,
    repeatable,
    settings_of,
    step_of,
)
from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.measurement import Measurement
from elbowroom.fitting.messages import say_unscripted, warn_unexpected, warn_unmeasured
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.observations import (
    CannotRehearse,
    CodesWithdrawn,
    CoResidentBytes,
    ForwardEnded,
    ForwardProfiled,
    HeldMore,
    LargerKnown,
    LayersHeldTooMuch,
    ModelJoined,
    NoPlanLeft,
    NothingToDo,
    NotRepeatable,
    Observation,
    OptionsChanged,
    OutputsHeld,
    PlanOutgrown,
    RowsTakeTooMuch,
    StepBegan,
    UnexpectedStep,
)
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.phase import Phase
from elbowroom.fitting.refusals import without_frames
from elbowroom.fitting.rehearse import rehearse
from elbowroom.fitting.signature import Signature
from elbowroom.fitting.state import FitState
from elbowroom.fitting.state_view import StateView
from elbowroom.fitting.transitions import advance
from elbowroom.measure.meter import NoiseMeter
from elbowroom.measure.reach import ReachMeter
from elbowroom.measure.recorder import StepRecorder
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.plan.rehearsal import CAREFUL, LIKELY, Care, ForwardProfile
from elbowroom.runtime.context import Context
from elbowroom.runtime.repeats import TESTED_CALLS, Trials
from elbowroom.runtime.replay.script import Script
from elbowroom.runtime.replay.scripts import Forward, Scripts
from elbowroom.runtime.replay.tracer import Tracer
from elbowroom.runtime.undo import Undo

_MAX_SCRIPTS = 16  # for calls of several sizes, and for the forwards of a step
_MAX_UNWRITTEN = 4  # forwards without a script, or that left theirs, until none is written


class Planner(StateView):
    """Plans one kind of forward: observations change its `FitState`, which returns commands.

    calls   the forwards of a step
    meter   measures the noise of codes, or what predicts it; None: neither
    redoes  the current forward can begin again, if the plan turns out not to fit
    tries_more   where no plan of a rehearsal fits, restrictions are relaxed and it is planned again
    leaves_room  other models, of which nothing is known yet, may share this step: it is planned for
                 the least memory
    is_forgotten  steps need something else now: nothing more is learned from those that have begun
    said    the setting that was logged last, and whether it is exact
    settings_said  how many settings were logged
    said_last  the last line that a command had logged
    forward_profile  of the first forward of the current step, from a rehearsal; None: there was
            none, or it would record something else now
    """

    def __init__(
        self,
        options: FitOptions,
        model_state: ModelState,
        context: Context,
        given: Plan | None = None,
        *,
        learns: bool = True,
    ) -> None:
        """given: the plan of the first step. learns: otherwise it keeps the safest preset."""
        nothing, phase = Signature(None), Phase.GUESSING if learns else Phase.SETTLED
        super().__init__(
            FitState(options, MemoryState(0), nothing, nothing, phase=phase, given=given)
        )
        self.model_state, self.context = model_state, context
        self.calls = Calls()
        self.meter: NoiseMeter | ReachMeter | None = None
        self.redoes = self.leaves_room = self.tries_more = self.is_forgotten = False
        self.said: tuple[str, bool] | None = None
        self.settings_said = 0
        self.said_last: tuple[Line, dict[str, Any]] | None = None
        self.forward_profile: ForwardProfile | None = None
        self._untested = 0  # forwards in which recomputed modules are tested (`repeats.py`)
        self._learned = context.learned
        self._trials = 0  # as the step began
        self._running = Forward(0, nothing, 1)  # which forward of a step runs, and its signature
        self.forget_scripts()

    def _tell(self, observation: Observation) -> None:
        """Changes the state by an observation, and executes commands until there are no more."""
        plan, preset = self.state.plan, self.state.preset
        self.state, commands = advance(self.state, observation)
        if self.state.plan is not plan or self.state.preset != preset:
            self.forget_scripts()  # one may have been written while its plan was being verified
        if self.state.phase is not Phase.WATCHING:
            self.meter = None
        if self.state.settled:  # a plan that is measured again later is told again
            self.said_last = None
        for command in commands:
            answer = execute(self, command)
            if answer is not None:
                self._tell(answer)

    def forget_scripts(self) -> None:
        """Forgets the scripts of settled forwards, so that they are recorded again."""
        self.scripts = Scripts(most=_MAX_SCRIPTS, most_unwritten=_MAX_UNWRITTEN)

    def try_modules(self) -> None:
        """Tests in the next forwards whether a second run of a module gives the same result."""
        self._untested = TESTED_CALLS if self.recompute else 0

    def inherit(self, larger: "Planner") -> None:
        """Bounds transients by those of a larger kind of forward until they are measured."""
        self._tell(LargerKnown(larger.state.headroom))

    def begin(self, memory: MemoryState, signature: Signature) -> None:
        """Begins a step with its first forward."""
        grew, calls = self.calls.grew, self.calls.before_it_grew
        self.forward_profile = None
        self.calls.begin()
        self._trials = Trials.count
        self._running = Forward(0, signature, signature.numel)
        self._tell(StepBegan(memory, signature, grew, calls))
        self._tell(CoResidentBytes(self.memory.co_resident_nbytes))
        self._tell(OutputsHeld(self.memory.outputs_nbytes))
        if self._learned != self.context.learned:  # in the backward of the last step, too
            self._learned = self.context.learned
            self.forget_scripts()
            if self.profile is not None:
                self._tell(CodesWithdrawn(repeatable(self, self.profile)))

    def use(self, options: FitOptions) -> None:
        """Replaces the options, and plans again."""
        self._tell(OptionsChanged(options))

    @property
    def ran_trials(self) -> bool:
        """True if modules were tested in this step, which takes memory beside what is held."""
        return Trials.count > self._trials

    @property
    def has_trials(self) -> bool:
        """True if modules are tested in the next forward (`takes_trials`)."""
        return self._untested > 0

    def takes_trials(self) -> bool:
        """Returns whether this forward tests if a second run of a module gives the same result.

        Call this once a forward.
        """
        self._untested -= 1
        return self._untested >= 0

    def leave_out_unrepeatable(self) -> None:
        """Replans without what was found not to be possible (`repeatable`)."""
        profile = self.profile
        self._tell(NotRepeatable(None if profile is None else repeatable(self, profile)))

    def outgrow(self) -> None:
        """Discards a plan that a forward, which was undone since, has held too much for."""
        self._tell(PlanOutgrown())

    def context_of(
        self,
        recorder: StepRecorder | None,
        *,
        may_climb: bool = True,
        after: FittedSaving | None = None,
    ) -> FittedSaving:
        """Returns the context of the forward that begins now.

        after: the context of the one before it in the same step.
        """
        tracer = Tracer() if self._is_written_down(recorder, after) else None
        return FittedSaving(self, recorder, may_climb=may_climb, after=after, tracer=tracer)

    def _is_written_down(self, recorder: StepRecorder | None, after: FittedSaving | None) -> bool:
        """Returns whether the forward that begins is recorded as a script, to be replayed."""
        if recorder is not None or not self._may_be_written:
            return False
        is_planned = after is None or not after.climbed
        return is_planned and self.scripts.lacks(self._running)

    @property
    def _may_be_followed(self) -> bool:
        may = self.settled and self.meter is None and not self.calls.grew
        return may and self._learned == self.context.learned

    @property
    def _may_be_written(self) -> bool:
        """True if the next step may be settled, and run as this one does.

        The script of a plan is recorded while the plan is verified. It is forgotten with the plan
        if that does not fit.
        """
        verifies = self.plan is not None and self.state.phase in (Phase.VERIFYING, Phase.SMALLEST)
        return (self.settled or verifies) and self.meter is None and not self.calls.grew

    def repeat(self) -> Script | None:
        """Begins the last step once more; returns the script of its first forward."""
        self.calls.begin()
        self._running = Forward(0, self.now, self.now.numel)
        return self.next_script()

    def next_script(self) -> Script | None:
        """Returns the script that the forward replays; None: the forward is examined."""
        known = self.scripts.begin(self._running) if self._may_be_followed else ()
        return known[0] if known else None

    def has_run(self, nodes: int) -> None:
        """Notes that a forward was not compared with its script, and how many nodes it has made."""
        self.scripts.has_run(nodes, self._running)

    def diverged_from(self, script: Script) -> None:
        """Notes that the forward was another one than its script says."""
        self.scripts.was_left(script, self._running)

    def prepare(self, forward: Callable[[], Any]) -> None:
        """Rehearses before the first step. If all may be kept, the step is measured instead."""
        self.rehearse(forward)
        if self.plan is not None and self.plan.changes_nothing:
            self._tell(NothingToDo())

    def rehearse(
        self, forward: Callable[[], Any], given: object = (), *, is_inside: bool = False
    ) -> None:
        """Records a forward that holds nothing, and plans the step from it.

        A forward that was rehearsed in this step already is not run again.

        given: its inputs. is_inside: backward continues into the waiting graph of another fitted
        model. Raises BudgetTooSmall where no plan fits. Does nothing where the forward cannot be
        measured.
        """
        if self.forward_profile is None:
            self.forward_profile = rehearse(
                self, self.model_state, forward, is_inside=is_inside, inputs=given
            )
        if self.forward_profile is not None:
            self._tell(ForwardProfiled(self.forward_profile))

    def rehearse_until_planned(
        self, forward: Callable[[], Any], undo: Undo, given: object, *, is_inside: bool = False
    ) -> None:
        """Rehearses, and undoes each rehearsal, until a plan fits or none is left to try.

        Raises BudgetTooSmall if no plan fits.
        """
        while True:
            self.tries_more = True
            try:
                return self.rehearse(forward, given, is_inside=is_inside)
            except NothingHeld:
                self._tell(CannotRehearse())  # backward runs inside forward, to compute a force
                return None
            except BudgetTooSmall as error:
                if not self._tries_more():
                    raise
                without_frames(error)
            finally:
                self.tries_more = False
                undo.back()

    def _tries_more(self) -> bool:
        """Returns whether a restriction was relaxed because no plan fits; learning begins anew."""
        before = self.state
        self._tell(NoPlanLeft(fallbacks_of(self)))
        return self.state is not before

    def lets_layers_run_again(self) -> bool:
        """Returns whether recurrent layers may be recomputed; called inside a forward."""
        self._tell(LayersHeldTooMuch(fallbacks_of(self)))
        return self.context.runs_again

    def lets_rows_wait(self) -> bool:
        """Returns whether large rows may be made when they are read; called inside a forward."""
        self._tell(RowsTakeTooMuch())
        return self.context.rows_wait

    def join(self, memory: MemoryState) -> None:
        """Counts another model, which runs in this step.

        memory: as the step began, with that of the other model
        """
        self._tell(ModelJoined(memory))

    def go_on(self, signature: Signature, waits: frozenset[int] | None = None) -> bool:
        """Goes on with another forward of the step; returns whether the plan knew of it.

        waits: a part of the step is over, and these forwards wait for a later backward
        """
        given = self.plan if self.state.follows_given else None
        from_rehearsal = self.state.from_rehearsal
        known = self.calls.go_on(signature, given, from_rehearsal=from_rehearsal, waits=waits)
        self._running = Forward(self.calls.at, signature, signature.numel)
        if known and given is not None:
            self.calls.note(signature, None)
        return known

    def rehearse_more(
        self,
        forward: Callable[[], Any],
        signature: Signature,
        last: FittedSaving,
        given: object = (),
        *,
        leaves_room: bool = False,
    ) -> Rest:
        """Records an unplanned forward of the step, and plans it within the rest of the budget.

        last: the saving of the one before; given: its inputs, if they stand anyway; leaves_room:
        more forwards may follow, so the plan is the one of the least peak. Raises BudgetTooSmall
        where the first of all steps has two like forwards, and no plan of both is known.
        """
        is_blind = False
        try:
            forward_profile = rehearse(self, self.model_state, forward, after=last, given=given)
            is_blind = forward_profile is None
        except NothingHeld:  # backward runs inside of forward
            forward_profile = None
        self.calls.note(signature, forward_profile)
        self.calls.grew = True
        if forward_profile is None:
            rest = Rest(self.options, self.context, None)
            self._warn_unprofiled(rest, is_blind=is_blind)
            return rest
        settings = replace(settings_of(self), ratio=1.0, margin_nbytes=0, recompute_margin_nbytes=0)

        def profile_with(care: Care) -> Profile:
            return step_of(self, forward_profile.with_co_resident(last.ledger.held_nbytes), care)

        plan = plan_rest(profile_with(CAREFUL), settings)
        if plan is not None and leaves_room:
            plan = least_rest(
                profile_with(CAREFUL), settings, exact=plan.exact or self.options.exact
            )
        if plan is not None:
            return Rest(self.options, self.context, plan)
        self._refuse_two(forward_profile, signature)
        least = least_rest(profile_with(CAREFUL), settings, exact=self.options.exact)
        above_nbytes = least.peak - self.options.budget_nbytes
        encoded = last.encode_held(last.ledger.held_nbytes - above_nbytes)
        if encoded is None:
            self._warn_unexpected(least)
            return Rest(self.options, self.context, least)
        plan = plan_rest(profile_with(CAREFUL), settings)
        if plan is None:
            # The strictest preset holds less than a plan whose worst moment is in backward.
            self._warn_unexpected(least)
            plan = plan_rest(profile_with(LIKELY), settings)
        return Rest(self.options, self.context, plan, encoded)

    def _warn_unexpected(self, least: Plan | None) -> None:
        """Warns, once in a step, of a forward that may not fit."""
        if not self.calls.was_said:
            warn_unexpected(self.options, least)
        self.calls.was_said = True

    def _warn_unprofiled(self, rest: Rest, *, is_blind: bool) -> None:
        """Warns of a forward that was not rehearsed; once, where that is so in every step."""
        if not is_blind:
            self._warn_unexpected(None)
        elif not self.calls.was_said_blind:
            self.calls.was_said_blind = True
            warn_unmeasured(self.options, self.options.presets[rest.preset].name)

    def _refuse_two(self, forward_profile: ForwardProfile, signature: Signature) -> None:
        """Raises BudgetTooSmall where no plan of two such forwards is known.

        Otherwise the next step would be refused. A step that may be an exception is not refused.
        """
        state, more = self.state, fallbacks_of(self)
        known = state.knowing(forward_profile.profile)
        may_try_more = more.blamed_classes or known.may_gain(more)
        alike = state.now == signature and self.calls.at == 1
        is_first = state.tries == 0 and state.given is None
        if alike and is_first and state.may_refuse and not may_try_more:
            chosen_by_forward(self, forward_profile)

    def diverge(self, held_nbytes: int) -> None:
        """Learns again after a step that differs from those before, and has held so many bytes."""
        self._tell(UnexpectedStep(held_nbytes))

    def forward_ended(self, saving: FittedSaving) -> None:
        """Records how far this forward climbed; refuses a budget that cannot be met."""
        ledger = saving.ledger
        if self.state.holds_too_much(ledger.max_nbytes):
            saving.diverge()
        elif self.state.is_higher(ledger.max_nbytes, saving.ran_again):
            held_nbytes = self.memory.static_nbytes + ledger.max_nbytes
            self._tell(HeldMore(held_nbytes, saving.ran_again))
        self._tell(ForwardEnded(saving.preset, saving.impossible, saving, ledger.before_nbytes))
        tracer = saving.tracer
        if tracer is None:
            return
        if tracer.script is None or saving.climbed:
            self.scripts.has_none()
            say_unscripted(tracer.why)
            return
        self.scripts.add(tracer.script, self._running)

    def learn(
        self,
        last: FittedSaving,
        step: Measurement,
        memory: MemoryState,
        *,
        others_learn: bool = False,
    ) -> None:
        """Changes the state by the measurement of the last step.

        memory: the memory as the next one begins. others_learn: see `Neighbors`.
        """
        knows = self.is_forgotten or (self.settled and not self.state.is_blind)
        if knows or not self.calls.is_whole(had_backward=last.backward_began):
            return
        seen = observed(self, last, step, memory.with_co_resident(step.memory.co_resident_nbytes))
        self._tell(replace(seen, others_learn=others_learn))
