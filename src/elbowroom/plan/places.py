"""Lossy plans with a place to move to: tensors and codes move there, codes alone, or nothing.

    moved            options     bytes that are on their way, beside the plan's peak
    tensors, codes   all         the largest tensor
    codes            fewer       the largest code
    nothing          the fewest  none

What moves less leaves more of the budget for the step, and may fit where the others do not. It has
no option that the first has not, so it is not searched where its bound says that it could gain
hardly anything: `solve/bound.py`.
"""

from math import inf

from elbowroom.codecs import Codec
from elbowroom.plan.build_problem import BuiltProblem, build_problem
from elbowroom.plan.problem import Problem, Solution, cost
from elbowroom.plan.profile import Profile
from elbowroom.plan.solve import BASELINES, Limits, is_nearly_best, least_bound, solve


def with_codes(
    profile: Profile,
    budget: int,
    in_flight: int,
    *,
    recompute: bool,
    offload: str | None,
    codecs: tuple[Codec, ...] | None,
    variance: float,
    solver: str,
    least: bool | None,
) -> tuple[BuiltProblem, Solution, int]:
    """Returns the best solution in which codes may be lossy, and the bytes that are on their way.

    in_flight  bytes that are, where whole tensors are moved
    least      True: where nothing fits, the one with the least peak; None: plain autograd is enough
    """
    places = [(offload, True), (offload, False), (None, False)] if offload else [(None, False)]
    may_skip = solver not in BASELINES and len(places) > 1
    tried: list[tuple[BuiltProblem, Solution, int]] = []
    for tier, whole in places:
        fitting = [one for one in tried if one[1].feasible]
        best_s = min((cost(built.problem, one.choice) for built, one, _ in fitting), default=inf)
        if fitting and may_skip:
            freely = Limits(budget, variance)  # as if nothing were on its way
            if is_nearly_best(tried[0][0].problem, freely, best_s):
                break
        built = build_problem(
            profile, exact=False, recompute=recompute, offload=tier, whole=whole, codecs=codecs
        )
        travels = in_flight if whole else _most_travelling(built.problem)
        left = budget - travels
        if fitting and may_skip and is_nearly_best(built.problem, Limits(left, variance), best_s):
            continue
        found = solve(
            built.problem, left, variance=variance, solver=solver, least=None if may_skip else least
        )
        tried.append((built, found, travels))
    if least and may_skip and not any(found.feasible for _, found, _ in tried):
        tried = _least(tried, budget, variance, solver)
    return min(tried, key=_rank)


def _least(
    tried: list[tuple[BuiltProblem, Solution, int]], budget: int, variance: float, solver: str
) -> list[tuple[BuiltProblem, Solution, int]]:
    """Searches for the least peak of each that may have the least of all, by their bounds."""
    bounds = [
        least_bound(built.problem, Limits(budget - travels, variance)) + travels
        for built, _, travels in tried
    ]
    found: list[tuple[BuiltProblem, Solution, int]] = []
    for at in sorted(range(len(tried)), key=bounds.__getitem__):
        least = min((one.peak + travels for _, one, travels in found), default=inf)
        if bounds[at] < least:
            built, _, travels = tried[at]
            one = solve(built.problem, budget - travels, variance=variance, solver=solver)
            found.append((built, one, travels))
    return found


def _rank(one: tuple[BuiltProblem, Solution, int]) -> tuple[bool, float]:
    """Sorts solutions: those that fit by their cost, and before others, by their peak.

    one: with its problem, and the bytes that are on their way beside it
    """
    built, found, travels = one
    if found.feasible:
        return False, cost(built.problem, found.choice)
    return True, found.peak + travels


def _most_travelling(problem: Problem) -> int:
    """Returns the bytes of the largest code or tensor that may be moved."""
    items = problem.items
    return max((item.travels(o) for item in items for o in item.options if o.link), default=0)
