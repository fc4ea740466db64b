"""The planner: every solver's added time over the linear bound, and how long it takes.

    ./scripts/bench planner [--quick] [--sizes 100 500 2000]

Steps at random from `_problems.chain` (its settings stand there), with blocks that differ and with
blocks that are all alike; budgets of a half, a quarter and a tenth of all saved bytes on top of the
base; variance allowed: a quarter of what 4 bits everywhere would add. The bound is that of the
linear relaxation: no plan can add less. What is reported is arithmetic on invented steps, except
for the seconds that solving took.
"""

import sys
from typing import Any

from _common import arguments, facts, finish, out_path, target, tell
from _problems import chain, plain_nbytes, quarter_of_4_bits

from elbowroom.plan.problem import Problem
from elbowroom.plan.solve import SOLVERS, Limits, relaxed, solve

NAME = "planner"
SHARES = (0.5, 0.25, 0.1)
HEAD = ("items", "blocks", "budget", "bound, ms", "solver", "added / bound", "solved in, s")
LONG = {"milp": 500, "dtr": 500, "capuchin": 500}  # items beyond which they are left out


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 500, 2000], help="items")
    options = parser.parse_args()
    sizes = [50] if options.quick else options.sizes
    result: dict[str, Any] = {
        "name": NAME,
        "claim": "What each solver's plan adds to a step, over the bound that none can beat.",
        **facts(),
        "n": "1 run each; solvers are deterministic",
        "settings": {"shares": SHARES, "variance": "a quarter of 4 bits everywhere"},
    }
    rows = [row for n in sizes for same in (False, True) for row in solved(n, same_blocks=same)]
    finish(
        result | {"rows": rows, "table": table(rows), "targets": targets(rows)},
        out_path(options, NAME),
    )


def solved(n: int, *, same_blocks: bool) -> list[dict[str, Any]]:
    problem, rows = chain(n, same_blocks=same_blocks), []
    for share in SHARES:
        rows += at_budget(problem, share)
        tell(f"{n} items, {'same' if same_blocks else 'different'} blocks, budget {share}")
    return [{"items": n, "same_blocks": same_blocks, **row} for row in rows]


def at_budget(problem: Problem, share: float) -> list[dict[str, Any]]:
    budget = int(share * plain_nbytes(problem)) + max(problem.base)
    variance = quarter_of_4_bits(problem)
    relaxation = relaxed(problem, Limits(budget, variance))
    assert relaxation is not None
    bound_s, rows = relaxation.seconds, []
    for name in SOLVERS:
        if len(problem.items) <= LONG.get(name, sys.maxsize):
            found = solve(problem, budget, variance=variance, solver=name)
            rows.append(
                {
                    "budget": share,
                    "bound_s": bound_s,
                    "solver": name,
                    "feasible": found.feasible,
                    "slowdown_s": found.slowdown_s,
                    "step_s": problem.seconds,
                    "peak": found.peak,
                    "solve_s": found.solve_s,
                    "recomputed": len(found.choice.recomputed),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"head": HEAD, "rows": [line(row) for row in rows]}


def line(row: dict[str, Any]) -> list[str]:
    ratio = row["slowdown_s"] / row["bound_s"]
    return [
        str(row["items"]),
        "same" if row["same_blocks"] else "differ",
        f"{row['budget']:.2f}",
        f"{1e3 * row['bound_s']:.3f}",
        row["solver"],
        f"{ratio:.4f}" if row["feasible"] else "does not fit",
        f"{row['solve_s']:.2f}",
    ]


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    auto = [row for row in rows if row["solver"] == "auto" and row["items"] >= 500]
    longest = max((row["solve_s"] for row in auto if row["items"] == 500), default=None)
    found = []
    if auto:
        worst = max(row["slowdown_s"] / row["bound_s"] for row in auto)
        found.append(
            target(
                "auto adds at most 1 % more than the bound from 500 items on",
                f"at most {worst:.4f} times the bound",
                worst <= 1.01 and all(row["feasible"] for row in auto),
            )
        )
    if longest is not None:
        found.append(target("500 items in 2 s", f"at most {longest:.2f} s", longest <= 2))
    return found


if __name__ == "__main__":
    main()
