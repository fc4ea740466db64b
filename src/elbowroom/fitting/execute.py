"""Execution of a state's commands: planners run, states change format, lines are logged.

FitState --transitions--> commands --here--> observations --transitions--> FitState ...
"""

from collections.abc import Callable
from dataclasses import replace
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
from elbowroom.measure.shares import STEPS, menu_meter, shares_of
from elbowroom.plan.make import LOSSY_HELPS
from elbowroom.plan.parts import step_of_parts
from elbowroom.plan.presets import choose
from elbowroom.plan.profile import Profile
from elbowroom.plan.rehearsal import CAREFUL, LIKELY, ForwardProfile, with_backward

if TYPE_CHECKING:
    from elbowroom.fitting.forward import FittedSaving
    from elbowroom.fitting.measurement import Measurement
    from elbowroom.fitting.planning import Planning

_LINES: dict[Line, Callable[..., None]] = {
    Line.MEASURED: messages.say_measured,
    Line.LARGER_STEP: messages.warn_larger_step,
    Line.OUTSIDE: messages.warn_outside,
    Line.ABOVE: messages.warn_above,
    Line.SMALLEST: messages.warn_smallest,
    Line.NEAR: messages.warn_near,
    Line.RUNS_AGAIN: messages.warn_runs_again,
    Line.UNCORRECTED: messages.warn_uncorrected,
    Line.GIVEN: messages.warn_given,
    Line.UNKNOWN: messages.say_unknown,
    Line.NOISE: messages.say_noise,
}


def execute(kind: "Planning", command: Command) -> Observation | None:
    """Executes the commands of one kind of forward; returns the observation that results.

    Raises BudgetTooSmall if that is the command.
    """
    match command:
        case Say(line, values):
            _LINES[line](kind.options, **values)
        case ForgetScripts():
            kind.forget_scripts()
        case BeginPlan():
            kind.forget_scripts()
            kind.try_modules()
        case ForgetCalls(calls):
            kind.calls.forget(calls)
        case BlameNoClasses():
            kind.context.blames_classes = False
        case RunLayersAgain():
            kind.context.runs_again = True
        case TakeSmall():
            kind.context.takes_small = True
        case StartMeter():
            kind.meter = menu_meter(probes=1)
        case Refuse(least):
            raise _measured_refusal(kind, least)
        case RefusePresets(saving):
            assert saving is not None
            transient_nbytes, memory = kind.state.headroom.transient_nbytes, kind.memory
            later_nbytes = 0  # where nothing was measured, those to come are part of the estimate
            if transient_nbytes is not None:
                later_nbytes = max(kind.state.gradient_nbytes - memory.gradient_nbytes, 0)
            raise messages.refusal(
                saving, kind.options, kind.owned, memory, transient_nbytes, later_nbytes
            )
        case Raise(error):
            raise error
        case Then(observation):
            return observation
        case _:
            return _planned(kind, command)
    return None


def _planned(
    kind: "Planning",
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
            assert kind.given is not None
            kind.owned.states.begin_with(kind.given, kind, kind.options)
            return GivenHeld(_memory_of(kind))
        case MakePlan(again, fits):
            try:
                chosen = _chosen(kind)
            except BudgetTooSmall as error:
                return NoPlan(messages.without_frames(error), fallbacks_of(kind), again)
            return PlanMade(*_taken(kind, chosen), fits)
        case CheckPlan():
            _chosen(kind, estimated=False)
            return None
        case TakePlan(chosen):
            return PlanTaken(*_taken(kind, chosen))
        case MakeSmallest():
            states, settings = kind.owned.states, settings_of(kind)
            return SmallestMade(
                *kind.state.attempts.next_smallest(
                    lambda step, again: states.smallest(step, kind, settings, recompute=again)
                )
            )
        case PlanByForward(heard):
            return _planned_by_forward(kind, heard)
        case MakeRoomToWatch(margin_nbytes):
            assert kind.profile is not None
            exact = kind.options.exact
            return RoomToWatch(settings_of(kind).plan_for(kind.profile, margin_nbytes, exact=exact))
        case ReadMeter():
            return _noise_measured(kind)


def observed(
    kind: "Planning", last: "FittedSaving", step: "Measurement", memory: MemoryState
) -> StepMeasured:
    """Returns the observation of a step that has ended.

    last: the saving of its last forward; memory: as the next step begins
    """
    presets, profile = kind.options.presets, step.profile
    if profile is not None:
        profile = replace(repeatable(kind, profile), standing=kind.owned.standing())
    return StepMeasured(
        memory,
        step.memory.static_nbytes,
        step.peak,
        beside_nbytes=step.memory.beside_nbytes,
        makes_states=step.makes_states,
        writes=step.writes,
        seen=step.profile,
        profile=profile,
        climbed=last.climbed,
        preset=last.preset,
        before_nbytes=last.ledger.before_nbytes,
        after_nbytes=last.ledger.after_nbytes,
        most_nbytes=last.ledger.most_nbytes,
        strangers=kind.plan is not None and bool(kind.plan.strangers),
        watched=kind.meter is not None and kind.meter.step >= STEPS,
        may_measure=may_measure(kind.owned.device),
        fallbacks=fallbacks_of(kind),
        preset_within=lambda allowed_nbytes: choose(presets, last.storages, allowed_nbytes),
        saving=last,
    )


def fallbacks_of(kind: "Planning") -> Fallbacks:
    """Returns the relaxations that are still possible where no plan fits."""
    context = kind.context
    blamed = bool(context.unrepeatable) and context.blames_classes
    # A layer that runs again as a whole holds as much then as it would have saved.
    gains = not context.keeps_bits or context.recurrent_layers > 1
    layers = gains and not context.runs_again
    return Fallbacks(blamed, layers, small=not context.takes_small)


def settings_of(kind: "Planning") -> PlannerSettings:
    """Returns the planner settings for this kind of forward."""
    state = kind.state
    helps = kind.owned.states.lossy_helps() or LOSSY_HELPS
    return PlannerSettings(
        state.options,
        state.ratio,
        state.once_nbytes,
        state.again_nbytes,
        helps,
        finest=inf if state.corrects else state.options.budget_nbytes >> 8,
    )


def repeatable(kind: "Planning", profile: Profile) -> Profile:
    """Returns the profile without recomputation of modules that cannot be recomputed."""
    context = kind.context
    return profile.never_again(context.unrepeatable, alike=context.blames_classes)


def step_of(kind: "Planning", heard: ForwardProfile, care: float) -> Profile:
    """Returns the whole step of a rehearsed forward: its backward is an estimate."""
    born = kind.owned.unallocated_gradients(), kind.memory.unallocated_state_nbytes
    return with_backward(replace(heard, profile=repeatable(kind, heard.profile)), *born, care)


def _chosen(kind: "Planning", *, estimated: bool | None = None) -> Chosen:
    assert kind.profile is not None
    estimated = kind.state.rehearsed if estimated is None else estimated
    return kind.owned.states.choose(kind.profile, kind, settings_of(kind), estimated=estimated)


def _taken(kind: "Planning", chosen: Chosen) -> tuple[Chosen, MemoryState]:
    """Converts states to a plan's format; returns the plan and the bytes resident since then."""
    taken = kind.owned.states.take(chosen, kind, kind.options)
    return taken, _memory_of(kind)


def _memory_of(kind: "Planning") -> MemoryState:
    """Returns the memory after states were converted to another format."""
    return kind.owned.memory().beside(kind.memory.beside_nbytes)


def chosen_by_forward(
    kind: "Planning", heard: ForwardProfile
) -> tuple[Chosen, dict[float, Profile]]:
    """Returns a plan for a step whose first forward was rehearsed, and the steps by their care.

    Raises BudgetTooSmall where no plan is worth a measurement.
    """
    heard = heard.beside(kind.state.beside_nbytes)
    parts, standing = kind.calls.parts(heard), kind.owned.standing()

    def step(care: float) -> Profile:
        found = step_of_parts(parts, lambda part: step_of(kind, part, care))
        return replace(found, standing=standing)

    steps = {care: step(care) for care in (CAREFUL, LIKELY)}
    more = fallbacks_of(kind)
    may_gain = kind.state.may_gain(layers=more.layers, small=more.small)
    chosen = plan_by_forward(
        steps.__getitem__,
        kind.owned.states,
        kind,
        settings_of(kind),
        measures=not may_gain,
        spares=kind.spares,
        gradient_nbytes=kind.owned.largest_gradient_nbytes(),
    )
    return chosen, steps


def _planned_by_forward(kind: "Planning", heard: ForwardProfile) -> Observation:
    try:
        chosen, steps = chosen_by_forward(kind, heard)
    except BudgetTooSmall as error:
        return RehearsedInVain(messages.without_frames(error))
    known = tuple(KnownStep(step, rehearsed=True) for step in steps.values())
    return Rehearsed(*_taken(kind, chosen), known)


def _noise_measured(kind: "Planning") -> NoiseMeasured:
    assert kind.meter is not None
    kind.meter.harvest()
    return NoiseMeasured(shares_of(kind.meter.table))


def _measured_refusal(kind: "Planning", least: Taken) -> BudgetTooSmall:
    """Returns the refusal that names the least measured peak, which suffices as a budget."""
    least = kind.state.attempts.least_of_smallest or least
    plan, nbytes = least.chosen.plan, least.peak_nbytes
    if not plan.exact:  # the bytes of codes vary a little with the data
        nbytes += plan.held_nbytes // 256
    return messages.measured_refusal(kind.options, kind.owned, kind.memory, plan, nbytes)
