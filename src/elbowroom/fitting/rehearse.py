"""Plans from a rehearsal, which is a forward alone, in the order in which they are tried.

A rehearsed plan is an estimate (`plan/rehearsal.py`), and is replaced once its step was measured.
Lossy codes affect only that step, but encoded states keep their error: so encoded states are tried
after all codes, and only optimistic estimates of backward are tried after them. An exact plan that
takes the graph at its word comes before lossy ones: one of these in its place may be followed for
good, although nothing has shown that exact actions do not suffice.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.attempts import Chosen
from elbowroom.fitting.forward import Fit, FittedSaving
from elbowroom.fitting.messages import warn_optimistic
from elbowroom.fitting.model_state import ModelState, storage_nbytes
from elbowroom.fitting.planner_settings import PlannerSettings
from elbowroom.fitting.refusals import without_frames
from elbowroom.fitting.state_formats import CHOICES, StateFormats
from elbowroom.measure.background import Background
from elbowroom.measure.graph import graph_of
from elbowroom.measure.recording import Recording
from elbowroom.plan.make import AT_LEAST, plain_peak, unplanned
from elbowroom.plan.profile import Profile
from elbowroom.plan.rehearsal import CAREFUL, LEAST, LIKELY, MIDDLE, Care, ForwardProfile
from elbowroom.runtime.storage import is_touchable
from elbowroom.units import show_nbytes

_SHOULD_SUFFICE = (
    "that should suffice for this step (estimated from its forward alone; {} may suffice)"
)
_MARGIN = 0.03  # of the non-static bytes, in budgets that are named
# Exact or lossy, with how much care, and whether modules may be recomputed. A step without
# recomputation can be profiled, which replaces all estimates. Less care is optimistic, and comes
# last.
_TRIES: dict[bool | None, tuple[tuple[bool | None, Care, bool], ...]] = {
    True: (
        *((True, CAREFUL, False), (True, CAREFUL, True)),
        *((True, MIDDLE, True), (True, LIKELY, True)),
    ),
    None: (
        *((True, CAREFUL, False), (True, CAREFUL, True), (True, MIDDLE, True)),
        *((None, CAREFUL, False), (None, CAREFUL, True), (None, LIKELY, True)),
    ),
    False: ((False, CAREFUL, False), (False, CAREFUL, True), (False, LIKELY, True)),
}
_warned: "weakref.WeakSet[object]" = weakref.WeakSet()
_LITTLE = 0.01  # of a budget: what is not worth a sentence
_DEPTH = 4  # of objects in objects that a forward gives
# Of a loss outside of forward: cross entropy takes 3 of its input, a mean of squares 4.
UNSURE = LIKELY._replace(loss=3.5)
_MORE = 1.25  # times what steps need that begin without gradients, in budgets that are named
_SURE = 0.7  # of the least by the graph: below that it is refused unmeasured
_FIRST = 1.05  # of the budget, in a forward that held nothing: above that it is, too


def rehearse(
    fit: Fit,
    model_state: ModelState,
    forward: Callable[[], Any],
    after: FittedSaving | None = None,
    *,
    is_inside: bool = False,
    given: object = (),
    inputs: object = (),
) -> ForwardProfile | None:
    """Records a forward that holds nothing, and the graph that it has built.

    None where it cannot be measured. It comes once, and is short: a measurement of another model
    gives way.

    after: that of an earlier forward of the same step, which is left as it is
    is_inside: another fitted model's graph waits, and what backward runs there is that one's
    given: what takes no more memory where the forward saves it, since it stands already
    inputs: of the first forward of a step
    """
    Background.interrupt()
    stood, held = _addresses(model_state.tensors()), _addresses(tree_leaves(given))
    # A GPU's counter has them, but the allocator of a CPU tells only what came since.
    uncounted = _addresses(tree_leaves(inputs)) if model_state.device.type == "cpu" else set()
    recording = Recording.start(model_state.tensors(), model_state.device)
    if recording is None:
        return None
    is_whole = after is not None or not is_inside
    since = 0 if after is None and is_whole else torch._C._autograd._get_sequence_nr()
    try:
        with FittedSaving(fit, recording.recorder, counts=True, after=after) as saving:
            result = forward()  # which is held, or what it saved for a graph unseen would be gone
            out = [x for x in _tensors_in(result) if x.requires_grad]
            saving.drop_everything()
            graph = graph_of(out, recording.recorder, since, is_whole=is_whole)
        loss_nbytes, out_nbytes, outs = _loss_nbytes(out), storage_nbytes(out), _addresses(out)
        seen = recording.finish()  # while what forward gives is there: the graph dies with it
        del out, result
    finally:
        recording.close()
    if seen is None:
        return None
    on = recording.recorder.on
    last = len(seen.level) - 1
    gone = frozenset(i for i, storage in enumerate(seen.storages) if storage.freed < last)
    results = on(outs)  # which are there in its last moment, too
    storages = (replace(s, used=last) if i in results else s for i, s in enumerate(seen.storages))
    forward_profile = ForwardProfile(
        replace(seen, storages=tuple(storages)),
        graph,
        loss_nbytes,
        out_nbytes,
        on(stood),
        results,
        gone,
        on(uncounted - stood),
    )
    return forward_profile.given(on(held)) if held else forward_profile


def _tensors_in(value: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yields the tensors of what a forward gives, those in attributes of objects included."""
    for one in tree_leaves(value):
        if isinstance(one, Tensor):
            yield one
        elif depth and not isinstance(one, nn.Module | type):
            yield from _tensors_in(getattr(one, "__dict__", ()), depth - 1)


def _addresses(values: Iterable[object]) -> set[int]:
    tensors = (x for x in values if isinstance(x, Tensor))
    return {x.untyped_storage()._cdata for x in tensors if is_touchable(x)}


def _loss_nbytes(outputs: list[Tensor]) -> tuple[int, int]:
    """Bytes of the largest and of the smallest tensor from which a loss may be computed.

    0 where one of them is the loss.
    """
    sizes = [x.numel() * x.element_size() for x in outputs]
    if not sizes or any(x.numel() == 1 for x in outputs):
        return 0, 0
    return max(sizes), min(sizes)


class Steps(Protocol):
    """Makes the rehearsed step."""

    def __call__(
        self,
        care: Care,
        *,
        turns: bool = False,
        stands: bool = False,
        updates: bool = True,
        inputs: bool = True,
    ) -> Profile:
        """Returns the step, estimated with so much care.

        turns: convolutions take turns, as they do once it is settled
        stands: gradients of the step before stand as it begins
        updates: it ends with the optimizer's step, whose memory is known; else with backward
        inputs: what forward was given counts where it is saved, although it stood before
        """
        ...


def plan_by_forward(
    steps: Steps,
    states: StateFormats,
    owner: object,
    settings: PlannerSettings,
    *,
    measures: bool,
    names_least: bool = True,
    leaves_room: bool = False,
    gradient_nbytes: int = 0,
    plain_care: Care = UNSURE,
    may_stand: bool = False,
) -> Chosen:
    """Returns the first plan that fits, or the smallest, to be measured.

    steps            the rehearsed step; it knows what it gave before
    owner            the planner it is for
    measures         the smallest is worth a step
    names_least      somebody reads what a refusal says, so the least budget is searched for
    leaves_room      the smallest exact plan is taken if it fits: others share the step
    gradient_nbytes  of a gradient that is made in another layout than it is held in
    plain_care       of what plain autograd needs: no more is named
    may_stand        no step has shown yet whether gradients stand as the next one begins

    Raises BudgetTooSmall where none can be expected to fit.
    """
    if leaves_room and settings.options.exact is not False:
        exactly = replace(settings, options=replace(settings.options, exact=True))
        smallest = states.smallest(steps(CAREFUL), owner, exactly)
        if smallest.plan.peak <= settings.options.budget_nbytes:
            return smallest
    for one in _tries(settings.options.exact):
        profile = steps(one.care)
        for candidate in states.candidates(profile, owner)[one.state : one.state + 1]:
            plan = settings.plan_for(candidate.profile, 0, exact=one.exact, recompute=one.recompute)
            if plan is not None:
                if one.care != CAREFUL:
                    _warn_optimistic(settings, owner)
                return Chosen(candidate, plan)
    if measures:
        smallest = states.smallest(steps(LEAST), owner, settings)
        profile, budget_nbytes = smallest.candidate.profile, settings.options.budget_nbytes
        free = budget_nbytes - profile.static
        might = _SURE * (smallest.plan.peak - profile.static) <= free
        if might and profile.forward_peak <= _FIRST * budget_nbytes:
            _warn_optimistic(settings, owner)
            return smallest
    if not names_least:
        raise unplanned(settings.options.budget_nbytes, steps(LEAST).peak)
    error = _refusal(
        steps, states, owner, settings, gradient_nbytes, plain_care, may_stand=may_stand
    )
    raise _with_forward(error, steps(LEAST).forward_peak, settings.options.budget_nbytes)


def _with_forward(error: BudgetTooSmall, forward_nbytes: int, budget: int) -> BudgetTooSmall:
    """Returns a refusal that says if forward, which held nothing, has exceeded the budget."""
    if forward_nbytes > budget:
        said = (
            f"{error} Forward alone takes {show_nbytes(forward_nbytes)}, even if it saves nothing."
        )
        error.args = (said,)
    return error


def _warn_optimistic(settings: PlannerSettings, owner: object) -> None:
    """Warns once: some steps teach nothing, and are planned by a rehearsal again."""
    if owner not in _warned:
        _warned.add(owner)
        warn_optimistic(settings.options)


@dataclass(frozen=True)
class _Try:
    """One set of planner settings. state: index of the state format, the mildest is 0."""

    state: int
    exact: bool | None
    care: Care
    recompute: bool


def _tries(exact: bool | None) -> Iterator[_Try]:
    """Yields the settings to try under options of this exactness."""
    for optimistic in (False, True):
        for state in range(1 if exact else len(CHOICES)):
            for allowed, care, recompute in _TRIES[exact]:
                if (care == LIKELY) == optimistic:
                    yield _Try(state, allowed, care, recompute)


def _refusal(
    steps: Steps,
    states: StateFormats,
    owner: object,
    settings: PlannerSettings,
    gradient_nbytes: int,
    plain_care: Care,
    *,
    may_stand: bool,
) -> BudgetTooSmall:
    """Returns a refusal that names a budget that should do; a smaller one may do, too.

    Convolutions may take turns once the step is settled, so the care is taken of that. The first
    step is profiled, and runs them whole: it has to fit by the graph at its word.
    Where plans have little to give, care would name more than plain autograd needs. So no more is
    named than that takes by the graph at its word, with room for a gradient of a parameter that is
    made in another layout. What forward was given stood before, and counts in no measurement of a
    CPU: nor does it count in what plain autograd needs.
    Steps of a program that calls zero_grad() after forward, or accumulates, begin with gradients,
    which the first one does not show. What is named counts them if that is no more than plain
    autograd needs without, nor much more than others need; else it is said. The optimizer's step is
    known, and takes no margin.
    """
    exact = settings.options.exact

    def profile_of(step: Profile) -> Profile:
        return states.candidates(step, owner)[0 if exact else -1].profile

    def refused(step: Profile, margin: int = 0, least_is: str = AT_LEAST) -> BudgetTooSmall:
        profile = profile_of(step)
        finest = settings.options.budget_nbytes >> 8  # an estimate is not known better than that
        asked = replace(settings, least_is=least_is, finest=finest)
        try:
            plan = asked.make(profile, margin, exact=exact)
        except BudgetTooSmall as error:
            return without_frames(error)
        # A solver that ran out of time before has found a plan now: the same budget is used again.
        return BudgetTooSmall(
            f"no plan for {show_nbytes(plan.budget)} was found in time; give it again.",
            least_nbytes=plan.budget,
        )

    def settled(care: Care, *, stands: bool) -> tuple[int, int, Profile]:
        """Returns the least of settled steps, the same with a margin, and the step it is of."""
        careful = steps(care, stands=stands)
        least, step = refused(careful).least_nbytes, careful
        turning = careful if exact else steps(care, turns=True, stands=stands)
        if turning.floor != careful.floor:
            least, step = refused(turning).least_nbytes, turning
            if least <= first:
                least, step = first, likely
        return least, least + int(_MARGIN * (least - careful.static)), step

    likely, in_turns = steps(LEAST), steps(LEAST, turns=True)
    plain_profile = profile_of(likely)
    best = first = refused(likely).least_nbytes
    if not exact and in_turns.floor != likely.floor:
        static = plain_profile.static
        tried = static + int(_SURE * (first - static))  # a step is worth it from here on
        best = min(max(refused(in_turns).least_nbytes, tried), first)

    def plain(*, stands: bool) -> tuple[int, int]:
        """Returns what plain autograd needs, and the same with a margin until the update."""
        bare = plain_peak(profile_of(steps(LEAST, stands=stands, inputs=False)))
        bounds = []
        for care, inputs in ((LEAST, True), (plain_care, False)):
            step = profile_of(steps(care, stands=stands, inputs=inputs, updates=False))
            peak, more = plain_peak(step), 0 if care == UNSURE else gradient_nbytes
            bounds.append(peak + int(_MARGIN * (peak - step.static)) + more)
        return bare, max(bare, min(bounds))

    bare, most = plain(stands=False)
    should_suffice = _SHOULD_SUFFICE.format(show_nbytes(min(best, bare)))
    least, named, step = settled(CAREFUL, stands=False)
    if not may_stand:
        later = named
    else:
        least_standing, later, standing = settled(MIDDLE, stands=True)
        if named < later <= min(bare, int(_MORE * named)):
            return refused(standing, later - least_standing, should_suffice)
        later = min(later, plain(stands=True)[1])
    if named <= most:
        error = refused(step, named - least, should_suffice)
    else:
        error, named = refused(likely, most - first, should_suffice), most
    error.args = (f"{error}{_said_of_standing(later, named)}",)
    return error


def _said_of_standing(nbytes: int, named_nbytes: int) -> str:
    """Returns what a step needs that begins with gradients, if that is much more than is named."""
    if nbytes - named_nbytes <= _LITTLE * named_nbytes:
        return ""
    return (
        " Where gradients are still there as forward runs (zero_grad() after it, or accumulation), "
        f"steps need {show_nbytes(nbytes)}."
    )
