"""DELTA in `er.fit`: offload and recompute under a budget, and how much of the moving is hidden.

    ./scripts/bench delta [--steps 12] [--quick]

`er.fit(..., exact=True, offload="file", solver=...)` trains each network in a share of its plain
peak. Once its plan has settled:

    moved    bytes to the file and back, a step
    hidden   (moved s - waited s) / moved s: of the seconds that workers write and read, the share
             that no computing thread stood still for (`runtime/tiers/traffic.py`)
    time     a step / a plain step, medians of interleaved steps
    peak     allocator's highest level of a step, with what stands between steps, / the budget

One thread computes, so that the workers have a core of their own where there are two.
"""

import argparse
from statistics import median
from time import perf_counter
from typing import Any

import torch
from _common import arguments, facts, finish, mib, out_path, target, tell

import elbowroom as er
from elbowroom.demo.tasks import Task, task
from elbowroom.runtime.tiers import CLOCK

NAME = "delta"
GOAL = 0.7
SHARE = 0.75  # of what a plain step takes on top of what stands


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    rows = []
    for name, width, batch in options.tasks:
        work = task(name, width=width, batch=batch)
        for solver in ("delta", "auto"):
            rows.append(_row(work, solver, options.steps))
            tell(f"{rows[-1]}")
    result = {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **facts(),
        "n": f"{options.steps} interleaved steps",
        "settings": {
            "networks": "of the demo: "
            + ", ".join(f"{n} {w}, batch {b}" for n, w, b in options.tasks),
            "budget": f"what stands between steps, and {SHARE:g} of what a plain step takes on top",
        },
        "rows": rows,
        "table": {
            "head": ["network: solver", "moved", "moving", "hidden", "time", "peak"],
            "rows": [_cells(row) for row in rows],
        },
        "targets": [_goal(row) for row in rows if row["solver"] == "delta"],
        "notes": [],
    }
    finish(result, out_path(options, NAME))


def _options() -> argparse.Namespace:
    parser = arguments(__doc__, threads=1)
    parser.add_argument("--steps", type=int, default=12, help="steps that are clocked (12)")
    options = parser.parse_args()
    options.tasks = [("resnet18", 16, 64), ("unet", 16, 32), ("gpt", 128, 32)]
    if options.quick:
        options.steps, options.tasks = 2, [("gpt", 32, 8)]
    return options


def _row(work: Task, solver: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(model)
    x, y = next(work.batches(0))

    def step() -> None:
        optimizer.zero_grad()
        work.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    optimizer.zero_grad()
    standing = sum(x.nbytes for x in [*model.parameters(), *model.buffers(), *_states(optimizer)])
    budget = standing + int(SHARE * er.peak(step))
    fitted = er.fit(
        model, budget=budget, optimizer=optimizer, exact=True, offload="file", solver=solver
    )
    for _ in range(6):  # learns, plans, measures, relaxes
        step()
    optimizer.zero_grad()
    peak = standing + er.peak(step)
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    before = CLOCK.now()
    for _ in range(steps):
        start_s = perf_counter()
        step()
        seconds["ours"].append(perf_counter() - start_s)
    traffic = CLOCK.now() - before
    er.release(fitted)
    for _ in range(steps):
        start_s = perf_counter()
        step()
        seconds["plain"].append(perf_counter() - start_s)
    return {
        "network": work.name,
        "solver": solver,
        "moved_nbytes": traffic.nbytes / steps,
        "moved_s": traffic.moved_s / steps,
        "waited_s": traffic.waited_s / steps,
        "hidden": traffic.hidden_fraction,
        "time": median(seconds["ours"]) / median(seconds["plain"]),
        "peak_nbytes": peak,
        "budget_nbytes": budget,
    }


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]


def _cells(row: dict[str, Any]) -> list[str]:
    hidden = row["hidden"]
    return [
        f"{row['network']}: {row['solver']}",
        f"{mib(row['moved_nbytes'])} MiB",
        f"{1000 * row['moved_s']:.0f} ms",
        "-" if hidden is None else f"{100 * hidden:.0f} %",
        f"{row['time']:.2f}",
        f"{row['peak_nbytes'] / row['budget_nbytes']:.2f}",
    ]


def _goal(row: dict[str, Any]) -> dict[str, Any]:
    hidden = row["hidden"]
    return target(
        f"{row['network']}: >= {100 * GOAL:.0f} % of the moving is hidden, inside the budget",
        "nothing moved"
        if hidden is None
        else f"{100 * hidden:.0f} %, peak at "
        f"{100 * row['peak_nbytes'] / row['budget_nbytes']:.0f} % of the budget",
        hidden is not None and hidden >= GOAL and row["peak_nbytes"] <= row["budget_nbytes"],
    )


if __name__ == "__main__":
    main()
