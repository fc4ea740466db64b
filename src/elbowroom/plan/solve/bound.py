"""Computes lower bounds of a problem, below which hardly any choice comes.

They are those of the linear relaxation. It leaves out modules that are recomputed from codes
(`boundaries.py`), and a choice with such modules may be below its bound, so that choice's own value
counts, too.
"""

from math import inf

from elbowroom.plan.problem import Problem, cost
from elbowroom.plan.solve.greedy import from_boundaries
from elbowroom.plan.solve.limits import Limits
from elbowroom.plan.solve.milp import relaxed
from elbowroom.plan.solve.rounding import is_near_bound


def is_nearly_best(problem: Problem, limits: Limits, cost_s: float) -> bool:
    """Returns whether no choice that fits is much cheaper than this, or none fits at all."""
    asked = "bound", limits
    if asked not in problem.answers:
        relaxation, start = relaxed(problem, limits), from_boundaries(problem, limits)
        problem.answers[asked] = min(
            inf if relaxation is None else relaxation.seconds,
            inf if start is None else cost(problem, start),
        )
    return is_near_bound(problem, problem.answers[asked], cost_s)
