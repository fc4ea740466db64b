"""The solver that is used where none is named.

Plain autograd if that fits. Else the cheapest of uniform, greedy and rounding; it is done if that
is within NEAR of the relaxation's bound, which proves that no search would gain more. If it is not,
and the items are few enough, milp searches as well.
"""

from elbowroom.plan.problem import Choice, Problem, added_seconds, keep_all
from elbowroom.plan.solve.greedy import cheapest_of, greedy_fitting
from elbowroom.plan.solve.limits import Limits, fits
from elbowroom.plan.solve.milp import GAP, least_peak, relaxed, whole
from elbowroom.plan.solve.rounding import rounded

FEW = 500
NEAR = 0.01
_NODES = 200


def auto(problem: Problem, limits: Limits) -> Choice:
    """Never worse than uniform and greedy; the least peak of all choices if none fits."""
    if fits(problem, keep_all(problem), limits):
        return keep_all(problem)
    relaxation = relaxed(problem, limits)
    if relaxation is None:
        return least_peak(problem, limits)
    greedy = greedy_fitting(problem, limits)
    best = cheapest_of(problem, [greedy, rounded(relaxation, greedy)])
    near = best and added_seconds(problem, best) <= relaxation.seconds * (1 + NEAR)
    if best is None or (not near and len(problem.items) <= FEW):
        searched = whole(relaxation.model, set(relaxation.moments), gap=GAP, nodes=_NODES)
        best = cheapest_of(problem, [best, searched])
    return best or least_peak(problem, limits)
