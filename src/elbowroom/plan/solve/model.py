"""A planning problem as a linear program.

    x_ia   item i is held by its option a          x_R   region R is recomputed      0 or 1
    z_n    seconds that options share are added    >= 0
    y_iAS  both: x_ia of some a in A, and some region of S, which i is an input of    >= 0
    s      seconds by which a link is late, out and in                                >= 0

    minimize  seconds of all x_ia, x_R and z_n, and all s

    sum_a x_ia + sum_{R holds i} x_R = 1       each item is held in one way, or rebuilt
    x_R + sum_{R' around R} x_R' <= 1          of nested regions one
    x_R <= sum_{R takes a} x_ia                for each input i of R
    sum_{a names n} x_ia <= z_n                for each item i
    sum_{a in A} x_ia + x_R - 1 <= y_iAS       for each R in S
    sum_{F_i >= F_k} x_ia size / rate <= F_end - F_k + s_out     for each last use F_k in forward
    sum_{b_i <= b_k} x_ia size / rate <= b_k + s_in              for each need b_k in backward
    sum size x_ia <= room, sum variance x_ia + sum more variance y_iAR <= allowed
    level at a moment <= budget                for the moments that are asked for (`level_rows`)

All bytes of the levels come from `problem.option_spans` and `problem.region_spans`. Sums over the
queue of a link are chained, row to row, so that the program stays sparse. Times in ms, bytes in a
unit of 1/64 of the largest item: HiGHS's tolerances are absolute.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from elbowroom.plan.problem import (
    Choice,
    Problem,
    Span,
    due,
    option_spans,
    recomputed_items,
    region_spans,
    summed,
    time_to_leave,
    time_to_return,
)
from elbowroom.plan.solve.limits import Limits, outer
from elbowroom.plan.solve.program import Program, Vector

_More = tuple[int, frozenset[int], Span]  # of an item, since one of these regions starts from it
_Queue = defaultdict[int, list[tuple[int, float]]]  # moment -> (column, ms)

_MS = 1e3
_CHANGED_MS = 1e-6  # ties go to the choice that changes fewer items
_NOISE = 1e-3  # of an item inside a recomputed region, whose options count for nothing
_ALLOWED = 1e3  # what the variance that is allowed is scaled to


class ColumnModel:
    """The columns of a problem, and how to read a solution.

    least  minimize the peak in place of the seconds
    """

    def __init__(self, problem: Problem, limits: Limits, *, least: bool = False) -> None:
        self.problem, self.limits, self.least = problem, limits, least
        self.program = Program()
        self.unit = max([item.nbytes for item in problem.items], default=0) / 64 or 1.0
        self._spans: list[tuple[int, Span]] = []  # of columns
        self._peak = self.program.column(1.0, upper=inf) if least else -1
        self._regions = [self._region(r) for r in range(len(problem.regions))]
        self._options = {
            (i, a): self._option(i, a)
            for i, item in enumerate(problem.items)
            for a, option in enumerate(item.options)
            if limits.allow(option)
        }
        self._both: dict[tuple[int, frozenset[int], frozenset[int]], int] = {}
        self._starts: dict[int, dict[int, int]] = defaultdict(dict)  # of regions, by their inputs
        for r, region in enumerate(problem.regions):
            for i in region.inputs:
                self._starts[i][r] = region.start
        self._choice_rows()
        self._region_rows()
        if not least:
            self._shared_rows()
        self._noises = self._region_noises()
        self._side_rows()
        self._input_levels()
        for name in () if least else problem.links:
            self._link_rows(name)
        self._flat = np.array([(c, *span) for c, span in self._spans], np.int64).reshape(-1, 4)

    def level_rows(
        self, moments: Collection[int], margin: float = 0.0
    ) -> tuple[Vector, Sequence[float]]:
        """Factors [moments, columns] of the levels, and the highest values allowed."""
        column, first, last, nbytes = self._flat.T
        at = np.array(sorted(moments), np.int64)
        steps = np.zeros((len(at) + 1, len(self.program.cost)))
        np.add.at(steps, (np.searchsorted(at, first), column), nbytes / self.unit)
        np.subtract.at(steps, (np.searchsorted(at, last, "right"), column), nbytes / self.unit)
        factors = np.cumsum(steps[:-1], axis=0)
        if self.least:
            factors[:, self._peak] = -1
        limit = 0 if self.least else self.limits.budget
        base = np.array(self.problem.base, np.int64)[at]
        return factors, list((limit - base) / self.unit - margin)

    def ceiling(self, x: Vector) -> float:
        """Bytes that no moment may exceed."""
        return float(x[self._peak]) * self.unit if self.least else self.limits.budget

    def seconds(self, x: Vector) -> float:
        """Returns the seconds that a solution in fractions adds; at most, with its ties counted."""
        return float(np.dot(self.program.cost, x)) / _MS

    def levels(self, x: Vector) -> Vector:
        """Bytes [moments] where columns may be fractions."""
        column, first, last, nbytes = self._flat.T
        steps = np.zeros(len(self.problem.base) + 1)
        np.add.at(steps, first, nbytes * x[column])
        np.subtract.at(steps, last + 1, nbytes * x[column])
        return np.array(self.problem.base, float) + np.cumsum(steps[:-1])

    def ways(self) -> list[list[int]]:
        """Returns, for each item, the columns that hold it, one of which is 1, regions included."""
        ways: list[list[int]] = [[] for _ in self.problem.items]
        for (i, _), column in self._options.items():
            ways[i].append(column)
        for region, column in zip(self.problem.regions, self._regions, strict=True):
            for i in region.inside:
                ways[i].append(column)
        return ways

    def choice(self, x: Vector) -> Choice:
        """Returns the choice of columns: the largest of an item's options, regions from a half."""
        share = [0.0] * len(self.problem.items)
        options = [0] * len(self.problem.items)
        for (i, a), column in self._options.items():
            if x[column] > max(share[i], _NOISE):
                options[i], share[i] = a, x[column]
        chosen = (r for r, column in enumerate(self._regions) if x[column] > 0.5)
        return Choice(tuple(options), frozenset(chosen))

    def columns(self, choice: Choice) -> Vector:
        """The columns of options and regions that a choice means; all others are 0."""
        x = np.zeros(len(self.program.cost))
        gone = recomputed_items(self.problem, choice.recomputed)
        x[[self._regions[r] for r in choice.recomputed]] = 1
        x[[self._options[i, a] for i, a in enumerate(choice.options) if i not in gone]] = 1
        return x

    def _option(self, i: int, a: int) -> int:
        option = self.problem.items[i].options[a]
        ms = _MS * option.cost_s + _CHANGED_MS * (a > 0)
        column = self.program.column(0.0 if self.least else ms, whole=True)
        self._add_spans(column, self.problem.spans(i, a))
        return column

    def _region(self, r: int) -> int:
        region = self.problem.regions[r]
        ms = _MS * region.seconds + _CHANGED_MS * (1 + len(region.inside))
        column = self.program.column(0.0 if self.least else ms, whole=True)
        self._add_spans(column, region_spans(self.problem, region))
        return column

    def _add_spans(self, column: int, spans: Sequence[Span]) -> None:
        self._spans += [(column, span) for span in spans if span[2] and span[0] <= span[1]]

    def _choice_rows(self) -> None:
        for columns in self.ways():
            self.program.row([(column, 1.0) for column in columns], low=1.0, high=1.0)

    def _region_rows(self) -> None:
        for r, region in enumerate(self.problem.regions):
            column = self._regions[r]
            around = [self._regions[o] for o in outer(self.problem, r)]
            if around:
                self.program.row([(c, 1.0) for c in (column, *around)], high=1.0)
            for i in region.inputs:
                options = enumerate(self.problem.items[i].options)
                taken = [a for a, o in options if region.takes(o) and (i, a) in self._options]
                good = [self._options[i, a] for a in taken]
                self.program.row([(column, 1.0), *((c, -1.0) for c in good)], high=0.0)

    def _shared_rows(self) -> None:
        """Adds a column for each of `shared_s`, which any option that names it needs."""
        named: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for (i, a), column in self._options.items():
            for n in self.problem.items[i].options[a].shared:
                named[n, i].append(column)
        columns = [self.program.column(_MS * seconds) for seconds in self.problem.shared_s]
        for (n, _), options in named.items():
            self.program.row([*((c, 1.0) for c in options), (columns[n], -1.0)], high=0.0)

    def _side_rows(self) -> None:
        items = self.problem.items
        lossy = [(c, items[i].options[a].variance) for (i, a), c in self._options.items()]
        lossy += self._noises
        if 0 < self.limits.variance < inf:
            scale = _ALLOWED / self.limits.variance
            self.program.row([(c, v * scale) for c, v in lossy if v], high=_ALLOWED)
        for name, link in self.problem.links.items():
            if link.room is not None:
                moved = [
                    (c, items[i].travels(items[i].options[a]) / self.unit)
                    for i, a, c in self._moved(name)
                ]
                self.program.row(moved, high=link.room / self.unit)

    def _region_noises(self) -> list[tuple[int, float]]:
        """Returns (column, variance) for all that regions add which start from codes.

        A column for each variance that an input's options have, of all that have it or more: what
        these add beyond the next smaller one.
        """
        found: list[tuple[int, float]] = []
        if self.least and self.limits.variance == inf:
            return found
        for r, region in enumerate(self.problem.regions):
            for i in region.inputs if region.noise else ():
                variances = {
                    a: region.variance(option)
                    for a, option in enumerate(self.problem.items[i].options)
                    if region.takes(option) and not option.exact and (i, a) in self._options
                }
                for below, value in pairwise([0.0, *sorted(set(variances.values()))]):
                    options = frozenset(a for a, v in variances.items() if v >= value)
                    pair, more = self._pair(i, options, frozenset((r,))), value - below
                    found.append((pair, more))
                    if not self.least:
                        self.program.cost[pair] += _MS * region.noise_s * more
        return found

    def _moved(self, name: str) -> list[tuple[int, int, int]]:
        """Returns what may travel a link: (item, option, column)."""
        items = self.problem.items
        return [
            (i, a, c) for (i, a), c in self._options.items() if items[i].options[a].link == name
        ]

    def _pair(self, i: int, options: frozenset[int], regions: frozenset[int]) -> int:
        """The column of: one of these options holds item i, and one of the regions runs again."""
        if (i, options, regions) not in self._both:
            both = self._both[i, options, regions] = self.program.column(0.0)
            held = [(self._options[i, a], 1.0) for a in sorted(options)]
            for r in sorted(regions):
                terms = [*held, (self._regions[r], 1.0), (both, -1.0)]
                self.program.row(terms, high=1.0)
        return self._both[i, options, regions]

    def _input_levels(self) -> None:
        """Returns the bytes that options take since a recomputed region starts from their item."""
        moments, alike = len(self.problem.base), defaultdict[_More, list[int]](list)
        for i, a in self._options:
            item, starts = self.problem.items[i], self._starts[i]
            option, regions = item.options[a], self.problem.regions
            starts = {r: s for r, s in starts.items() if regions[r].takes(option)}
            if starts:
                plain = summed(self.problem.spans(i, a), moments)
                more = {r: summed(option_spans(item, a, (s,)), moments) for r, s in starts.items()}
                for enough, span in _steps({r: level - plain for r, level in more.items()}):
                    alike[i, enough, span].append(a)
        for (i, enough, span), options in alike.items():
            self._add_spans(self._pair(i, frozenset(options), enough), [span])

    def _link_rows(self, name: str) -> None:
        problem, link = self.problem, self.problem.links[name]
        out: _Queue = defaultdict(list)
        back: _Queue = defaultdict(list)
        for i, a, column in self._moved(name):
            item = problem.items[i]
            nbytes = item.travels(item.options[a])
            out[-item.used].append((column, _MS * nbytes / link.out_rate))
            for moment, c, sign in self._dues(i, a, column):
                back[moment].append((c, sign * _MS * nbytes / link.in_rate))
        self._lateness(out, lambda moment: time_to_leave(problem, -moment))
        self._lateness(back, lambda moment: time_to_return(problem, moment))

    def _dues(self, i: int, a: int, column: int) -> list[tuple[int, int, float]]:
        """Returns the moments by which an option has its item back: (moment, column, factor).

        Where a region starts from the item before its own need, it joins with that region.
        """
        last = due(self.problem.items[i])
        starts = {r: start for r, start in self._starts[i].items() if start < last}
        joined = [
            (moment, self._pair(i, frozenset((a,)), _until(starts, moment)))
            for moment in sorted(set(starts.values()))
        ]
        joined.append((last, column))
        left = [(later, both, -1.0) for (_, both), (later, _) in pairwise(joined)]
        return [(moment, both, 1.0) for moment, both in joined] + left

    def _lateness(self, queue: _Queue, allowed_s: Callable[[int], float]) -> None:
        """Adds one column, at least by how much the queue is late at any of its moments."""
        late = self.program.column(1.0, upper=inf)
        before: list[tuple[int, float]] = []
        for moment in sorted(queue):
            busy = self.program.column(0.0, upper=inf)
            self.program.row([(busy, -1.0), *before, *queue[moment]], low=0.0, high=0.0)
            self.program.row([(busy, 1.0), (late, -1.0)], high=_MS * allowed_s(moment))
            before = [(busy, 1.0)]


def _until(starts: dict[int, int], moment: int) -> frozenset[int]:
    """The regions that have started by this moment."""
    return frozenset(r for r, start in starts.items() if start <= moment)


def _steps(levels: dict[int, NDArray[np.int64]]) -> Iterator[tuple[frozenset[int], Span]]:
    """The maximum of levels, one for each region, as a sum of spans.

    Each with the regions any one of which is enough for it.
    """
    regions = list(levels)
    table = np.array([levels[r] for r in regions])  # [regions, moments]
    cuts = [0, *(np.flatnonzero((np.diff(table) != 0).any(axis=0)) + 1).tolist(), table.shape[1]]
    for first, after in pairwise(cuts):
        values = table[:, first].tolist()
        for below, value in pairwise([0, *sorted({v for v in values if v > 0})]):
            enough = frozenset(r for r, v in zip(regions, values, strict=True) if v >= value)
            yield enough, (first, after - 1, value - below)
