"""Execution of a state's commands: planners run, states change format, lines are logged.

FitState --transitions--> commands --here--> observations --transitions--> FitState ...
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting import messages
from elbowroom.fitting.attempts import KnownStep, Taken
from elbowroom.fitting.chosen import Chosen
from elbowroom.fitting.commands import (
    BeginPlan,
    BlameNoClasses,
    CheckPlan,
    Command,
    ForgetCalls,
    ForgetScripts,
    HoldAsGiven,
    Line,
    MakePlan,
    MakeRoomToWatch,
    MakeSmallest,
    PlanByForward,
    Raise,
    ReadMeter,
    Refuse,
    RefuseNoise,
    RefusePresets,
    RunLayersAgain,
    Say,
    StartMeter,
    TakePlan,
    TakeSmall,
    Then,
)
from elbowroom.fitting.observations import (
    Fallbacks,
    GivenHeld,
    NoiseMeasured,
    NoPlan,
    Observation,
    PlanMade,
    PlanTaken,
    Rehearsed,
    RehearsedInVain,
    RoomToWatch,
    SmallestMade,
    StepMeasured,
)
from elbowroom.fitting.options import MemoryState
from elbowroom.fitting.planner_settings import PlannerSettings
from elbowroom.fitting.rehearse import plan_by_forward
from elbowroom.measure.interval import may_measure
from elbowroom.measure.reach import ReachMeter
from elbowroom.measure.shares import STEPS, menu_meter, shares_of
from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.parts import step_of_parts
from elbowroom.plan.presets import choose
from elbowroom.plan.profile import Profile
from elbowroom.plan.rehearsal import (
    CAREFUL,
    LEAST,
    LIKELY,
    MIDDLE,
    Care,
    ForwardProfile,
    with_backward,
)
from elbowroom.plan.remedies import codes_help
from elbowroom.plan.shares import NoiseShares

if TYPE_CHECKING:
    from elbowroom.fitting.forward import FittedSaving
    from elbowroom.fitting.measurement import Measurement
    from elbowroom.fitting.planning import Planning

# Of what a recurrent layer saves, the least that it takes when it runs as a whole (CPU, measured).
_WHOLE = 1.25

_LINES: dict[Line, Callable[..., None]] = {
    Line.MEASURED: messages.say_measured,
    Line.LARGER_STEP: messages.warn_larger_step,
    Line.OUTSIDE: messages.warn_outside,
    Line.BLIND: messages.warn_blind,
    Line.ABOVE: messages.warn_above,
    Line.SMALLEST: messages.warn_smallest,
    Line.NEAR: messages.warn_near,
    Line.RUNS_AGAIN: messages.warn_runs_again,
    Line.UNCORRECTED: messages.warn_uncorrected,
    Line.GIVEN: messages.warn_given,
    Line.UNKNOWN: messages.say_unknown,
    Line.NOISE: messages.say_noise,
}


def execute(planning: "Planning", command: Command) -> Observation | None:
    """Executes the commands of one kind of forward; returns the observation that results.

    Raises BudgetTooSmall if that is the command.
    """
    match command:
        case Say(line, values):
            _LINES[line](planning.options, **values)
        case ForgetScripts():
            planning.forget_scripts()
        case BeginPlan():
            planning.forget_scripts()
            planning.try_modules()
        case ForgetCalls(calls):
            planning.calls.forget(calls)
        case BlameNoClasses():
            planning.context.blames_classes = False
        case RunLayersAgain(rounds):
            planning.context.runs_again, planning.context.keeps_bits = True, not rounds
            planning.forward_profile = None
        case TakeSmall():
            planning.context.takes_small, planning.forward_profile = True, None
        case StartMeter(predicts):
            planning.meter = ReachMeter(STEPS) if predicts else menu_meter(probes=1)
        case Refuse(least):
            raise _measured_refusal(planning, least)
        case RefusePresets(saving):
            assert saving is not None
            transient_nbytes, memory = planning.state.headroom.transient_nbytes, planning.memory
            later_nbytes = 0  # where nothing was measured, those to come are part of the estimate
            if transient_nbytes is not None:
                later_nbytes = max(planning.state.gradient_nbytes - memory.gradient_nbytes, 0)
            raise messages.refusal(
                saving,
                planning.options,
                planning.model_state,
                memory,
                transient_nbytes,
                later_nbytes,
            )
        case RefuseNoise(noise):
            raise messages.noise_refusal(planning.options, planning.plan, noise)
        case Raise(error):
            raise error
        case Then(observation):
            return observation
        case _:
            return _planned(planning, command)
    return None


def _planned(
    planning: "Planning",
    command: HoldAsGiven
    | MakePlan
    | CheckPlan
    | TakePlan
    | MakeSmallest
    | PlanByForward
    | MakeRoomToWatch
    | ReadMeter,
) -> Observation | None:
    """Gets the answer to a command from the planner or from the optimizer's states."""
    match command:
        case HoldAsGiven():
            assert planning.given is not None
            planning.model_state.states.begin_with(planning.given, planning, planning.options)
            return GivenHeld(_memory_of(planning))
        case MakePlan(again, fits):
            try:
                chosen = _chosen(planning)
            except BudgetTooSmall as error:
                return NoPlan(messages.without_frames(error), fallbacks_of(planning), again)
            return PlanMade(*_taken(planning, chosen), fits)
        case CheckPlan():
            _chosen(planning, estimated=False)
            return None
        case TakePlan(chosen):
            return PlanTaken(*_taken(planning, chosen))
        case MakeSmallest():
            states, settings = planning.model_state.states, settings_of(planning)
            return SmallestMade(
                *planning.state.attempts.next_smallest(
                    lambda step, again: states.smallest(step, planning, settings, recompute=again),
                    lambda step, again: states.bound(step, planning, settings, recompute=again),
                )
            )
        case PlanByForward(forward_profile):
            return _planned_by_forward(planning, forward_profile)
        case MakeRoomToWatch(margin_nbytes):
            assert planning.profile is not None
            exact = planning.options.exact
            return RoomToWatch(
                settings_of(planning).plan_for(planning.profile, margin_nbytes, exact=exact)
            )
        case ReadMeter():
            return _noise_measured(planning)


def observed(
    planning: "Planning", last: "FittedSaving", step: "Measurement", memory: MemoryState
) -> StepMeasured:
    """Returns the observation of a step that has ended.

    last: the saving of its last forward; memory: as the next step begins
    """
    presets, profile = planning.options.presets, step.profile
    if profile is not None:
        profile = replace(
            repeatable(planning, profile), standing=planning.model_state.resident_bytes()
        )
    return StepMeasured(
        memory,
        step.memory.static_nbytes,
        step.peak,
        beside_nbytes=step.memory.beside_nbytes,
        outputs_nbytes=step.memory.outputs_nbytes,
        makes_states=step.makes_states,
        tested=planning.has_tested,
        writes=step.writes,
        seen=step.profile,
        profile=profile,
        climbed=last.climbed,
        preset=last.preset,
        before_nbytes=last.ledger.before_nbytes,
        after_nbytes=last.ledger.after_nbytes,
        most_nbytes=last.ledger.most_nbytes,
        unknown_sites=planning.plan is not None and bool(planning.plan.unknown_sites),
        watched=planning.meter is not None and planning.meter.step >= STEPS,
        may_measure=may_measure(planning.model_state.device),
        fallbacks=fallbacks_of(planning),
        preset_within=lambda allowed_nbytes: choose(presets, last.storages, allowed_nbytes),
        saving=last,
    )


def fallbacks_of(planning: "Planning") -> Fallbacks:
    """Returns the relaxations that are still possible where no plan fits."""
    context = planning.context
    blamed = bool(context.unrepeatable) and context.blames_classes
    # A layer that runs again as a whole holds as much then as it would have saved, and more.
    gains = context.keeps_bits and context.recurrent_layers > 1
    needed = planning.memory.static_nbytes + int(_WHOLE * context.layer_nbytes)
    fits = planning.options.exact or needed <= planning.options.budget_nbytes
    return Fallbacks(
        blamed,
        layers=gains and fits and not context.runs_again,
        stretches=not (planning.options.exact or context.rounds),
        small=not context.takes_small,
    )


def settings_of(planning: "Planning") -> PlannerSettings:
    """Returns the planner settings for this kind of forward."""
    state = planning.state
    helps_anyway = _helps_anyway(planning)
    return PlannerSettings(
        state.options,
        state.ratio,
        state.once_nbytes,
        state.again_nbytes,
        helps_anyway or state.options.lossy_helps,
        bool(helps_anyway),
        finest=inf if state.corrects else state.options.budget_nbytes >> 8,
    )


def repeatable(planning: "Planning", profile: Profile) -> Profile:
    """Returns the profile without what was found not to be possible.

    That is recomputation of some modules, and codes that make gradients wrong.
    """
    context = planning.context
    repeats = profile.never_again(context.unrepeatable, alike=context.blames_classes)
    return repeats.exact_at(context.needs_exact)


def step_of(
    planning: "Planning", forward_profile: ForwardProfile, care: Care, *, turns: bool = False
) -> Profile:
    """Returns the whole step of a rehearsed forward: its backward is an estimate."""
    born = planning.model_state.unallocated_gradients(), planning.memory.unallocated_state_nbytes
    forward_profile = replace(
        forward_profile, profile=repeatable(planning, forward_profile.profile)
    )
    return with_backward(forward_profile, *born, care, turns=turns)


def _chosen(planning: "Planning", *, estimated: bool | None = None) -> Chosen:
    assert planning.profile is not None
    estimated = planning.state.rehearsed if estimated is None else estimated
    return planning.model_state.states.choose(
        planning.profile, planning, settings_of(planning), estimated=estimated
    )


def _taken(planning: "Planning", chosen: Chosen) -> tuple[Chosen, MemoryState]:
    """Converts states to a plan's format; returns the plan and the bytes resident since then."""
    taken = planning.model_state.states.take(chosen, planning, planning.options)
    return taken, _memory_of(planning)


def _memory_of(planning: "Planning") -> MemoryState:
    """Returns the memory after states were converted to another format."""
    before = planning.memory
    memory = planning.model_state.memory().beside(before.beside_nbytes)
    return replace(memory, outputs_nbytes=before.outputs_nbytes)


def chosen_by_forward(
    planning: "Planning", forward_profile: ForwardProfile
) -> tuple[Chosen, dict[Care, Profile]]:
    """Returns a plan for a step whose first forward was rehearsed, and the steps by their care.

    Raises BudgetTooSmall where no plan is worth a measurement.
    """
    forward_profile = forward_profile.beside(planning.state.beside_nbytes)
    parts, resident = planning.calls.parts(forward_profile), planning.model_state.resident_bytes()

    def step(care: Care, *, turns: bool = False) -> Profile:
        found = step_of_parts(parts, lambda part: step_of(planning, part, care, turns=turns))
        return replace(found.with_outputs(planning.state.outputs_nbytes), standing=resident)

    steps = {care: step(care) for care in (CAREFUL, LIKELY, LEAST)}
    if planning.options.exact is not False:
        steps[MIDDLE] = step(MIDDLE)
    more = fallbacks_of(planning)
    may_gain = planning.state.may_gain(more)
    goes_on = planning.tries_more and (may_gain or more.blamed_classes)
    chosen = plan_by_forward(
        steps,
        partial(step, turns=True),
        planning.model_state.states,
        planning,
        settings_of(planning),
        measures=not may_gain,
        names_least=not goes_on,
        leaves_room=planning.leaves_room,
        gradient_nbytes=planning.model_state.largest_gradient_nbytes(),
    )
    return chosen, steps


def _planned_by_forward(planning: "Planning", forward_profile: ForwardProfile) -> Observation:
    try:
        chosen, steps = chosen_by_forward(planning, forward_profile)
    except BudgetTooSmall as error:
        return RehearsedInVain(messages.without_frames(error))
    known = tuple(KnownStep(steps[care], rehearsed=True) for care in (CAREFUL, LIKELY))
    return Rehearsed(*_taken(planning, chosen), known)


def _noise_measured(planning: "Planning") -> NoiseMeasured:
    meter, profile = planning.meter, planning.profile
    assert meter is not None
    assert profile is not None
    meter.harvest()
    if isinstance(meter, ReachMeter):
        return NoiseMeasured(meter.shares(profile.saved_nbytes), predicted=True)
    shares = shares_of(meter.table)
    if shares is None and planning.options.noise is not None:
        return NoiseMeasured(NoiseShares.by_size(profile.saved_nbytes), predicted=True)
    return NoiseMeasured(shares)


def _measured_refusal(planning: "Planning", least: Taken) -> BudgetTooSmall:
    """Returns the refusal that names the least measured peak, which suffices as a budget."""
    least = planning.state.attempts.least_of_smallest or least
    plan, nbytes = least.chosen.plan, least.peak_nbytes
    if not plan.exact:  # the bytes of codes vary a little with the data
        nbytes += plan.held_nbytes // 256
    options = planning.options
    return messages.measured_refusal(
        options, planning.model_state, planning.memory, plan, nbytes, _lossy_helps(planning)
    )


def _helps_anyway(planning: "Planning") -> str:
    """Returns what exact=None would allow besides codes that may help, in words, or ""."""
    return planning.model_state.states.lossy_helps() or (
        messages.LAYERS_HELP if planning.state.is_recurrent else ""
    )


def _lossy_helps(planning: "Planning") -> str:
    """Returns the remedy that the refusal of a measured step names under exact=True, or ""."""
    options, profile = planning.options, planning.profile
    if not options.exact:
        return ""
    helps = _helps_anyway(planning)
    if helps or profile is None:
        return helps or options.lossy_helps
    exactly = build_problem(profile, exact=True, recompute=False)
    return options.lossy_helps if codes_help(profile, exactly, codecs=options.codecs) else ""
