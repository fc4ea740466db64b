"""The default solver.

Plain autograd is returned if it fits, and `rounding` solves problems of many options, over which
greedy walks take longest. For other problems, these are tried in turn until one is so near the
bound of the linear relaxation (`is_near`) that a search could hardly gain more:

    1. `greedy`, which includes `uniform`
    2. a search over the items in which the relaxation and greedy differ; the cheaper of 1 and 2
    3. `milp` over all items; the cheapest of the three

If the step is an estimate, gains that are smaller than its errors are not searched for. Then the
rounded relaxation comes first, which takes a third of the time of greedy, and the cheaper of it and
greedy is final. The whole search takes as long as a step or two of a small model, and gained 0.2 %
of a step where it was measured.
"""

from elbowroom.plan.problem import Choice, Problem, keep_all
from elbowroom.plan.solve.greedy import cheapest_of, from_boundaries, greedy
from elbowroom.plan.solve.limits import Limits, fits
from elbowroom.plan.solve.milp import GAP, relaxed, whole
from elbowroom.plan.solve.rounding import LIMIT_S, is_near, rounded, rounding

FEW = 1000
_NODES = 200


def auto(problem: Problem, limits: Limits) -> Choice | None:
    """Returns a choice that is never worse than uniform; up to FEW options, nor than greedy.

    For an estimated step it may be worse by as much as `is_near` allows. None if nothing fits.
    """
    if fits(problem, keep_all(problem), limits):
        return keep_all(problem)
    if sum(len(item.options) for item in problem.items) > FEW:
        return rounding(problem, limits)
    relaxation = relaxed(problem, limits)
    if relaxation is None:
        return from_boundaries(problem, limits)
    if problem.is_rough:
        best = rounded(relaxation)
        if not is_near(relaxation, best):
            best = cheapest_of(problem, [greedy(problem, limits), best])
    else:
        best = walked = greedy(problem, limits)
        if not is_near(relaxation, best):
            best = cheapest_of(problem, [walked, rounded(relaxation, walked)])
    if not (is_near(relaxation, best) or (problem.is_rough and best is not None)):
        moments = set(relaxation.moments)
        searched = whole(relaxation.model, moments, gap=GAP, nodes=_NODES, limit_s=LIMIT_S)
        best = cheapest_of(problem, [best, searched])
    return best
