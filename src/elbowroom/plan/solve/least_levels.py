"""A bound of the peak that takes no search: each item at its least in each moment.

    least level(t) = base(t) + sum over items of the least that any way to hold an item takes at t

The ways are the options that are allowed, and to be inside a region that runs again. In another
moment an item may be held in another way, and what regions take besides counts nothing. So no
choice comes below this, and a budget that is below it at any moment needs no solver to be refused.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from elbowroom.plan.problem import Problem, Span, region_spans
from elbowroom.plan.solve.limits import Limits

_AT_ONCE = 1 << 20  # numbers in the table of an item's ways and moments; items in one, together


def cannot_fit(problem: Problem, limits: Limits) -> bool:
    """Returns whether it is certain that no choice fits."""
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
