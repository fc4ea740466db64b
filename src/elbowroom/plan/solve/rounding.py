"""The linear relaxation, rounded: for steps of many items.

A vertex of the relaxation has no more split items than rows that bind, a dozen or two. All others
are taken at its word, and the best is searched for the split ones (`milp`, on what is left). Among
many items that is as good as done: within NEAR of the relaxation's bound. Where it is not, or does
not fit, a `greedy` choice is made as well, and all items on which the two differ are searched anew
(relaxation-induced neighborhoods: Danna, Rothberg and Le Pape, Mathematical Programming 102,
2005). What is not needed is taken back at the end.

Checkmate rounds as well, with no promise on the budget: here every row is checked afterwards.
"""

from math import inf

from elbowroom.plan.problem import Choice, Problem, cost, keep_all
from elbowroom.plan.solve.greedy import cheapest_of, finished, from_boundaries, walked
from elbowroom.plan.solve.limits import Limits, fits, obeys
from elbowroom.plan.solve.milp import GAP, Relaxation, relaxed, whole
from elbowroom.plan.solve.model import ColumnModel
from elbowroom.plan.solve.partial import PartialSolution
from elbowroom.plan.solve.program import Vector
from elbowroom.plan.solve.uniform import uniform_fitting

NEAR, _FAR = 0.01, 0.02
_WORTH = 0.005  # of a step: what a search may gain at the most to be worth the steps that it takes
_NODES = 200  # of the search tree of what is left
LIMIT_S = 1.0  # of one search: an answer that a slow machine ends sooner is checked all the same
_WHOLE = 1e-6  # so near to 0 or 1 counts as that


def rounding(problem: Problem, limits: Limits) -> Choice | None:
    """A choice near the relaxation's cost; None if none fits."""
    if fits(problem, keep_all(problem), limits):
        return keep_all(problem)
    relaxation = relaxed(problem, limits)
    if relaxation is None:
        return from_boundaries(problem, limits)
    others = [from_boundaries(problem, limits), uniform_fitting(problem, limits)]
    found = cheapest_of(problem, [rounded(relaxation), *others])
    if found is not None and not is_near(relaxation, found):
        found = cheapest_of(problem, [found, rounded(relaxation, found)])
    if not is_near(relaxation, found, _FAR):  # a walk over many items takes the longest of all
        greedy = walked(problem, limits)
        found = cheapest_of(problem, [found, greedy, rounded(relaxation, greedy)])
    if found is not None:
        return found
    moments = set(relaxation.moments)
    return whole(relaxation.model, moments, gap=GAP, nodes=_NODES, limit_s=LIMIT_S)


def is_near(relaxation: Relaxation, choice: Choice | None, near: float = NEAR) -> bool:
    """Returns whether no choice that fits is much better."""
    if choice is None:
        return False
    problem = relaxation.model.problem
    return is_near_bound(problem, relaxation.seconds, cost(problem, choice), near)


def is_near_bound(problem: Problem, bound_s: float, cost_s: float, near: float = NEAR) -> bool:
    """Returns whether it is not worth a search to come from this cost closer to its bound."""
    return cost_s <= bound_s + max(near * bound_s, _WORTH * problem.seconds)


def rounded(relaxation: Relaxation, near: Choice | None = None) -> Choice | None:
    """The best between the relaxation and a choice that fits; None if what comes out does not.

    Of an estimated step it is searched once, and what is above the budget is repaired by a walk.
    """
    model, x = relaxation.model, relaxation.x
    fixed = _agreed(model, x, near)
    searched = whole(
        model,
        set(relaxation.moments),
        gap=GAP,
        nodes=_NODES,
        limit_s=LIMIT_S,
        fixed=fixed,
        once=model.problem.is_rough,
    )
    choice = searched or _nearest(model, x)
    return finished(PartialSolution(model.problem, model.limits, choice)) if choice else None


def _agreed(model: ColumnModel, x: Vector, near: Choice | None) -> dict[int, float]:
    """The columns of all items that are not split, and held as in the other choice."""
    other = x if near is None else model.columns(near)
    agreed = {}
    for ways in model.ways():
        if all(min(x[c], 1 - x[c]) < _WHOLE and abs(x[c] - other[c]) < _WHOLE for c in ways):
            agreed.update({c: float(round(x[c])) for c in ways})
    return agreed


def _nearest(model: ColumnModel, x: Vector) -> Choice | None:
    """The largest fraction of each item, if that breaks no limit but the budget."""
    choice = model.choice(x)
    return choice if obeys(model.problem, choice, model.limits) else None


def is_nearly_best(problem: Problem, limits: Limits, cost_s: float) -> bool:
    """Returns whether no choice that fits is much cheaper than this, or none fits at all.

    They are those of the linear relaxation. It leaves out modules that are recomputed from codes
    (`boundaries.py`), and a choice with such modules may be below its bound, so that choice's own
    value counts, too.
    """
    asked = "bound", limits
    if asked not in problem.answers:
        relaxation, start = relaxed(problem, limits), from_boundaries(problem, limits)
        problem.answers[asked] = min(
            inf if relaxation is None else relaxation.seconds,
            inf if start is None else cost(problem, start),
        )
    return is_near_bound(problem, problem.answers[asked], cost_s)
