"""The choice with the least peak, whatever it costs. A refusal of a budget names this peak.

    minimize t    subject to    level at every moment <= t, and all limits but the budget

The program of `milp.py` solves this. Its answer is compared with the choices of `boundaries.py`,
which programs leave out, or, if no whole numbers were found in time, with the rounded fractions.
Greedy walks then lower the better of the two, towards smaller and smaller budgets. Nothing depends
on the budget that was asked for, so the same search finds this peak when it is given as the budget.
"""

from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from elbowroom.plan.problem import Choice, Problem, Span, keep_all, region_spans
from elbowroom.plan.solve.boundaries import best_start, searched
from elbowroom.plan.solve.greedy import walk
from elbowroom.plan.solve.limits import Limits, fits, obeys, peak
from elbowroom.plan.solve.milp import first_moments, search_relaxed, whole
from elbowroom.plan.solve.model import ColumnModel
from elbowroom.plan.solve.partial import PartialSolution
from elbowroom.plan.solve.program import Vector

# Of the peak, between what is found and what is proved. A proof to 1e-4 took 25 s of one problem of
# a ResNet-50 whose answer was there after one, to 1e-3 other answers were found (0.03 % higher).
_GAP = 3e-4
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


def _relaxed(problem: Problem, limits: Limits) -> tuple[ColumnModel, set[int], Vector | None]:
    """Returns the model, the moments that bind and the fractions of the least peak."""
    asked = "least fractions", replace(limits, budget=0)
    if asked not in problem.answers:
        model, moments = ColumnModel(searched(problem), limits, least=True), first_moments(problem)
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
        found = whole(model, moments, gap=_GAP)
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


_AT_ONCE = 1 << 20  # numbers in the table of an item's ways and moments; items in one, together


def cannot_fit(problem: Problem, limits: Limits) -> bool:
    """Returns whether it is certain that no choice fits.

        least level(t) = base(t) + sum over items of the least that any way to hold it takes at t

    The ways are the options that are allowed, and to be inside a region that runs again. In another
    moment an item may be held in another way, and what regions take besides counts nothing. So no
    choice comes below this, and a budget that is below it at any moment needs no solver to be
    refused.
    """
    asked = "least levels", replace(limits, budget=0)
    if asked not in problem.answers:
        problem.answers[asked] = int(least_levels(problem, limits).max(initial=0))
    least: int = problem.answers[asked]
    return least > limits.budget


def least_levels(problem: Problem, limits: Limits) -> NDArray[np.int64]:
    """Returns bytes [moments] that no choice comes below which obeys all limits but the budget."""
    level = np.array(problem.base, np.int64)
    ways = _ways(problem, limits)
    many = max(_AT_ONCE // max(len(level), 1), 1)
    first = rows = 0
    for after in range(len(ways) + 1):
        if after == len(ways) or (rows + len(ways[after]) > many and rows):
            level += _least(ways[first:after], len(level))
            first, rows = after, 0
        if after < len(ways):
            rows += len(ways[after])
    return level


def _ways(problem: Problem, limits: Limits) -> list[list[list[Span]]]:
    """Returns, for each item, the spans of each way to hold it.

    A region that starts from an item restores it earlier, and has what it is made of stand there in
    place of a later need. That need is bounded all the same: by the item as it is kept.
    """
    ways = [
        [problem.spans(i, a) for a, option in enumerate(item.options) if limits.allow(option)]
        for i, item in enumerate(problem.items)
    ]
    for region in problem.regions:
        besides, spans = 2, region_spans(problem, region)  # of the region itself, before its items
        for k, i in enumerate(region.inside):
            ways[i].append(spans[besides + 2 * k : besides + 2 * k + 2])
    return ways


def _least(ways: list[list[list[Span]]], moments: int) -> NDArray[np.int64]:
    """Returns bytes [moments] of these items together, each at its least in each moment."""
    if not ways:
        return np.zeros(moments, np.int64)
    each = [way for item in ways for way in item]
    spans = [(row, *span) for row, way in enumerate(each) for span in way if span[0] <= span[1]]
    steps = np.zeros((len(each), moments + 1), np.int64)
    if spans:
        row, first, last, nbytes = np.array(spans, np.int64).T
        np.add.at(steps, (row, first), nbytes)
        np.subtract.at(steps, (row, last + 1), nbytes)
    starts = np.cumsum([0, *(len(item) for item in ways[:-1])])
    least = np.minimum.reduceat(np.cumsum(steps[:, :-1], axis=1), starts, axis=0)
    return np.asarray(least.sum(axis=0), np.int64)
