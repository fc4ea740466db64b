"""The solver that is used where none is named.

Plain autograd if that fits; `rounding` for many items. Else the cheapest of uniform, greedy and
what the relaxation and greedy differ in, searched; it is done if that is within NEAR of the
relaxation's bound, which proves that no search would gain more; so is greedy's choice alone. If it
is not, milp searches it all, unless the step is an estimate: that takes a step or two of a small
model, for a gain of 0.2 % of a step in what was measured.
"""

from elbowroom.plan.problem import Choice, Problem, keep_all
from elbowroom.plan.solve.greedy import cheapest_of, from_boundaries, greedy
from elbowroom.plan.solve.limits import Limits, fits
from elbowroom.plan.solve.milp import GAP, relaxed, whole
from elbowroom.plan.solve.rounding import LIMIT_S, is_near, rounded, rounding

FEW = 300
_NODES = 200


def auto(problem: Problem, limits: Limits) -> Choice | None:
    """Never worse than uniform; nor, of FEW items, than greedy. None if nothing fits."""
    if fits(problem, keep_all(problem), limits):
        return keep_all(problem)
    if len(problem.items) > FEW:
        return rounding(problem, limits)
    relaxation = relaxed(problem, limits)
    if relaxation is None:
        return from_boundaries(problem, limits)
    best = walked = greedy(problem, limits)
    if not is_near(relaxation, best):
        best = cheapest_of(problem, [walked, rounded(relaxation, walked)])
    if not (is_near(relaxation, best) or (problem.is_rough and best is not None)):
        moments = set(relaxation.moments)
        searched = whole(relaxation.model, moments, gap=GAP, nodes=_NODES, limit_s=LIMIT_S)
        best = cheapest_of(problem, [best, searched])
    return best
