"""Lossy plans with a place to move to: tensors and codes move there, codes alone, or nothing.

    moved            options     bytes that are on their way, beside the plan's peak
    tensors, codes   all         the largest tensor
    codes            fewer       the largest code
    nothing          the fewest  none

A row that moves less leaves more of the budget for the step, and may fit where the others do not.
All of its options are also options of the first row, so it is not searched if its bound shows that
it could hardly gain anything (`solve/rounding.py`).
"""

from collections.abc import Callable
from functools import partial
from math import inf

from elbowroom.codecs import Codec
from elbowroom.plan.build_problem import BuiltProblem, build_problem
from elbowroom.plan.coarse import solve_apart
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
    attempts: list[tuple[BuiltProblem, Solution, int]] = []
    builds: list[Callable[..., BuiltProblem]] = []
    for tier, whole in places:
        fitting = [one for one in attempts if one[1].feasible]
        best_s = min((cost(built.problem, one.choice) for built, one, _ in fitting), default=inf)
        if fitting and may_skip:
            freely = Limits(budget, variance)  # as if nothing were on its way
            if is_nearly_best(attempts[0][0].problem, freely, best_s):
                break
        build = partial(
            build_problem,
            profile,
            exact=False,
            recompute=recompute,
            offload=tier,
            whole=whole,
            codecs=codecs,
        )
        built = build()
        travels = in_flight if whole else _most_travelling(built.problem)
        left = budget - travels
        if fitting and may_skip and is_nearly_best(built.problem, Limits(left, variance), best_s):
            continue
        built, found = solve_apart(
            profile,
            build,
            partial(
                solve,
                budget=left,
                variance=variance,
                solver=solver,
                least=None if may_skip else least,
            ),
        )
        attempts.append((built, found, travels))
        builds.append(build)
    if least and may_skip and not any(found.feasible for _, found, _ in attempts):
        search = partial(solve, variance=variance, solver=solver)
        attempts = _least(profile, attempts, builds, budget, variance, search)
    return min(attempts, key=_rank)


def _least(
    profile: Profile,
    attempts: list[tuple[BuiltProblem, Solution, int]],
    builds: list[Callable[..., BuiltProblem]],
    budget: int,
    variance: float,
    search: Callable[..., Solution],
) -> list[tuple[BuiltProblem, Solution, int]]:
    """Searches for the least peak of each that may have the least of all, by their bounds."""
    bounds = [
        least_bound(built.problem, Limits(budget - travels, variance)) + travels
        for built, _, travels in attempts
    ]
    found: list[tuple[BuiltProblem, Solution, int]] = []
    for at in sorted(range(len(attempts)), key=bounds.__getitem__):
        least = min((one.peak + travels for _, one, travels in found), default=inf)
        if bounds[at] < least:
            travels = attempts[at][2]
            apart = solve_apart(profile, builds[at], partial(search, budget=budget - travels))
            found.append((*apart, travels))
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
