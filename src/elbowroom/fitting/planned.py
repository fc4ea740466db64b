"""Transitions after a planner's answer: the plan is followed, or an alternative is tried.

No plan fits -> while a model that runs inside the step is learning, the step is measured again
             -> all that plans may do is allowed (`tries_more`)
             -> a plan that was measured to fit is followed again
             -> the plans of the least predicted peak are measured, one after another; such a step
                of an estimate is profiled, which replaces all estimates
             -> the uniform preset is measured (the last resort)
If no plan of a profiled step fits, and none was followed, the smallest ones are measured where they
come near, and the budget is refused otherwise.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from elbowroom.fitting.attempts import Attempts, Taken
from elbowroom.fitting.commands import (
    BLAME_NO_CLASSES,
    LET_ROWS_WAIT,
    OPEN_CHECKPOINTS,
    RUN_LAYERS_AGAIN,
    RUN_PRODUCTS_AGAIN,
    RUN_STRETCHES_AGAIN,
    TAKE_SMALL,
    BeginPlan,
    CheckPlan,
    Command,
    ForgetCalls,
    ForgetScripts,
    Line,
    MakeRoomToWatch,
    MakeSmallest,
    Raise,
    Refuse,
    TakePlan,
    say,
)
from elbowroom.fitting.observations import (
    Fallbacks,
    NoPlan,
    PlanMade,
    PlanTaken,
    Rehearsed,
    RehearsedInVain,
    SmallestMade,
)
from elbowroom.fitting.parts import Margins
from elbowroom.fitting.phase import Phase
from elbowroom.fitting.state import PLAIN, FitState

if TYPE_CHECKING:
    from elbowroom.plan.plan import Plan

Step = tuple[FitState, tuple[Command, ...]]
_NEAR = 1.1  # of the budget
_LITTLE = 0.005  # of a step: a plan that saves less time is not worth a measurement


def learn_anew(state: FitState) -> Step:
    """Discards all measurements, and learns again from steps of the largest size."""
    largest = state.most or state.largest
    state = replace(state.fresh(), only_largest=True, largest=largest, most=None, measured_least=0)
    return state, (ForgetScripts(),)


def begun(state: FitState, plan: "Plan") -> Step:
    """Follows a plan that was made from the profile."""
    profile, state = state.profile, replace(state, plan=plan)
    assert profile is not None
    peak_nbytes = plan.peak + state.margin_nbytes
    above = peak_nbytes > state.options.budget_nbytes  # followed all the same, to measure it
    other = peak_nbytes - profile.static - plan.held_nbytes
    other = min(other, 0) if above else other
    headroom = state.headroom.learned(other)
    state = replace(state, headroom=headroom, withdrawn=False, proven=()).with_watched(added=None)
    return state, (BeginPlan(),)


def _held(state: FitState, seen: PlanMade | PlanTaken | Rehearsed) -> Step:
    """Follows a plan once states have its format."""
    profile = seen.chosen.candidate.profile
    profiled_at = state.profiled_at if profile is state.profile else None
    state = replace(state, chosen=seen.chosen, memory=seen.memory)
    state = replace(state, profile=profile, profiled_at=profiled_at)
    state = replace(state, higher=state.higher.forgotten())
    return begun(state, seen.chosen.plan)


def plan_made(state: FitState, seen: PlanMade) -> Step:
    """Follows the plan, unless it does nothing, or the current plan is as good and fits.

    The peak of plain training is an estimate where tensors were made smaller in the profiled step.
    So a plan that does nothing is followed and measured, too, unless that step was a plain one.
    """
    if seen.fits and _is_no_better(state, seen):
        return begin_to_watch(replace(state, memory=seen.memory))
    is_known = seen.chosen.plan.changes_nothing and state.has_profiled(PLAIN)
    state, commands = _held(state, seen)
    return (_without_plan(state) if is_known else state), commands


def _without_plan(state: FitState) -> FitState:
    """Returns the state in which plain training goes on."""
    phase = Phase.SETTLED if state.ratio == 1 else Phase.IDLE
    return replace(state, plan=None, preset=PLAIN, phase=phase)


def _is_no_better(state: FitState, seen: PlanMade) -> bool:
    """Returns whether the current plan does the same, or takes hardly longer."""
    plan, other, before = state.plan, seen.chosen.plan, state.chosen
    if plan is None or before is None or before.plan is not plan:
        return False
    if Taken(plan.peak, before).is_of(seen.chosen):
        return True
    one, new = before.candidate, seen.chosen.candidate
    alike = one.state == new.state and one.profile is new.profile  # seconds of the same step
    return alike and _cost_s(plan) <= _cost_s(other) + _LITTLE * plan.plain_seconds


def _cost_s(plan: "Plan") -> float:
    return plan.seconds + plan.noise * plan.plain_seconds


def begin_to_watch(state: FitState) -> Step:
    """Settles, or requests a plan that leaves memory for a meter, if there is noise to measure."""
    plan = state.plan
    assert plan is not None
    if plan.changes_nothing:
        return _without_plan(state), ()
    if not plan.is_lossy or state.watched.is_done:
        return replace(state, phase=Phase.SETTLED), ()
    margin = state.margin_nbytes + room_nbytes(plan)
    return state.with_watched(is_done=True), (MakeRoomToWatch(margin),)


def plan_taken(state: FitState, seen: PlanTaken) -> Step:
    """Follows a plan that was chosen before, whatever it does."""
    return _held(state, seen)


def rehearsed(state: FitState, seen: Rehearsed) -> Step:
    """Follows a plan that was made from a forward alone."""
    state = replace(state, attempts=Attempts(seen.known), was_rehearsed=True)
    state, commands = _held(state, seen)
    return replace(state, phase=Phase.VERIFYING, from_rehearsal=True, infeasible=False), commands


def rehearsed_in_vain(state: FitState, seen: RehearsedInVain) -> Step:
    """Treats a step with additional forwards and no plan as unusual, or as above the budget.

    So it does with one that saved more than those before it, if smaller ones have followed.
    """
    is_lasting = state.unexpected.nbytes > 0 and state.unexpected.smaller == 0
    if state.before is None or is_lasting:
        return state, (Raise(seen.error),)
    before, calls = state.before
    return state.back(before), (ForgetCalls(calls),)


def no_plan(state: FitState, seen: NoPlan) -> Step:
    """Returns the state after the planner found no plan that fits."""
    profile = state.profile
    assert profile is not None
    if state.is_scaled:
        return learn_anew(state)
    if state.gains_gradients:  # the step that begins now needs more than a refusal would name
        return state.fresh(), (ForgetScripts(),)
    if state.waits_for_others:
        headroom = state.headroom.learned(0)
        return replace(state, phase=Phase.WRITING, plan=None, headroom=headroom), ()
    if state.corrects:
        return go_smaller(state, seen.fallbacks)
    known = _taken_again(state)
    if known is not None:
        return known
    state = replace(state, phase=Phase.IDLE, plan=None).knowing(profile)
    more = tries_more(state, seen.fallbacks)
    if more is not None:
        return more
    if state.has_profiled(state.preset):
        return replace(state, phase=Phase.SETTLED), ()
    if seen.replans:
        return state.fresh(), (ForgetScripts(),)
    if _comes_near(state, seen):
        return replace(state, phase=Phase.VERIFYING, was_rehearsed=True), (MakeSmallest(),)
    return state, (Raise(seen.error),)


def _comes_near(state: FitState, seen: NoPlan) -> bool:
    """Returns whether the least that is predicted is worth a step above the budget.

    The prediction may be wrong by as much: then a plan fits after all, or a refusal names what was
    measured, which holds when it is given. A backward inside of forward is predicted worse.
    """
    profile = state.profile
    is_limited = profile is None or profile.noise is not None
    if state.takes_anything:
        return not is_limited
    return not is_limited and seen.error.least_nbytes < _NEAR * state.options.budget_nbytes


def tries_more(state: FitState, fallbacks: Fallbacks) -> Step | None:
    """Relaxes a restriction where no plan fits, and learns again; None: none is left."""
    relaxed: tuple[Command, ...] | None = None
    if fallbacks.blamed_classes:
        relaxed = (BLAME_NO_CLASSES,)
    elif fallbacks.rows:
        relaxed = (LET_ROWS_WAIT,)
    elif fallbacks.products:
        relaxed = (RUN_PRODUCTS_AGAIN,)
    elif fallbacks.checkpoints:
        relaxed = say(Line.OPENS), OPEN_CHECKPOINTS
    elif state.is_recurrent and fallbacks.layers:
        relaxed = run_layers_again(rounds=False)
    elif state.has_many_small and fallbacks.small:
        relaxed = (TAKE_SMALL,)
    elif state.is_recurrent and fallbacks.stretches:
        relaxed = run_layers_again(rounds=True)
    if relaxed is None:
        return None
    # What steps took before says nothing of those to come.
    return replace(state.fresh(), measured_least=0), (ForgetScripts(), *relaxed)


def run_layers_again(*, rounds: bool) -> tuple[Command, ...]:
    """Returns the commands to recompute recurrent layers in backward from now on.

    rounds: in stretches of time, with gradients that differ by rounding; else each as a whole
    """
    return say(Line.RUNS_AGAIN, rounds=rounds), RUN_STRETCHES_AGAIN if rounds else RUN_LAYERS_AGAIN


def _taken_again(state: FitState) -> Step | None:
    """Settles on a plan that was measured within the budget; None: none was.

    If only its profiled step was, the next one is measured first.
    """
    least = state.attempts.least
    if least is None or least.peak_nbytes > state.options.budget_nbytes:
        return None
    phase = Phase.VERIFYING if least.was_profiled else Phase.SETTLED
    return replace(state, phase=phase, tries=0), (TakePlan(least.chosen),)


def go_smaller(state: FitState, fallbacks: Fallbacks) -> Step:
    """Tries smaller plans after corrected ones have needed more than the budget.

    The plans of the least predicted peak are measured, one after another. If the first of them is
    from_rehearsal, its step is profiled, which replaces all estimates.
    """
    known = _taken_again(state)
    if known is not None:
        return known
    more = tries_more(state, fallbacks)
    if more is not None:
        return more
    return replace(state, margins=Margins()), (MakeSmallest(),)


def smallest_made(state: FitState, seen: SmallestMade) -> Step:
    """Measures a plan of the least predicted peak, or falls back to the last resort."""
    is_said = state.phase is Phase.SMALLEST or bool(state.attempts.smallest)
    state, least = replace(state, attempts=seen.attempts), seen.attempts.least
    if seen.found is None:
        return (state, (CheckPlan(),)) if least is None else _give_up(state, least)
    commands: tuple[Command, ...] = (TakePlan(seen.found.chosen),)
    if least is None:
        commands = (say(Line.NEAR, plan=seen.found.chosen.plan), *commands)
    elif not is_said:
        commands = (say(Line.SMALLEST, least_nbytes=least.peak_nbytes), *commands)
    return replace(state, phase=Phase.SMALLEST, from_rehearsal=seen.found.from_rehearsal), commands


def _give_up(state: FitState, least: Taken) -> Step:
    """Falls back to a uniform preset, which holds little at all moments.

    If none was measured to fit before the first plan, this is the strictest preset. A preset that
    was measured to fit may hold more than plans do. What presets add is bounded by no limit of
    noise, so that the budget is refused where plans have to keep to one.

    least: the measured plan with the lowest peak
    """
    profile = state.profile
    if state.options.noise is not None and profile is not None and profile.noise is not None:
        state = replace(state, phase=Phase.SETTLED)
        if not state.unexpected.varies:
            return state, (Refuse(least),)
        why = "took no less within the limit of noise"  # an exception, which ends no training
        above = say(Line.ABOVE, peak_nbytes=least.peak_nbytes, why=why)
        return state, (TakePlan(least.chosen), above)
    presets, preset, headroom = state.options.presets, state.preset, state.headroom.learned(0)
    if state.was_rehearsed:
        preset, headroom = len(presets) - 1, state.headroom
    state = replace(state, phase=Phase.LAST_RESORT, plan=None, preset=preset, headroom=headroom)
    return state, (
        say(
            Line.UNCORRECTED,
            least_nbytes=least.peak_nbytes,
            preset=presets[preset].name,
            refuses=state.refuses_last_resort,
        ),
    )


_LARGEST_TENSORS = 6  # upper estimate of the additional memory of a watched step


def room_nbytes(plan: "Plan") -> int:
    """Returns the bytes that a watched step may need beyond this plan's peak.

    Probing copies a tensor, and runs its op a second time in backward.
    """
    return _LARGEST_TENSORS * plan.largest_nbytes
