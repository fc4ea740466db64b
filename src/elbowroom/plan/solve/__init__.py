"""Solvers: a problem and its limits go in, a choice comes out.

    auto      the best of uniform, greedy, rounding and, where that is not near the bound, milp
    milp      to within half a percent of the best, or the least peak
    rounding  the linear relaxation, rounded and repaired: for thousands of items
    greedy    seconds per byte freed
    uniform   one setting for all                                                    a baseline
    delta     DELTA's filter and director; dtr, capuchin: their rules in its place   baselines;
              the last two take no codes

Where no choice fits, the first four give none, and the one with the least peak of all takes its
place (`least.py`); the baselines give what they have. Most budgets that are too small are so by a
bound that takes no search (`cannot_fit`), and no solver runs for them.
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from math import inf
from time import perf_counter

from elbowroom.errors import PlanError
from elbowroom.plan.problem import Choice, Problem, Solution, added_seconds, keep_all
from elbowroom.plan.solve.auto import auto
from elbowroom.plan.solve.delta import capuchin, delta, dtr
from elbowroom.plan.solve.greedy import greedy
from elbowroom.plan.solve.least import cannot_fit, known_least
from elbowroom.plan.solve.least import least_bound as least_bound
from elbowroom.plan.solve.least import least_peak as least_peak
from elbowroom.plan.solve.least import lowered as lowered
from elbowroom.plan.solve.limits import Limits as Limits
from elbowroom.plan.solve.limits import fits as fits
from elbowroom.plan.solve.limits import peak as peak
from elbowroom.plan.solve.milp import milp
from elbowroom.plan.solve.milp import relaxed as relaxed
from elbowroom.plan.solve.rounding import is_nearly_best as is_nearly_best
from elbowroom.plan.solve.rounding import rounding
from elbowroom.plan.solve.uniform import uniform

Solver = Callable[[Problem, Limits], Choice | None]

SOLVERS: dict[str, Solver] = {
    "auto": auto,
    "milp": milp,
    "rounding": rounding,
    "greedy": greedy,
    "uniform": uniform,
    "delta": delta,
    "dtr": dtr,
    "capuchin": capuchin,
}

BASELINES = ("uniform", "delta", "dtr", "capuchin")  # they give what they have
WITHOUT_CODES = ("dtr", "capuchin")  # they move and recompute


def solve(
    problem: Problem,
    budget: int,
    *,
    variance: float = inf,
    exact: bool = False,
    solver: str = "auto",
    least: bool | None = True,
    lowest: Choice | None = None,
) -> Solution:
    """Returns the action for each item, so that no moment holds more than `budget` bytes.

    variance  allowed in all, as a share of that of mini-batches
    exact     exact options only
    solver    one of SOLVERS; PlanError for another
    least     where none fits: True: the one with the least peak is given; False: the search for it
              is made as long as it may find one that fits; None: plain autograd is given at once,
              unless the search has been made before, and what it found fits
    lowest    the one with the least peak, where that is known already
    """
    check_solver(solver)
    limits = Limits(budget, variance, exact)
    start = perf_counter()
    in_vain = solver not in BASELINES and cannot_fit(problem, limits)
    if (solver, limits) not in problem.answers:
        problem.answers[solver, limits] = None if in_vain else SOLVERS[solver](problem, limits)
    searches = bool(least) or (least is not None and not in_vain)
    choice = (
        problem.answers[solver, limits]
        or lowest
        or known_least(problem, limits)
        or (least_peak(problem, limits, fitting=not least) if searches else None)
        or keep_all(problem)
    )
    solve_s = perf_counter() - start
    return Solution(
        choice,
        feasible=fits(problem, choice, limits),
        peak=peak(problem, choice),
        slowdown_s=added_seconds(problem, choice),
        solve_s=solve_s,
        solver=solver,
    )


def check_solver(
    solver: str,
    *,
    exact: bool | None = None,
    noise: float | None = None,
    codecs: Sequence[object] | None = None,
) -> None:
    """Raises PlanError unless there is one of this name, which takes codes if these are asked for.

    What it needs is imported by then.
    """
    if not isinstance(solver, str) or solver not in SOLVERS:
        close = get_close_matches(str(solver), SOLVERS, n=1)
        meant = f" Did you mean '{close[0]}'?" if close else ""
        raise PlanError(f"no solver {solver!r}; there are {', '.join(SOLVERS)}.{meant}")
    asked = "exact=False" if exact is False else f"noise={noise:g}" if noise else ""
    asked = asked if codecs is None else f"codecs={codecs!r}"
    if solver in WITHOUT_CODES and asked:
        raise PlanError(
            f"solver={solver!r} moves and recomputes, and takes no codes, so {asked} has no "
            "effect; leave one of the two out, or give solver='delta', which takes codes, too"
        )
    import_module("scipy.optimize")  # a third of a second, which no step has to wait for
