"""The choice with the least peak, whatever it costs. A refusal of a budget names this peak.

    minimize t    subject to    level at every moment <= t, and all limits but the budget

The program of `milp.py` solves this. Its answer is compared with the choices of `boundaries.py`,
which programs leave out, or, if no whole numbers were found in time, with the rounded fractions.
Greedy walks then lower the better of the two, towards smaller and smaller budgets. Nothing depends
on the budget that was asked for, so the same search finds this peak when it is given as the budget.
"""

from dataclasses import replace
from math import inf

from elbowroom.plan.problem import Choice, Problem, keep_all
from elbowroom.plan.solve.boundaries import best_start, searched
from elbowroom.plan.solve.greedy import walk
from elbowroom.plan.solve.limits import Limits, fits, obeys, peak
from elbowroom.plan.solve.milp import first_moments, search_relaxed, whole
from elbowroom.plan.solve.model import Model
from elbowroom.plan.solve.partial import PartialSolution
from elbowroom.plan.solve.program import Vector

_STEPS = (5, 8, 11, 14)  # halvings of the peak: steps down from it, the next where one fails


def least_peak(problem: Problem, limits: Limits, *, fitting: bool) -> Choice | None:
    """Returns the choice with the least peak that the other limits allow.

    fitting  returns None as soon as it is proved that no choice fits the budget
    """
    asked = "least peak", limits if fitting else replace(limits, budget=0), fitting
    if asked not in problem.answers:
        problem.answers[asked] = _least_peak(problem, limits, fitting=fitting)
    found: Choice | None = problem.answers[asked]
    return found


def known_least(problem: Problem, limits: Limits) -> Choice | None:
    """Returns the choice with the least peak if it is known already, and fits; else None."""
    found: Choice | None = problem.answers.get(("least peak", replace(limits, budget=0), False))
    return found if found is not None and fits(problem, found, limits) else None


def least_bound(problem: Problem, limits: Limits) -> float:
    """Returns a peak below which hardly any choice comes; inf: none obeys the other limits."""
    model, _, x = _relaxed(problem, limits)
    start = None
    if searched(problem) is not problem:
        start = best_start(problem, limits, least=True)
    return min(
        inf if x is None else model.ceiling(x), inf if start is None else peak(problem, start)
    )


def _relaxed(problem: Problem, limits: Limits) -> tuple[Model, set[int], Vector | None]:
    """Returns the model, the moments that bind and the fractions of the least peak."""
    asked = "least fractions", replace(limits, budget=0)
    if asked not in problem.answers:
        model, moments = Model(searched(problem), limits, least=True), first_moments(problem)
        problem.answers[asked] = model, moments, search_relaxed(model, moments)
    model, moments, x = problem.answers[asked]
    return model, set(moments), x


def _least_peak(problem: Problem, limits: Limits, *, fitting: bool) -> Choice | None:
    program = searched(problem)
    model, moments, x = _relaxed(problem, limits)
    if fitting and program is problem and (x is None or model.ceiling(x) > limits.budget + 1):
        return None
    choices = [keep_all(problem)]
    if x is not None:
        found = whole(model, moments, gap=1e-7)
        if found is not None and program is problem:
            return min(choices[0], found, key=lambda choice: peak(problem, choice))
        nearest = found or model.choice(x)
        choices += [nearest] if obeys(problem, nearest, limits) else []
    if program is not problem and (start := best_start(problem, limits, least=True)) is not None:
        choices.append(start)
    return lowered(problem, limits, min(choices, key=lambda choice: peak(problem, choice)))


def lowered(problem: Problem, limits: Limits, choice: Choice) -> Choice:
    """The choice with the least peak that greedy walks find from this one on."""
    least, known = peak(problem, choice) + 1, peak(problem, choice)
    for halvings in _STEPS:
        while known < least:
            least = known
            budget = least - max(least >> halvings, 1)
            solution = PartialSolution(problem, replace(limits, budget=budget), choice)
            walk(solution)
            known = int(solution.level.max(initial=0))
            if known < least:
                choice = solution.choice
        known, least = least, least + 1
    return choice
