"""The default solver.

Plain autograd is returned if it fits, and `rounding` solves problems of many options, over which
greedy walks take longest. For other problems, these are tried in turn until the cheapest so far is
so near the bound of the linear relaxation (`is_near`) that a search could hardly gain more:

    1. the rounded relaxation: with codes to choose from it is near as a rule, and takes a third of
       the time of greedy; of exact actions alone it seldom is, and is left out
    2. `greedy`, which includes `uniform`
    3. a search over the items in which the relaxation and greedy differ
    4. `milp` over all items

If the step is an estimate, gains that are smaller than its errors are not searched for, and 1 and 2
are all. The whole search takes as long as a step or two of a small model, and gained 0.2 % of a
step where it was measured.
"""

from elbowroom.plan.problem import Choice, Problem, keep_all
from elbowroom.plan.solve.greedy import cheapest_of, from_boundaries, greedy
from elbowroom.plan.solve.limits import Limits, fits
from elbowroom.plan.solve.milp import GAP, relaxed, whole
from elbowroom.plan.solve.rounding import LIMIT_S, is_near, rounded, rounding

FEW = 1000
_NODES = 200


def auto(problem: Problem, limits: Limits) -> Choice | None:
    """Returns a choice that is worse than uniform or greedy by no more than `is_near` allows.

    With more than FEW options, greedy may be better by more than that. None if nothing fits.
    """
    if fits(problem, keep_all(problem), limits):
        return keep_all(problem)
    if sum(len(item.options) for item in problem.items) > FEW:
        return rounding(problem, limits)
    relaxation = relaxed(problem, limits)
    if relaxation is None:
        return from_boundaries(problem, limits)
    has_codes = any(not one.exact for item in problem.items for one in item.options)
    best = rounded(relaxation) if has_codes or problem.is_rough else None
    if not is_near(relaxation, best):
        walked = greedy(problem, limits)
        best = cheapest_of(problem, [walked, best])
        if not (problem.is_rough or is_near(relaxation, best)):
            best = cheapest_of(problem, [best, rounded(relaxation, walked)])
    if not (is_near(relaxation, best) or (problem.is_rough and best is not None)):
        moments = set(relaxation.moments)
        searched = whole(relaxation.model, moments, gap=GAP, nodes=_NODES, limit_s=LIMIT_S)
        best = cheapest_of(problem, [best, searched])
    return best
