"""The best choice, to within half a percent: mixed-integer programming by HiGHS.

The rows and columns are those of `model.py`. Few moments bind, so their rows come lazily: the
linear relaxation is solved at some, the most loaded ones that it violates are added, again; then
the same with whole numbers, each answer checked by `problem.levels`.

Origin: Checkmate (Jain et al., MLSys 2020, arXiv 1910.02653) put rematerialization as a MILP over
O(n^2) binaries; here a saved tensor has one binary for each way to hold it (O(n)), since autograd
fixes when it is born and asked for.
"""

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from elbowroom.plan.problem import Choice, Problem, keep_all, levels
from elbowroom.plan.solve.boundaries import searched
from elbowroom.plan.solve.limits import Limits, fits, obeys
from elbowroom.plan.solve.model import ColumnModel
from elbowroom.plan.solve.program import Vector

GAP = 0.005
NODES = 1000  # of the search tree; a limit in seconds alone would make answers depend on the day
LIMIT_S = 60.0
_FIRST = 64  # moments with rows from the start
_ROUNDS = 100  # of rows added
_TOLERANCE = 1e-4  # of the model's unit: what HiGHS's own tolerances may add up to


def milp(problem: Problem, limits: Limits) -> Choice | None:
    """The cheapest choice that fits, to within GAP; None if there is none, or none came in time.

    A search ends at NODES, and then the gap may be larger. Deterministic, unless LIMIT_S ends it.
    """
    if fits(problem, keep_all(problem), limits):
        return keep_all(problem)
    found = relaxed(problem, limits)
    return None if found is None else whole(found.model, found.moments, gap=GAP)


@dataclass(frozen=True)
class Relaxation:
    """A problem in fractions: its model, the moments that bind, the solution."""

    model: ColumnModel
    moments: set[int]
    x: Vector

    @property
    def seconds(self) -> float:
        """Seconds of the relaxation: no choice that fits adds fewer."""
        return self.model.seconds(self.x)


def relaxed(problem: Problem, limits: Limits) -> Relaxation | None:
    """The best in fractions; None if not even these fit."""
    model = ColumnModel(searched(problem), limits)
    moments = first_moments(problem)
    x = search_relaxed(model, moments)
    return None if x is None else Relaxation(model, moments, x)


def first_moments(problem: Problem) -> set[int]:
    """Returns all moments if they are few, else some, spread over those that hold the most."""
    level = levels(problem, keep_all(problem))
    if len(level) <= _FIRST:
        return set(range(len(level)))
    loaded = np.flatnonzero(level >= np.median(level))
    return set(loaded[np.linspace(0, len(loaded) - 1, _FIRST).astype(int)].tolist())


def search_relaxed(model: ColumnModel, moments: set[int]) -> Vector | None:
    """The best fractions; adds the moments that bind."""
    while True:
        x = model.program.solve(relaxed=True, dense=model.level_rows(moments))
        if x is None:
            return None
        over = model.levels(x) - model.ceiling(x)
        new = _summits(over, _TOLERANCE * model.unit) - moments
        if not new:
            return x
        moments |= new


def whole(
    model: ColumnModel,
    moments: set[int],
    *,
    gap: float,
    nodes: int = NODES,
    limit_s: float = LIMIT_S,
    fixed: dict[int, float] | None = None,
    once: bool = False,
) -> Choice | None:
    """The best whole numbers; adds moments that bind.

    once: the first answer is given, which may be above the budget at moments that have no row yet
    """
    end, margin = perf_counter() + limit_s, 0.0
    for _ in range(_ROUNDS):
        left = end - perf_counter()
        if left <= 0:
            break
        rows = model.level_rows(moments, margin)
        x = model.program.solve(gap=gap, nodes=nodes, limit_s=left, fixed=fixed, dense=rows)
        if x is None:
            return None
        choice = model.choice(x)
        slack = _TOLERANCE * model.unit if model.least else 0.0
        over = levels(model.problem, choice) - np.float64(model.ceiling(x) + slack)
        new = _summits(over, 0.0) - moments
        if once or not over.max(initial=0) > 0:
            return choice if obeys(model.problem, choice, model.limits) else None
        if not new:  # by a rounding of HiGHS
            margin = 2 * (margin + float(over.max()) / model.unit)
        moments |= new
    return None


def _summits(over: Vector, least: float) -> set[int]:
    """The highest moment of each run of moments that are over, _FIRST of them at most."""
    beyond = np.flatnonzero(over > least)
    if not len(beyond):
        return set()
    runs = np.split(beyond, np.flatnonzero(np.diff(beyond) > 1) + 1)
    tops = [int(run[np.argmax(over[run])]) for run in runs]
    return set(sorted(tops, key=lambda t: (-over[t], t))[:_FIRST])
