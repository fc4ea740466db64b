"""The state machine of a fit: (state, observation) -> (next state, commands).

These are pure functions of values, which use neither PyTorch nor a clock nor a log. Commands that
`execute.py` carries out may result in another observation, which changes the state again.
`phase.py` has a diagram of the phases; `measured.py` handles measured steps, and `planned.py` the
answers of planners.
"""

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from elbowroom.fitting.attempts import Attempts
from elbowroom.fitting.commands import (
    LET_ROWS_WAIT,
    BeginPlan,
    Command,
    ForgetScripts,
    HoldAsGiven,
    Line,
    MakePlan,
    PlanByForward,
    Refuse,
    RefusePresets,
    say,
)
from elbowroom.fitting.measured import noise_measured, noise_used, room_to_watch, step_measured
from elbowroom.fitting.observations import (
    CannotRehearse,
    CodesWithdrawn,
    CoResidentBytes,
    Fallbacks,
    ForwardEnded,
    ForwardProfiled,
    GivenHeld,
    HeldMore,
    LargerKnown,
    LayersHeldTooMuch,
    ModelJoined,
    NoiseMeasured,
    NoiseUsed,
    NoPlan,
    NoPlanLeft,
    NothingToDo,
    NotRepeatable,
    Observation,
    OptionsChanged,
    OutputsHeld,
    PlanMade,
    PlanOutgrown,
    PlanTaken,
    Rehearsed,
    RehearsedInVain,
    RoomToWatch,
    RowsTakeTooMuch,
    SmallestMade,
    StepBegan,
    StepMeasured,
    UnexpectedStep,
)
from elbowroom.fitting.phase import Phase
from elbowroom.fitting.planned import (
    Step,
    no_plan,
    plan_made,
    plan_taken,
    rehearsed,
    rehearsed_in_vain,
    run_layers_again,
    smallest_made,
    tries_more,
)
from elbowroom.fitting.state import SAFEST_EXACT, FitState, ReplacedState

if TYPE_CHECKING:
    from elbowroom.fitting.options import FitOptions, MemoryState
    from elbowroom.plan.profile import Profile

_MUCH = 0.01  # of the budget: if this much more is resident beside the model, it is replanned
_MAX_UNEXPECTED = 3  # unexpected steps after which learning begins anew, at most


def advance(state: FitState, seen: Observation) -> Step:
    """Returns the state after this observation, and the commands to execute, in order."""
    match seen:
        case StepBegan():
            return _step_began(state, seen)
        case CoResidentBytes(nbytes):
            return _co_resident(state, nbytes)
        case OutputsHeld(nbytes):
            return _outputs_held(state, nbytes)
        case ModelJoined(memory):
            return replace(state, memory=memory), ()
        case GivenHeld():
            return _given_held(state, seen)
        case ForwardEnded():
            return _forward_ended(state, seen)
        case StepMeasured():
            return step_measured(state, seen)
        case OptionsChanged(options):
            return _options_changed(state, options)
        case LargerKnown(headroom):
            return replace(state, headroom=state.headroom.inherited(headroom)), ()
        case NotRepeatable(profile):
            return _not_repeatable(state, profile)
        case CodesWithdrawn(profile):
            return _codes_withdrawn(state, profile)
        case UnexpectedStep(held_nbytes):
            return _diverged(state, held_nbytes)
        case HeldMore():
            return _held_more(state, seen)
        case LayersHeldTooMuch():
            return _layers_held_too_much(state, seen.fallbacks)
        case RowsTakeTooMuch():
            return state, () if state.is_learned else (LET_ROWS_WAIT,)
        case NoPlanLeft(fallbacks):
            return tries_more(state, fallbacks) or (state, ())
        case NothingToDo():
            return state.fresh(), (ForgetScripts(),)
        case PlanOutgrown():
            return replace(state.fresh(), infeasible=True), (ForgetScripts(),)
        case CannotRehearse():
            return _cannot_rehearse(state)
        case ForwardProfiled():
            return _forward_profiled(state, seen)
        case Rehearsed():
            return rehearsed(state, seen)
        case RehearsedInVain():
            return rehearsed_in_vain(state, seen)
        case PlanMade():
            return plan_made(state, seen)
        case PlanTaken():
            return plan_taken(state, seen)
        case NoPlan():
            return no_plan(state, seen)
        case SmallestMade():
            return smallest_made(state, seen)
        case RoomToWatch():
            return room_to_watch(state, seen)
        case NoiseMeasured():
            return noise_measured(state, seen)
        case NoiseUsed():
            return noise_used(state, seen)


def _step_began(state: FitState, seen: StepBegan) -> Step:
    """Begins a step. After an unexpected step, learning begins anew; a larger call is replanned."""
    commands: tuple[Command, ...] = ()
    gains = _gains_gradients(state, seen.memory)
    was_unexpected = state.unexpected.is_last
    if seen.grew or was_unexpected or (gains and not state.follows_given):
        refuses, varies = state.may_refuse, was_unexpected and not state.may_refuse
        known = replace(state, before=None).with_unexpected(is_last=False)
        may_go_back = (seen.grew and not refuses) or (varies and state.has_fit)
        before = ReplacedState(known, seen.calls) if may_go_back else None
        state = replace(state.fresh(), before=before, infeasible=seen.grew)
        state = state.with_unexpected(varies=varies)
        if seen.grew:
            state = state.with_unexpected(nbytes=0, smaller=0)
        commands = (ForgetScripts(),)
    state = replace(state, memory=seen.memory, now=seen.signature)
    if gains:
        phase = Phase.GIVEN if state.follows_given else state.phase
        state = replace(state, phase=phase, gradient_nbytes=seen.memory.gradient_nbytes)
    elif state.waits_for_fuller_step:
        state = replace(state, skipped_steps=state.skipped_steps + 1)
    if state.largest.structure is None:
        state, more = _first_step_began(state)
    elif not state.covers(seen.signature):
        before_numel = state.largest.numel
        state = state.with_call(seen.signature).with_unexpected(varies=False)
        state, more = _plan_again(state, state.largest.numel / before_numel)
    else:
        more, state = (), state.with_call(seen.signature)
        if state.is_unproven:
            state = replace(state, phase=Phase.VERIFYING, rounds=0, tries=0)
    return state, (*commands, *more)


def _gains_gradients(state: FitState, memory: "MemoryState") -> bool:
    """Returns whether more gradients are resident than in any step before, and may be too much.

    This is so once micro-batches accumulate: the profiled step began without gradients.
    """
    planned, state = state.plan or state.profile, replace(state, memory=memory)
    nbytes = state.added_gradient_nbytes
    return (
        nbytes > 0 and planned is not None and planned.peak + nbytes > state.options.budget_nbytes
    )


def _first_step_began(state: FitState) -> Step:
    """Begins the first step of a kind, with the given plan if there is one."""
    state = replace(state.with_call(state.now), plan=state.given)
    if state.given is None:
        return state, ()
    return replace(state, phase=Phase.GIVEN), (BeginPlan(), HoldAsGiven())


def _given_held(state: FitState, seen: GivenHeld) -> Step:
    """Reserves for transients what a given plan leaves besides resident and held bytes."""
    given = state.given
    assert given is not None
    stands = seen.memory.static_nbytes + seen.memory.unallocated_nbytes
    headroom = state.headroom.learned(given.peak - stands - given.held_nbytes)
    return replace(state, memory=seen.memory, headroom=headroom), ()


def _co_resident(state: FitState, nbytes: int) -> Step:
    """Replans if more is resident beside the model than when the step was profiled."""
    more = nbytes - state.co_resident_nbytes
    if state.profile is None or more <= _MUCH * state.options.budget_nbytes:
        return state, ()
    profile = state.profile.shifted(more)
    state = replace(
        state, profile=profile, co_resident_nbytes=nbytes, max_co_resident_nbytes=nbytes
    )
    return _plan_again(state, 1.0)


def _outputs_held(state: FitState, nbytes: int) -> Step:
    """Replans if outputs of earlier forwards that stand in a forward may be too much for the plan.

    The first step has none. The program may hold those of all the others.
    """
    more, budget_nbytes = nbytes - state.outputs_nbytes, state.options.budget_nbytes
    if more <= _MUCH * budget_nbytes:
        return state, ()
    planned, profile = state.plan or state.profile, state.profile
    if profile is not None:
        profile = profile.with_outputs(more)
    state = replace(state, outputs_nbytes=nbytes, profile=profile)
    if planned is not None and planned.peak + more <= budget_nbytes:
        return state, ()
    if planned is None:  # what is measured next has these outputs in it
        return (state.fresh(), (ForgetScripts(),)) if state.settled else (state, ())
    if state.follows_given:
        return replace(state, phase=Phase.GIVEN, rounds=0, tries=0), ()
    if profile is None or not state.from_rehearsal:
        return _plan_again(state, 1.0)
    attempts = Attempts().knowing(profile)
    state = replace(state, phase=Phase.VERIFYING, rounds=0, tries=0, attempts=attempts)
    return state, (ForgetScripts(), MakePlan(replans=True))


def _options_changed(state: FitState, options: "FitOptions") -> Step:
    """Replans by other options; what steps took by the old ones bounds another budget alone."""
    alike = replace(options, budget_nbytes=state.options.budget_nbytes) == state.options
    measured_least = state.taken_nbytes if alike else 0
    state = replace(state, options=options, attempts=Attempts(), measured_least=measured_least)
    return _plan_again(state, 1.0)


def _plan_again(state: FitState, growth: float) -> Step:
    """Replans from the known profile, if possible, for a larger call or another budget.

    To neither does a state of before apply.
    """
    state = replace(state, before=None)
    if state.headroom.transient_nbytes is None or state.from_rehearsal or state.infeasible:
        return state.fresh(), (ForgetScripts(),)
    profile, attempts = state.profile, Attempts()
    watching = state.phase is Phase.WATCHING  # which ends: the free bytes are for another plan
    if profile is not None and state.watched.predicts:  # there may be room to measure it now
        profile, watching = replace(profile, noise=None), True
    state = replace(
        state,
        headroom=state.headroom.grown(growth),
        rounds=0,
        tries=0,
        unmeasured=0,
        has_fit=False,
        profile=profile,
        watched=replace(
            state.watched, is_done=state.watched.is_done and not watching, predicts=False
        ),
        preset=min(max(state.preset, SAFEST_EXACT), len(state.options.presets) - 1),
        attempts=attempts if profile is None else attempts.knowing(profile),
    )
    if profile is not None:
        return replace(state, phase=Phase.VERIFYING), (ForgetScripts(), MakePlan(replans=True))
    phase = Phase.GIVEN if state.follows_given else Phase.WRITING
    return replace(state, phase=phase), (ForgetScripts(),)


def _not_repeatable(state: FitState, profile: "Profile | None") -> Step:
    """Replans without a module whose second run gives another result."""
    if profile is None:
        return state.fresh(), (ForgetScripts(),)
    return _plan_again(replace(state, profile=profile), 1.0)


def _codes_withdrawn(state: FitState, profile: "Profile") -> Step:
    """Keeps the plan, which holds more from now on. If it was settled on, it is measured again."""
    state = replace(state, profile=profile, withdrawn=state.plan is not None)
    if not state.settled or state.plan is None:
        return state, ()
    phase = Phase.GIVEN if state.follows_given else Phase.VERIFYING
    return replace(state, phase=phase, rounds=0, tries=0, attempts=Attempts()), ()


def _diverged(state: FitState, held_nbytes: int) -> Step:
    """Learns again after a step that differs from those before, and holds more.

    Some models take another path in each step, so this happens a limited number of times.
    """
    count = state.unexpected.count + 1
    learns = count <= _MAX_UNEXPECTED
    line = say(Line.LARGER_STEP, held_nbytes=held_nbytes, learns=learns)
    said = () if count > _MAX_UNEXPECTED + 1 else (line,)
    return state.with_unexpected(count=count, is_last=learns, nbytes=0, smaller=0), said


def _held_more(state: FitState, seen: HeldMore) -> Step:
    """Measures a step like this one: it took another path, and may be above the budget.

    Where nothing was planned it is profiled, so that there can be a plan.
    """
    known, count = state.higher.ran_again, state.higher.count + 1
    others = Counter({name: seen.ran_again[name] for name in seen.ran_again - known})
    state = state.with_higher(count=count, held_nbytes=seen.held_nbytes, others=others, lower=0)
    phase = Phase.WRITING if state.plan is None else Phase.VERIFYING
    phase = Phase.GIVEN if state.follows_given else phase
    return replace(state, phase=phase, rounds=0, tries=0), ()


def _layers_held_too_much(state: FitState, fallbacks: Fallbacks) -> Step:
    """Allows recomputation of recurrent layers in a forward that was never profiled."""
    if state.options.exact or state.is_learned:
        return state, ()
    return state, run_layers_again(rounds=not fallbacks.layers)


def _forward_ended(state: FitState, seen: ForwardEnded) -> Step:
    """Records how far this forward had to climb; refuses a budget that cannot be met."""
    if seen.impossible:
        least = state.attempts.least
        if least is not None and least.peak_nbytes > state.options.budget_nbytes:
            return state, (Refuse(least),)
        return state, (RefusePresets(seen.saving),)
    if state.headroom.transient_nbytes is None:
        state = replace(state, preset=seen.preset)
    if state.unexpected.is_last:
        state = state.with_unexpected(nbytes=max(state.unexpected.nbytes, seen.before_nbytes))
    return state, ()


def _cannot_rehearse(state: FitState) -> Step:
    """Has a step profiled, whatever it takes, and plans made from what was measured then.

    The first step of all is measured at the preset that forward climbs to.
    """
    if state.phase is Phase.GUESSING and not state.infeasible:
        return replace(state, takes_anything=True), ()
    state = replace(state.fresh(), phase=Phase.WRITING, takes_anything=True)
    return state, (ForgetScripts(),)


def _forward_profiled(state: FitState, seen: ForwardProfiled) -> Step:
    """Plans the step by a forward that was rehearsed."""
    co_resident_nbytes = max(state.memory.co_resident_nbytes, state.max_co_resident_nbytes)
    state = replace(state, profiled=state.now, co_resident_nbytes=co_resident_nbytes)
    return state.knowing(seen.forward_profile.profile), (PlanByForward(seen.forward_profile),)
