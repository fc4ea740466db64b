"""Transitions after a measured step, in each phase."""

from collections import Counter
from dataclasses import replace

from elbowroom.fitting.attempts import Attempts
from elbowroom.fitting.commands import (
    CheckPlan,
    Command,
    ForgetScripts,
    Line,
    MakePlan,
    ReadMeter,
    Refuse,
    RefusePresets,
    Say,
    StartMeter,
    TakePlan,
    Then,
    say,
)
from elbowroom.fitting.observations import NoiseMeasured, NoiseUsed, RoomToWatch, StepMeasured
from elbowroom.fitting.parts import Margins
from elbowroom.fitting.phase import Phase
from elbowroom.fitting.planned import Step, begin_to_watch, begun, go_smaller, learn_anew
from elbowroom.fitting.state import FitState

_SLACK = 0.1  # of non-static bytes: if a rehearsed plan leaves as much unused, another plan is made
_NEARLY = 1.05  # of the budget: a given plan that exceeds it by no more is corrected, not dropped
_MAX_ROUNDS = 3  # plans that are replaced because a measurement exceeded the budget
_LEFT_FREE = 1 / 32  # of the budget: least correction if forwards would have held too much
_MAX_TRIES = 5  # inconclusive measurements after which a plan is followed as it is


def step_measured(state: FitState, seen: StepMeasured) -> Step:
    """Returns the state after a measured step, and its commands.

    A step above the budget is said, whatever it was measured for.
    """
    after, commands = _learned(state, seen)
    if seen.peak is None or seen.peak <= state.options.budget_nbytes or any(map(_tells, commands)):
        return after, commands
    return after, (say(Line.MEASURED, plan=state.plan, peak_nbytes=seen.peak), *commands)


def _tells(command: Command) -> bool:
    """Returns whether a command says what a step has taken."""
    if isinstance(command, Say):
        return command.line in (Line.MEASURED, Line.ABOVE, Line.OUTSIDE)
    return isinstance(command, Refuse | RefusePresets)


def _learned(state: FitState, seen: StepMeasured) -> Step:
    skipped_steps = state.skipped_steps if state.begins_with_less else 0
    if state.added_gradient_nbytes >= 0:
        nbytes = max(state.gradient_nbytes, state.memory.gradient_nbytes)
        state = replace(state, gradient_nbytes=nbytes)
    state = replace(state, skipped_steps=skipped_steps)
    state = replace(state, memory=seen.memory, others_learn=seen.others_learn)
    if state.is_smaller(seen.before_nbytes):
        return _smaller_measured(state)
    if state.waits_for_higher(seen.static_nbytes + seen.max_nbytes, seen.ran_again):
        return state.with_higher(lower=state.higher.lower + 1), ()
    state = state.with_higher(held_nbytes=0, others=Counter(), lower=0)
    if not state.saves_less(seen.before_nbytes):
        state = state.with_unexpected(smaller=0)
    if seen.peak is not None:
        if state.is_blind:
            state = replace(state, phase=Phase.VERIFYING, tries=0)
        state = replace(state, unmeasured=0)
    match state.phase:
        case Phase.SETTLED:
            return state, ()
        case Phase.WATCHING:
            return _watched(state, seen)
        case Phase.LAST_RESORT:
            return _last_resort_measured(state, seen)
        case Phase.GIVEN if seen.climbed:
            return _drop_given(state)
    if seen.writes and not seen.makes_states:
        return _written(state, seen)
    if seen.peak is None and state.plan is not None and not seen.others_learn:
        return _try_again(state, seen)
    if seen.peak is None or (seen.writes and seen.seen is None):
        return state, ()
    if state.plan is None:
        return _preset_measured(state, seen, seen.peak)
    return _plan_measured(state, seen, _with_states(state, seen, seen.peak))


def _smaller_measured(state: FitState) -> Step:
    """Learns nothing from a step that saved less than the one that made learning begin anew.

    A plan that was made by its own forward is discarded.
    """
    state = state.with_unexpected(smaller=state.unexpected.smaller + 1)
    if state.from_rehearsal and state.tries == 0:
        return state.fresh(), (ForgetScripts(),)
    return state, ()


def _new_resident_nbytes(state: FitState, seen: StepMeasured) -> int:
    """Returns bytes that are resident in later steps from the start, but were not in this one.

    These are optimizer states, created in this step or still to be created, and gradients that it
    leaves for later micro-batches.
    """
    after = state.memory
    gradient_nbytes = max(state.gradient_nbytes - after.gradient_nbytes, 0)  # released in it
    later_nbytes = after.static_nbytes + after.unallocated_state_nbytes + gradient_nbytes
    return max(0, later_nbytes - seen.static_nbytes)


def _with_states(state: FitState, seen: StepMeasured, peak_nbytes: int) -> int:
    """Returns the peak as if the optimizer's states had been resident throughout.

    The step's memory over time must be known.
    """
    return (
        peak_nbytes if seen.seen is None else seen.seen.peak_with(_new_resident_nbytes(state, seen))
    )


def _at_largest(state: FitState, seen: StepMeasured, peak_nbytes: int) -> int:
    """Returns the estimated peak of this step at the largest size."""
    static = seen.static_nbytes
    return static + int((peak_nbytes - static) * state.largest.numel / state.now.numel)


def _with_transients(state: FitState, seen: StepMeasured, peak_nbytes: int) -> FitState:
    rest = peak_nbytes - seen.static_nbytes - seen.after_nbytes
    learned = state.headroom.learned(rest * state.largest.numel / state.now.numel)
    return replace(state, headroom=learned)


def _allowing(
    state: FitState, seen: StepMeasured, peak_nbytes: int, new_nbytes: int = 0
) -> FitState:
    """Allows what this step held at most, if it is of the largest size and within the budget.

    peak_nbytes: as if what is born in it had stood throughout
    """
    slack = state.options.budget_nbytes - peak_nbytes
    if slack < 0 or state.now != state.largest:
        return state
    most = seen.static_nbytes + new_nbytes + seen.max_nbytes
    state = state.with_higher(ran_again=state.higher.ran_again | seen.ran_again)
    return replace(state, headroom=state.headroom.fitting(most, slack))


def _noted(state: FitState, peak_nbytes: int, *, was_profiled: bool = False) -> FitState:
    """Records the peak of a step under the plan."""
    chosen = state.chosen
    if chosen is None or chosen.plan is not state.plan:  # one that was given
        return state
    attempts = state.attempts.after(chosen, peak_nbytes, was_profiled=was_profiled)
    return replace(state, attempts=attempts)


def _preset_measured(state: FitState, seen: StepMeasured, own_nbytes: int) -> Step:
    """Returns the state after the first step, whose transients are known now."""
    new_nbytes, budget_nbytes = _new_resident_nbytes(state, seen), state.options.budget_nbytes
    peak_nbytes = _with_states(state, seen, own_nbytes + new_nbytes)
    fits = peak_nbytes <= budget_nbytes
    gone_nbytes = min(new_nbytes, state.memory.gradient_nbytes)  # if zero_grad() frees it
    may_fit = gone_nbytes > 0 and own_nbytes + new_nbytes - gone_nbytes <= budget_nbytes
    phase = Phase.IDLE if state.phase is Phase.IDLE else Phase.WRITING
    backward_nbytes = own_nbytes if seen.seen is None else seen.seen.backward_peak
    state = _with_transients(state, seen, backward_nbytes)
    state = replace(state, phase=phase, has_fit=fits)
    found = seen.preset_within(state.allowed_nbytes(0))
    if fits and (found is None or found > seen.preset):
        found = seen.preset
    if found is None and (own_nbytes > budget_nbytes or not new_nbytes):
        if not seen.may_measure:
            return state, (RefusePresets(seen.saving),)
        state = replace(state, infeasible=True)  # no preset fits, but a plan may
    elif found is None and seen.may_measure and may_fit:
        # Gradients that the step has made stand in the next forward. They may go before backward
        # (zero_grad() after forward), which makes them anew: no ground to refuse it unmeasured.
        state = replace(state, takes_anything=True)
    # A forward that climbs to codes is not profiled, and holds more than one that begins with them.
    # If it need not climb, none are taken: a plan may do with exact actions.
    climbs = found is not None and found > seen.preset and not state.takes_anything
    preset = seen.preset
    if found is not None and (climbs or state.options.presets[found].exact):
        preset = found
    if preset == seen.preset:
        state = _allowing(state, seen, peak_nbytes, new_nbytes)
    return replace(state, preset=preset), ()


def _written(state: FitState, seen: StepMeasured) -> Step:
    """Plans a profiled step, or keeps the preset that it ran with."""
    state = replace(state, tries=state.tries + 1)
    if seen.seen is None or seen.profile is None or seen.climbed:
        return _try_again(state, seen)
    followed = seen.seen.followed_peak
    lasting = followed if followed > state.options.budget_nbytes else seen.seen.peak
    peak_nbytes = _at_largest(state, seen, lasting)
    state = _noted(state, peak_nbytes, was_profiled=True)
    # What stands beside the model may vary: the next plan has room for the most of it.
    co_resident_nbytes = max(seen.co_resident_nbytes, state.max_co_resident_nbytes)
    profile = seen.profile.shifted(co_resident_nbytes - seen.co_resident_nbytes)
    profile = profile.with_outputs(max(state.outputs_nbytes - seen.outputs_nbytes, 0))
    state = replace(
        state,
        phase=Phase.VERIFYING,
        profile=profile,
        profiled=state.now,
        profiled_at=state.ran_at,
        from_rehearsal=False,
        has_fit=state.has_fit or peak_nbytes <= state.options.budget_nbytes,
        co_resident_nbytes=co_resident_nbytes,
        margins=Margins(),
        attempts=state.attempts.knowing(profile),
    )
    state = _with_transients(state, seen, seen.profile.peak)
    return _allowing(state, seen, seen.seen.peak), (MakePlan(),)


def _try_again(state: FitState, seen: StepMeasured) -> Step:
    """Measures again after an inconclusive measurement; after several, keeps the setting."""
    peak_nbytes = seen.peak
    if seen.climbed and state.from_rehearsal and state.profile is not None:
        # An estimated plan would climb in each step, and a step of two settings tells nothing.
        headroom = state.headroom.forgotten()
        state = replace(state, plan=None, preset=seen.preset, headroom=headroom)
    if peak_nbytes is None:
        state = replace(state, unmeasured=state.unmeasured + 1)
        if state.unmeasured < _MAX_TRIES:
            return state, ()
        return replace(state, phase=Phase.SETTLED), (say(Line.BLIND),)
    if state.tries < _MAX_TRIES:
        return state, ()
    state = replace(state, phase=Phase.SETTLED)
    if peak_nbytes <= state.options.budget_nbytes:
        return state, ()
    if seen.climbed:
        why = "hold more than was planned for"
        return state, (say(Line.ABOVE, peak_nbytes=peak_nbytes, why=why),)
    outside = say(Line.OUTSIDE, peak_nbytes=peak_nbytes, seen_nbytes=seen.before_nbytes)
    return state, (outside,)


def _last_resort_measured(state: FitState, seen: StepMeasured) -> Step:
    """Returns the state after a uniform preset was measured because no corrected plan fits.

    The setting with the lowest peak is kept.
    """
    if seen.peak is None:
        return state, ()
    state, budget_nbytes = replace(state, phase=Phase.SETTLED), state.options.budget_nbytes
    peak_nbytes = _at_largest(state, seen, seen.peak)
    least = state.attempts.least
    if peak_nbytes <= budget_nbytes:
        state = _with_transients(replace(state, has_fit=True), seen, seen.peak)
        return _allowing(state, seen, seen.peak), ()
    if state.refuses_last_resort and least is not None:
        if state.gains_gradients:
            return state.fresh(), (ForgetScripts(),)
        return state, (Refuse(least),)
    commands: tuple[Command, ...] = ()
    if least is not None and least.peak_nbytes < peak_nbytes:
        commands, peak_nbytes = (TakePlan(least.chosen),), least.peak_nbytes
    if peak_nbytes > budget_nbytes:
        why = "took no less by what else was tried"
        commands = (*commands, say(Line.ABOVE, peak_nbytes=peak_nbytes, why=why))
    return state, commands


def _plan_measured(state: FitState, seen: StepMeasured, own_nbytes: int) -> Step:
    """Returns the state after a step under the plan was measured."""
    plan = state.plan
    assert plan is not None
    peak_nbytes, budget_nbytes = _at_largest(state, seen, own_nbytes), state.options.budget_nbytes
    said = say(Line.MEASURED, plan=plan, peak_nbytes=peak_nbytes)
    state = replace(state, tries=state.tries + 1)
    diverged = seen.climbed and state.phase is not Phase.SMALLEST  # what is above it may climb
    if seen.ran_trials and peak_nbytes > max(budget_nbytes, plan.peak):
        return state, (said,)  # later steps do not test modules: the next one is measured
    if state.profile is None and peak_nbytes > budget_nbytes:
        state, commands = _correct_given(state, peak_nbytes, unknown_sites=seen.unknown_sites)
    elif diverged and state.profile is not None and state.tries > 1 and state.rounds < _MAX_ROUNDS:
        # Its forwards climb in each step: they may not hold as much as the plan assumes.
        margin = max(peak_nbytes - plan.peak, int(_LEFT_FREE * budget_nbytes))
        state = replace(state, rounds=state.rounds + 1).with_margin(margin)
        commands = (MakePlan(),)
    elif diverged or (seen.makes_states and peak_nbytes <= budget_nbytes):
        # A step that creates the optimizer's states has another peak, so the next step is measured.
        state, commands = _try_again(state, seen)
        if not state.settled and peak_nbytes <= budget_nbytes:
            return state, commands  # of many micro-batches before the update, none is said
    elif state.profile is None:
        state, commands = _settle_given(state, unknown_sites=seen.unknown_sites)
    else:
        state, commands = _verified(state, seen, own_nbytes)
    return state, (said, *commands)


def _verified(state: FitState, seen: StepMeasured, own_nbytes: int) -> Step:
    """Keeps the plan whose peak is now known, replans with a larger margin, or drops the plan.

    own_nbytes: the peak of this step, which need not be of the largest size
    """
    plan, profile, budget_nbytes = state.plan, state.profile, state.options.budget_nbytes
    assert plan is not None
    assert profile is not None
    peak_nbytes = _at_largest(state, seen, own_nbytes)
    state = _noted(_with_transients(state, seen, own_nbytes), peak_nbytes)
    slack = budget_nbytes - peak_nbytes
    if slack < 0 and state.waits_for_others:
        return state, ()
    if slack >= 0:
        state = _allowing(replace(state, has_fit=True), seen, peak_nbytes)
    estimated = state.from_rehearsal or state.ratio > 1
    useful = estimated and slack > _SLACK * (budget_nbytes - profile.static)
    if slack >= 0:
        known = tuple(one for one in state.proven if not state.now.covers(one))
        proven = () if state.now == state.largest else (state.now, *known)
        state = replace(state, proven=proven)
    elif state.proven:
        state, commands = learn_anew(state)
        return replace(state, exceeded=state.now.numel), commands
    if slack >= 0 and not (useful and state.rounds < _MAX_ROUNDS):
        return begin_to_watch(state)
    if state.rounds < _MAX_ROUNDS and state.phase is not Phase.SMALLEST:
        margin = peak_nbytes - plan.peak
        if slack > 0:  # half of it: the error of an estimate differs from moment to moment
            margin += slack // 2
        elif state.withdrawn:  # the profile says what is kept in their place; it tells no error
            margin = state.margin_nbytes
        state = replace(state, rounds=state.rounds + 1).with_margin(margin)
        return state, (MakePlan(fits=slack >= 0),)
    if state.is_scaled:
        return learn_anew(state)
    return go_smaller(state, seen.fallbacks)


def _settle_given(state: FitState, *, unknown_sites: bool) -> Step:
    """Keeps the given plan, which fits, if it matches the step."""
    plan = state.plan
    assert plan is not None
    if unknown_sites:
        return _drop_given(state)
    state = replace(state, phase=Phase.SETTLED, has_fit=True)
    if plan.watched:
        return state, (say(Line.NOISE, plan=plan),)
    if plan.is_lossy:
        return state, (say(Line.UNKNOWN, why="the plan was made without"),)
    return state, ()


def _correct_given(state: FitState, peak_nbytes: int, *, unknown_sites: bool) -> Step:
    """Profiles a step of a given plan that is a little above the budget, or drops the plan.

    A lossy plan is dropped, because a profiled step needs more memory (convolutions run on the
    whole batch); so is one whose step cannot be profiled, or not anywhere near the budget
    (`may_be_profiled`).
    """
    plan = state.plan
    assert plan is not None
    near = peak_nbytes <= _NEARLY * state.options.budget_nbytes
    writable = plan.exact and state.may_be_profiled and not unknown_sites
    if near and writable and state.phase is Phase.GIVEN:
        return replace(state, phase=Phase.CORRECTING, given=None, from_rehearsal=True), ()
    return _drop_given(state)


def _drop_given(state: FitState) -> Step:
    """Drops the given plan: its step does not fit, or differs from the plan's."""
    return state.fresh(), (say(Line.GIVEN, plan=state.plan), ForgetScripts())


def room_to_watch(state: FitState, seen: RoomToWatch) -> Step:
    """Watches a plan that leaves memory for a measurement; without one, keeps the verified plan.

    The steps of that plan are watched for what predicts the noise. More of them are if it is
    limited, and plans are made by it; else it is only said, if that takes no more than the budget.
    """
    if seen.plan is None and not seen.predicts and state.options.noise is None:
        noise = None
        if state.plan is not None and state.profile is not None:
            noise = state.plan.noise * state.profile.most_noise
        unknown = say(Line.UNKNOWN, why="the budget leaves no room to look", noise=noise)
        return replace(state, phase=Phase.SETTLED), (unknown,)
    if seen.plan is None:
        watching = replace(state.with_watched(resumes=state.phase), phase=Phase.WATCHING)
        return watching, (StartMeter(True),)
    state, commands = begun(state, seen.plan)
    watching = replace(state.with_watched(resumes=state.phase), phase=Phase.WATCHING)
    return watching, (*commands, StartMeter())


def _watched(state: FitState, seen: StepMeasured) -> Step:
    """Returns the state after a watched step.

    After several, or one above the budget, reads the meter.
    """
    too_much = seen.peak is not None and seen.peak > state.options.budget_nbytes
    return state, ((ReadMeter(),) if seen.watched or too_much else ())


def noise_measured(state: FitState, seen: NoiseMeasured) -> Step:
    """Replans once the noise of codes is known; only says it if it is predicted without a limit."""
    if seen.predicted and state.options.noise is None:
        state = replace(state.with_watched(added=seen.added), phase=Phase.SETTLED)
        return state, (say(Line.ADDED, added=seen.added),)
    assert state.profile is not None
    profile = replace(state.profile, noise=seen.shares)
    state = replace(state, phase=state.watched.resumes, profile=profile, rounds=0)
    plans = (MakePlan(), Then(NoiseUsed(is_measured=seen.shares is not None)))
    if state.options.noise is not None:
        # From here on no plan or preset may be fallen back to that was chosen without the limit.
        attempts = Attempts().knowing(profile)
        state = replace(state, attempts=attempts).with_watched(predicts=seen.predicted)
        # What is known from a forward alone is too careful to refuse a training that has fitted:
        # where no plan is within the limit by that, the smallest ones are measured.
        return state, plans if state.from_rehearsal else (CheckPlan(), *plans)
    return state, plans


def noise_used(state: FitState, seen: NoiseUsed) -> Step:
    """Logs the noise that codes of the plan add."""
    if not seen.is_measured:
        return state, (say(Line.UNKNOWN, why="the watched steps did not tell"),)
    if state.plan is not None and state.plan.is_lossy:
        return state, (say(Line.NOISE, plan=state.plan),)
    return state, ()
