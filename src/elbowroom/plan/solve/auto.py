"""The solver that is used where none is named.

Plain autograd if that fits; `rounding` for many items. Else the cheapest of uniform, greedy and
what the relaxation and greedy differ in, searched; it is done if that is within NEAR of the
relaxation's bound, which proves that no search would gain more; so is greedy's choice alone. If it
is not, milp searches it all.

Of a step that is an estimate nothing is searched for a gain that is smaller than its errors. The
relaxation, rounded, is enough where it is near the bound, for a third of what a greedy walk takes;
else the cheaper of it and greedy is. The whole search takes a step or two of a small model, for a
gain of 0.2 % of a step in what was measured.
"""

from elbowroom.plan.problem import Choice, Problem, keep_all
from elbowroom.plan.solve.greedy import cheapest_of, from_boundaries, greedy
from elbowroom.plan.solve.limits import Limits, fits
from elbowroom.plan.solve.milp import GAP, relaxed, whole
from elbowroom.plan.solve.rounding import LIMIT_S, is_near, rounded, rounding

FEW = 300
_NODES = 200


def auto(problem: Problem, limits: Limits) -> Choice | None:
    """Never worse than uniform; nor, of FEW items, than greedy. None if nothing fits.

    Of an estimate it may be worse by what `is_near` allows.
    """
    if fits(problem, keep_all(problem), limits):
        return keep_all(problem)
    if len(problem.items) > FEW:
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
