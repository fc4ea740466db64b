"""Plans from a rehearsal, which is a forward alone, in the order in which they are tried.

A rehearsed plan is an estimate (`plan/rehearsal.py`), and is replaced once its step was measured.
Lossy codes affect only that step, but encoded states keep their error: so encoded states are tried
after all codes, and only optimistic estimates of backward are tried after them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.chosen import Chosen
from elbowroom.fitting.forward import Fit, FittedSaving
from elbowroom.fitting.messages import warn_optimistic
from elbowroom.fitting.model_state import ModelState, storage_nbytes
from elbowroom.fitting.planner_settings import PlannerSettings
from elbowroom.fitting.state_formats import CHOICES, States
from elbowroom.measure.background import Background
from elbowroom.measure.graph import graph_of
from elbowroom.measure.recording import Recording
from elbowroom.plan.make import AT_LEAST
from elbowroom.plan.profile import Profile
from elbowroom.plan.rehearsal import CAREFUL, LIKELY, ForwardProfile
from elbowroom.runtime.identity import is_touchable
from elbowroom.units import show_nbytes

_SHOULD_DO = "that should hold this step (estimated from its forward alone; from {} on it may do)"
_MARGIN = 0.03  # of the non-static bytes, in budgets that are named
# Exact or lossy, with how much care, and whether modules may be recomputed. A step without
# recomputation can be profiled, which replaces all estimates. Less care is optimistic, and comes
# last.
_TRIES: dict[bool | None, tuple[tuple[bool | None, float, bool], ...]] = {
    True: ((True, CAREFUL, False), (True, CAREFUL, True), (True, LIKELY, True)),
    None: (
        *((True, CAREFUL, False), (True, CAREFUL, True), (None, CAREFUL, False)),
        *((None, CAREFUL, True), (None, LIKELY, True)),
    ),
    False: ((False, CAREFUL, False), (False, CAREFUL, True), (False, LIKELY, True)),
}
_SURE = 0.7  # of the least budget by the graph: below it, a step is refused unmeasured
_FIRST = 1.05  # of the budget, in a forward that held nothing: above it, it is refused, too


def rehearsed(
    fit: Fit,
    owned: ModelState,
    forward: Callable[[], Any],
    after: FittedSaving | None = None,
    *,
    is_inside: bool = False,
) -> ForwardProfile | None:
    """Records a forward that holds nothing, and the graph that it has built.

    None where it cannot be measured. after: the context of an earlier forward of the same step,
    which stays unchanged. is_inside: the waiting graph of another fitted model follows in backward,
    and belongs to that model. A rehearsal is rare and short, so it interrupts a measurement of
    another model.
    """
    Background.interrupt()
    stood = {x.untyped_storage()._cdata for x in owned.tensors() if is_touchable(x)}
    recording = Recording.start(owned.tensors(), owned.device)
    if recording is None:
        return None
    is_whole = after is not None or not is_inside
    since = 0 if after is None and is_whole else torch._C._autograd._get_sequence_nr()
    try:
        with FittedSaving(fit, recording.recorder, counts=True, after=after) as saving:
            out = [x for x in tree_leaves(forward()) if isinstance(x, Tensor) and x.requires_grad]
            saving.drop_everything()
            graph = graph_of(out, recording.recorder, since, is_whole=is_whole)
        loss_nbytes, out_nbytes = _loss_nbytes(out), storage_nbytes(out)
        seen = recording.finish()  # while forward's output exists: the graph is freed with it
        del out
    finally:
        recording.close()
    if seen is None:
        return None
    return ForwardProfile(seen, graph, loss_nbytes, out_nbytes, recording.recorder.on(stood))


def _loss_nbytes(outputs: list[Tensor]) -> tuple[int, int]:
    """Bytes of the largest and of the smallest tensor from which a loss may be computed.

    0 where one of them is the loss.
    """
    sizes = [x.numel() * x.element_size() for x in outputs]
    if not sizes or any(x.numel() == 1 for x in outputs):
        return 0, 0
    return max(sizes), min(sizes)


Step = Callable[[float], Profile]  # the rehearsed step, with so much care


def plan_by_forward(
    step: Step, states: States, who: object, making: PlannerSettings, *, measures: bool
) -> Chosen:
    """Returns the first plan that fits, or the smallest, to be measured.

    who: the planning it is for.

    measures: the smallest may be measured. Raises BudgetTooSmall where no plan can be expected to
    fit.
    """
    for one in _tries(making.options.exact):
        profile = step(one.care)
        for candidate in states.candidates(profile, who)[one.state : one.state + 1]:
            plan = making.plan_for(candidate.profile, 0, exact=one.exact, recompute=one.recompute)
            if plan is not None:
                if one.care < CAREFUL:
                    warn_optimistic(making.options)
                return Chosen(candidate, plan)
    smallest = states.smallest(step(LIKELY), who, making) if measures else None
    if smallest is not None:
        profile, budget_nbytes = smallest.candidate.profile, making.options.budget_nbytes
        free = budget_nbytes - profile.static
        might = _SURE * (smallest.plan.peak - profile.static) <= free
        if might and profile.forward_peak <= _FIRST * budget_nbytes:
            warn_optimistic(making.options)
            return smallest
    raise _refusal(step, states, who, making)


@dataclass(frozen=True)
class _Try:
    """One set of planner settings. state: index of the state format, the mildest is 0."""

    state: int
    exact: bool | None
    care: float
    recompute: bool


def _tries(exact: bool | None) -> Iterator[_Try]:
    """Yields the settings to try under options of this exactness."""
    for optimistic in (False, True):
        for state in range(1 if exact else len(CHOICES)):
            for allowed, care, recompute in _TRIES[exact]:
                if (care < CAREFUL) == optimistic:
                    yield _Try(state, allowed, care, recompute)


def _refusal(step: Step, states: States, who: object, making: PlannerSettings) -> BudgetTooSmall:
    """Returns a refusal that names a budget that should suffice; a smaller one may, too."""
    exact = making.options.exact

    def refused(care: float, margin: int = 0, least_is: str = AT_LEAST) -> BudgetTooSmall:
        formats = states.candidates(step(care), who)
        profile = formats[0 if exact else -1].profile
        finest = making.options.budget_nbytes >> 8  # the precision of an estimate
        asked = replace(making, least_is=least_is, finest=finest)
        try:
            plan = asked.make(profile, margin, exact=exact)
        except BudgetTooSmall as error:
            return error
        # A solver that ran out of time before has found a plan now: the same budget is used again.
        return BudgetTooSmall(
            f"no plan for {show_nbytes(plan.budget)} was found in time; give it again.",
            least_nbytes=plan.budget,
        )

    best, least = refused(LIKELY).least_nbytes, refused(CAREFUL).least_nbytes
    margin = int(_MARGIN * (least - step(CAREFUL).static))
    return refused(CAREFUL, margin, _SHOULD_DO.format(show_nbytes(best)))
