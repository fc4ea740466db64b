"""Execution of a state's commands: planners run, states change format, lines are logged.

FitState --transitions--> commands --here--> observations --transitions--> FitState ...
"""

from dataclasses import replace
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting import messages, refusals
from elbowroom.fitting.attempts import Chosen, KnownStep, Taken
from elbowroom.fitting.commands import (
    BLAME_NO_CLASSES,
    BeginPlan,
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
    Relax,
    Say,
    StartMeter,
    TakePlan,
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
from elbowroom.fitting.rehearse import UNSURE, Steps, plan_by_forward
from elbowroom.fitting.update_room import update_nbytes
from elbowroom.measure.interval import may_measure
from elbowroom.measure.reach import ReachMeter, watch_nbytes
from elbowroom.measure.shares import STEPS, menu_meter, shares_of
from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.parts import step_of_parts
from elbowroom.plan.presets import choose
from elbowroom.plan.profile import Profile
from elbowroom.plan.rehearsal import CAREFUL, LEAST, LIKELY, Care, ForwardProfile, with_backward
from elbowroom.plan.remedies import codes_help
from elbowroom.plan.shares import NoiseShares
from elbowroom.units import show_nbytes

if TYPE_CHECKING:
    from elbowroom.fitting.forward import FittedSaving
    from elbowroom.fitting.measurement import Measurement
    from elbowroom.fitting.planner import Planner
    from elbowroom.measure.meter import NoiseMeter

# Of what a recurrent layer saves, the least that it takes when it runs as a whole (CPU, measured).
_WHOLE = 1.25
_FEW_STEPS = 3  # in which gradients are seen to vary from batch to batch


def execute(planner: "Planner", command: Command) -> Observation | None:
    """Executes the commands of one kind of forward; returns the observation that results.

    Raises BudgetTooSmall if that is the command.
    """
    match command:
        case Say(line, values):
            last, planner.said_last = planner.said_last, (line, values)
            if line is not Line.MEASURED or not _is_said(values, last):
                getattr(messages, line.value)(planner.options, **values)
        case ForgetScripts():
            planner.forget_scripts()
        case BeginPlan():
            planner.forget_scripts()
            planner.try_modules()
        case ForgetCalls(calls):
            planner.calls.forget(calls)
        case Relax(changes):
            for name, value in changes:
                setattr(planner.context, name, value)
            if command != BLAME_NO_CLASSES:  # the others change what a forward records
                planner.forward_profile = None
        case StartMeter(predicts):
            steps = STEPS if planner.options.noise is not None else _FEW_STEPS
            planner.meter = ReachMeter(steps) if predicts else menu_meter(probes=1)
        case Refuse(least):
            raise _measured_refusal(planner, least)
        case RefusePresets(saving):
            assert saving is not None
            raise _refused_forward(planner, saving)
        case Raise(error):
            raise error
        case Then(observation):
            return observation
        case _:
            return _planned(planner, command)
    return None


def _is_said(values: dict[str, Any], last: tuple[Line, dict[str, Any]] | None) -> bool:
    """Returns whether the line that was logged last tells the same measurement of the same plan.

    A plan that recomputes modules is measured in several steps: the first ones test the modules.
    """
    if last is None or last[0] is not Line.MEASURED:
        return False
    before = last[1]
    peak, peak_before = show_nbytes(values["peak_nbytes"]), show_nbytes(before["peak_nbytes"])
    return values["plan"] is before["plan"] and peak == peak_before


def _planned(
    planner: "Planner",
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
            assert planner.given is not None
            planner.model_state.states.begin_with(planner.given, planner, planner.options)
            return GivenHeld(_memory_of(planner))
        case MakePlan(again, fits):
            try:
                chosen = _chosen(planner)
            except BudgetTooSmall as error:
                return NoPlan(refusals.without_frames(error), fallbacks_of(planner), again)
            return PlanMade(*_taken(planner, chosen), fits)
        case CheckPlan():
            _chosen(planner, settings_of(planner, names_least=True), estimated=False)
            return None
        case TakePlan(chosen):
            return PlanTaken(*_taken(planner, chosen))
        case MakeSmallest():
            states, settings = planner.model_state.states, settings_of(planner)
            return SmallestMade(
                *planner.state.attempts.next_smallest(
                    lambda step, again: states.smallest(step, planner, settings, recompute=again),
                    lambda step, again: states.bound(step, planner, settings, recompute=again),
                )
            )
        case PlanByForward(forward_profile):
            return _planned_by_forward(planner, forward_profile)
        case MakeRoomToWatch(margin_nbytes):
            profile, options = planner.profile, planner.options
            assert profile is not None
            taken = planner.state.attempts.taken
            more_nbytes = watch_nbytes([one.saves[0].site.shape for one in profile.storages])
            return RoomToWatch(
                settings_of(planner).plan_for(profile, margin_nbytes, exact=options.exact),
                bool(taken) and taken[-1].peak_nbytes + more_nbytes <= options.budget_nbytes,
            )
        case ReadMeter():
            return _noise_measured(planner)


def observed(
    planner: "Planner", last: "FittedSaving", step: "Measurement", memory: MemoryState
) -> StepMeasured:
    """Returns the observation of a step that has ended.

    last: the saving of its last forward; memory: as the next step begins
    """
    presets, profile = planner.options.presets, step.profile
    if profile is not None:
        profile = replace(
            repeatable(planner, profile), standing=planner.model_state.resident_bytes()
        )
    return StepMeasured(
        memory,
        step.memory.static_nbytes,
        step.peak,
        co_resident_nbytes=step.memory.co_resident_nbytes,
        outputs_nbytes=step.memory.outputs_nbytes,
        makes_states=step.makes_states,
        ran_trials=planner.ran_trials,
        writes=step.writes,
        seen=step.profile,
        profile=profile,
        climbed=last.climbed,
        preset=last.preset,
        before_nbytes=last.ledger.before_nbytes,
        after_nbytes=last.ledger.after_nbytes,
        max_nbytes=last.ledger.max_nbytes,
        ran_again=last.ran_again,
        unknown_sites=planner.plan is not None and bool(planner.plan.unknown_sites),
        watched=planner.meter is not None and planner.meter.step >= _steps(planner.meter),
        may_measure=may_measure(planner.model_state.device),
        fallbacks=fallbacks_of(planner),
        preset_within=lambda allowed_nbytes: choose(presets, last.storages, allowed_nbytes),
        saving=last,
    )


def fallbacks_of(planner: "Planner") -> Fallbacks:
    """Returns the relaxations that are still possible where no plan fits."""
    context = planner.context
    blamed = bool(context.unrepeatable) and context.blames_classes
    # A layer that runs again as a whole holds as much then as it would have saved, and more.
    gains = context.keeps_bits and context.recurrent_layers > 1
    needed = planner.memory.static_nbytes + int(_WHOLE * context.layer_nbytes)
    fits = planner.options.exact or needed <= planner.options.budget_nbytes
    # Exact plans gain little by that: they run a piece again, as the checkpoint does.
    # Lossy plans have codes in their place. Of models in turns, predictions were a third too low.
    is_alone = not (planner.memory.co_resident_nbytes or planner.calls.are_seen)
    exactly = is_alone and planner.options.exact is True
    products = exactly and context.has_linears and not context.products_again
    opens = context.has_checkpoints and not (context.opens_checkpoints or planner.options.exact)
    return Fallbacks(
        blamed,
        layers=gains and fits and not context.runs_again,
        stretches=not (planner.options.exact or context.rounds),
        small=not context.takes_small,
        rows=context.gathers and not context.rows_wait,
        products=products,
        checkpoints=opens,
    )


def settings_of(planner: "Planner", *, names_least: bool = False) -> PlannerSettings:
    """Returns the planner settings for this kind of forward.

    names_least: a refusal is raised, so that the least budget is searched for in any case
    """
    state = planner.state
    helps_anyway = _helps_anyway(planner)
    return PlannerSettings(
        state.options,
        state.ratio,
        state.margins.plain_nbytes,
        state.margins.recompute_nbytes,
        helps_anyway or state.options.lossy_helps,
        bool(helps_anyway),
        finest=inf if state.corrects and not names_least else state.options.budget_nbytes >> 8,
    )


def repeatable(planner: "Planner", profile: Profile) -> Profile:
    """Returns the profile without what was found not to be possible.

    That is recomputation of some modules, and codes that make gradients wrong.
    """
    context = planner.context
    repeats = profile.never_again(context.unrepeatable, alike=context.blames_classes)
    repeats = repeats.never_again_around(
        context.waited_in, "in backward, rows that it gathers would be made at once"
    )
    return repeats.exact_at(context.needs_exact)


def step_of(
    planner: "Planner",
    forward_profile: ForwardProfile,
    care: Care,
    *,
    turns: bool = False,
    stands: bool = False,
    updates: bool = True,
    inputs: bool = True,
) -> Profile:
    """Returns the whole step of a rehearsed forward: its backward is an estimate.

    turns, stands, updates, inputs: see `Steps`
    """
    gradients = planner.model_state.unallocated_gradients()
    states = planner.memory.unallocated_state_nbytes
    forward_profile = replace(forward_profile, profile=repeatable(planner, forward_profile.profile))
    forward_profile = forward_profile if inputs else forward_profile.without_inputs()
    update = update_nbytes(planner.model_state.optimizers()) if updates else 0
    if stands:
        forward_profile = forward_profile.with_co_resident(sum(one.nbytes for one in gradients))
        gradients = []
    return with_backward(
        forward_profile, gradients, states, care, turns=turns, update_nbytes=update
    )


def _chosen(
    planner: "Planner", settings: PlannerSettings | None = None, *, estimated: bool | None = None
) -> Chosen:
    assert planner.profile is not None
    estimated = planner.state.from_rehearsal if estimated is None else estimated
    return planner.model_state.states.choose(
        planner.profile, planner, settings or settings_of(planner), estimated=estimated
    )


def _taken(planner: "Planner", chosen: Chosen) -> tuple[Chosen, MemoryState]:
    """Converts states to a plan's format; returns the plan and the bytes resident since then."""
    taken = planner.model_state.states.take(chosen, planner, planner.options)
    return taken, _memory_of(planner)


def _memory_of(planner: "Planner") -> MemoryState:
    """Returns the memory after states were converted to another format."""
    before = planner.memory
    memory = planner.model_state.memory().with_co_resident(before.co_resident_nbytes)
    return replace(memory, outputs_nbytes=before.outputs_nbytes)


def chosen_by_forward(
    planner: "Planner", forward_profile: ForwardProfile, *, refuses: bool = False
) -> tuple[Chosen, Steps]:
    """Returns a plan for a step whose first forward was rehearsed, and that step by its care.

    refuses: a plan that is estimated to exceed the budget is not worth a measurement

    Raises BudgetTooSmall where no plan is.
    """
    forward_profile = forward_profile.with_co_resident(planner.state.co_resident_nbytes)
    parts, resident = planner.calls.parts(forward_profile), planner.model_state.resident_bytes()

    @cache
    def step(care: Care, **how: bool) -> Profile:
        found = step_of_parts(parts, lambda part: step_of(planner, part, care, **how))
        return replace(found.with_outputs(planner.state.outputs_nbytes), standing=resident)

    # Estimates of recurrent layers are too high, and plans hold what a given loss saves. So nothing
    # more is left for the loss, but for a gradient that is made in another layout.
    is_known = forward_profile.profile.is_recurrent or planner.context.plans_loss
    more = fallbacks_of(planner)
    may_gain = planner.state.may_gain(more)
    goes_on = planner.tries_more and (may_gain or more.blamed_classes)
    chosen = plan_by_forward(
        step,
        planner.model_state.states,
        planner,
        settings_of(planner),
        measures=not (may_gain or refuses),
        names_least=refuses or not goes_on,
        leaves_room=planner.leaves_room,
        gradient_nbytes=planner.model_state.largest_gradient_nbytes(),
        plain_care=LEAST if is_known else UNSURE,
        may_stand=planner.context.step <= 1 and planner.model_state.gradients_last,
    )
    return chosen, step


def _planned_by_forward(planner: "Planner", forward_profile: ForwardProfile) -> Observation:
    try:
        chosen, step = chosen_by_forward(planner, forward_profile)
    except BudgetTooSmall as error:
        return RehearsedInVain(refusals.without_frames(error))
    known = tuple(KnownStep(step(care), from_rehearsal=True) for care in (CAREFUL, LIKELY))
    return Rehearsed(*_taken(planner, chosen), known)


def _steps(meter: "NoiseMeter | ReachMeter") -> int:
    """Returns in how many steps a meter finds what it is for."""
    return meter.steps if isinstance(meter, ReachMeter) else STEPS


def _noise_measured(planner: "Planner") -> NoiseMeasured:
    meter, profile = planner.meter, planner.profile
    assert meter is not None
    assert profile is not None
    meter.harvest()
    if isinstance(meter, ReachMeter):
        return NoiseMeasured(meter.shares(profile.saved_nbytes), predicted=True, added=meter.added)
    shares = shares_of(meter.table)
    if shares is None and planner.options.noise is not None:
        return NoiseMeasured(NoiseShares.by_size(profile.saved_nbytes), predicted=True)
    return NoiseMeasured(shares)


def _measured_refusal(planner: "Planner", least: Taken) -> BudgetTooSmall:
    """Returns the refusal that names the least measured peak, which suffices as a budget."""
    least = planner.state.attempts.least_of_smallest or least
    plan, nbytes = least.chosen.plan, least.peak_nbytes
    if not plan.exact:  # the bytes of codes vary a little with the data
        nbytes += plan.held_nbytes // 256
    options = planner.options
    return refusals.measured_refusal(
        options, planner.model_state, planner.memory, plan, nbytes, _lossy_helps(planner)
    )


def _refused_forward(planner: "Planner", saving: "FittedSaving") -> BudgetTooSmall:
    """Returns the refusal of a forward that has held too much.

    If its plan was estimated to exceed the budget, and was followed to be measured, no transients
    are known of it. So what the rehearsal says is named, and not what was held until then.
    """
    state, plan, forward_profile = planner.state, planner.plan, planner.forward_profile
    above = plan is not None and plan.peak > planner.options.budget_nbytes
    if above and state.is_estimated and forward_profile is not None:
        try:
            chosen_by_forward(planner, forward_profile, refuses=True)
        except BudgetTooSmall as error:
            return refusals.without_frames(error)
    transient_nbytes, memory = state.headroom.transient_nbytes, planner.memory
    later_nbytes = 0  # where nothing was measured, those to come are part of the estimate
    if transient_nbytes is not None:
        later_nbytes = max(state.gradient_nbytes - memory.gradient_nbytes, 0)
    return refusals.refusal(
        saving,
        planner.options,
        planner.model_state,
        memory,
        transient_nbytes,
        later_nbytes,
        estimated=state.is_estimated,
        exactly=state.takes_anything and transient_nbytes is None,
    )


def _helps_anyway(planner: "Planner") -> str:
    """Returns what exact=None would allow besides codes that may help, in words, or ""."""
    return planner.model_state.states.lossy_helps() or (
        refusals.LAYERS_HELP if planner.state.is_recurrent else ""
    )


def _lossy_helps(planner: "Planner") -> str:
    """Returns the remedy that the refusal of a measured step names under exact=True, or ""."""
    options, profile = planner.options, planner.profile
    if not options.exact:
        return ""
    helps = _helps_anyway(planner)
    if helps or profile is None:
        return helps or options.lossy_helps
    exactly = build_problem(profile, exact=True, recompute=False)
    return options.lossy_helps if codes_help(profile, exactly, codecs=options.codecs) else ""
