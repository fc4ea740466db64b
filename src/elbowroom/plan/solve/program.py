"""A linear program with whole numbers, written column by column and row by row; solved by HiGHS.

minimize cost . x    subject to    low <= A x <= high,    0 <= x <= upper,    some x whole
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from elbowroom.plan.solve.silence_stdout import silent_stdout

Vector = NDArray[np.float64]

_FAILED = 4  # what scipy calls all that is neither an answer nor a proof nor a limit


@dataclass
class Program:
    """Columns (cost, upper, whole) and rows (terms, low, high), in the order they were added."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    _at: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _factors: list[float] = field(default_factory=list)

    def column(self, cost: float, *, upper: float = 1.0, whole: bool = False) -> int:
        """A new variable; gives its index."""
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(
        self, terms: Iterable[tuple[int, float]], *, low: float = -inf, high: float = inf
    ) -> None:
        """A new row: low <= sum of factor * x[column] <= high. A column may come twice."""
        for column, factor in terms:
            self._at.append(len(self.low))
            self._columns.append(column)
            self._factors.append(factor)
        self.low.append(low)
        self.high.append(high)

    def solve(
        self,
        *,
        relaxed: bool = False,
        fixed: Mapping[int, float] | None = None,
        gap: float = 0.0,
        limit_s: float = inf,
        nodes: int | None = None,
        dense: tuple[Vector, Sequence[float]] | None = None,
    ) -> Vector | None:
        """The best x, or None if there is none, or none was found in time.

        relaxed  all x may be fractions
        fixed    x that are given
        gap      relative, between what is found and what is proved
        nodes    of the search tree that are examined
        dense    further rows: factors [rows, columns], and their highest values
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # see check_solver
        from scipy.sparse import csr_array, vstack

        n = len(self.cost)
        if n == 0:  # rows without terms
            below = [*self.high, *(dense[1] if dense is not None else ())]
            return None if min(below, default=0.0) < 0 else np.zeros(0)
        low, high = np.zeros(n), np.array(self.upper)
        for column, value in (fixed or {}).items():
            low[column] = high[column] = value
        A = csr_array((self._factors, (self._at, self._columns)), shape=(len(self.low), n))
        lows, highs = list(self.low), list(self.high)
        if dense is not None:
            A = vstack([A, csr_array(dense[0])], format="csr")
            lows += [-inf] * len(dense[1])
            highs += dense[1]
        options: dict[str, float] = {"mip_rel_gap": gap}
        if nodes is not None:
            options["node_limit"] = nodes
        if limit_s < inf:
            options["time_limit"] = limit_s
        constraints = LinearConstraint(A, lows, highs) if lows else None
        # Without whole numbers, presolve takes as long as what is left to solve then (half of 184,
        # 188 and 119 ms, 12 to 25 programs each). With them, HiGHS 1.12's now and then ends in an
        # error.
        for presolve in (False, True) if relaxed else (True, False):
            with silent_stdout():
                answer = milp(
                    np.array(self.cost),
                    integrality=np.zeros(n) if relaxed else np.array(self.whole, float),
                    bounds=Bounds(low, high),
                    constraints=constraints,
                    options={**options, "presolve": presolve},
                )
            if answer.status != _FAILED:
                break
        return None if answer.x is None else np.asarray(answer.x)
