"""The linear relaxation, rounded: for steps of many items.

A vertex of the relaxation has no more split items than rows that bind, a dozen or two. All others
are fixed at what it says; of the split ones the best whole choice is searched (`milp` on what is
left), with some items beside them free. Where that fits no more, the largest fraction of each item
counts and `greedy` repairs what does not fit. What is not needed is taken back at the end.

Checkmate rounds as well, with no promise on the budget: here every row is checked afterwards.
"""

from elbowroom.plan.problem import Choice, Problem, keep_all
from elbowroom.plan.solve.draft import Draft
from elbowroom.plan.solve.greedy import cheapest_of, finished, greedy_fitting
from elbowroom.plan.solve.limits import Limits, fits, obeys
from elbowroom.plan.solve.milp import GAP, Relaxation, least_peak, relaxed, whole
from elbowroom.plan.solve.model import Model
from elbowroom.plan.solve.program import Vector
from elbowroom.plan.solve.uniform import uniform_fitting

_WHOLE = 1e-6  # so near to 0 or 1 counts as that


def rounding(problem: Problem, limits: Limits) -> Choice:
    """A choice near the relaxation's cost; the least peak of all choices if none is found."""
    if fits(problem, keep_all(problem), limits):
        return keep_all(problem)
    relaxation = relaxed(problem, limits)
    if relaxation is None:
        return least_peak(problem, limits)
    found = cheapest_of(problem, [rounded(relaxation), uniform_fitting(problem, limits)])
    if found is None:
        found = greedy_fitting(problem, limits)
    return least_peak(problem, limits) if found is None else found


def rounded(relaxation: Relaxation) -> Choice | None:
    """The relaxation, rounded and repaired; None if what comes out does not fit."""
    model, x = relaxation.model, relaxation.x
    fixed = _settled(x, model.ways())
    choice = whole(model, set(relaxation.moments), gap=GAP, fixed=fixed) or _nearest(model, x)
    return finished(Draft(model.problem, model.limits, choice)) if choice else None


def _settled(x: Vector, columns: list[list[int]]) -> dict[int, float]:
    """The columns of all items that are not split, with their values."""
    settled = {}
    for group in columns:
        if all(min(x[c], 1 - x[c]) < _WHOLE for c in group):
            settled.update({c: float(round(x[c])) for c in group})
    return settled


def _nearest(model: Model, x: Vector) -> Choice | None:
    """The largest fraction of each item, if that breaks no limit but the budget."""
    choice = model.choice(x)
    return choice if obeys(model.problem, choice, model.limits) else None
