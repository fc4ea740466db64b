"""Coop against DTR in the simulator: evictions that leave contiguous room, on traces of real steps.

    ./scripts/bench coop [--quick]

Forward and backward of each network are written down op by op (`TorchDispatchMode`): what is read,
what is made, the seconds that it took. `_eviction.py` runs that step again in less memory.

Which tensor goes follows from the seconds of its op, and these differ from step to step: a budget
that a rule gets through with one trace it may not with the next. So there are several traces.

    slower   added seconds / seconds of the step: the median of the traces that both get through
    wasted   of the evicted bytes, the share that went beyond what was asked for, because no gap
             was wide enough: the median of the same
    through  traces that the rule gets through in this budget
    least    the least budget, as a share of the plain peak, that the rule gets through with most
             of the traces, of those tried
"""

import argparse
import time
from collections.abc import Iterator
from statistics import mean, median
from typing import Any

import torch
from _common import arguments, facts, finish, out_path, target, tell
from _eviction import Rule, Trace, TracedOp, evict, plain_peak
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elbowroom.demo.tasks import Task, task

NAME = "coop"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TRACES = 5
RULES: tuple[Rule, ...] = ("dtr", "coop")
WHAT = ("through", "slower", "wasted")
SMALL = 4096  # bytes; smaller tensors stay


class _Writing(TorchDispatchMode):
    """Notes every op. A tensor that is written in place counts as a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[TracedOp] = []
        self.nbytes: list[int] = []
        self._now: dict[int, int] = {}  # storage -> tensor
        self._alive: list[Any] = []  # so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        reads = [self._number(x) for x in given]
        start_s = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start_s
        written = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
        makes = []
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                key = x.untyped_storage()._cdata
                if key not in self._now or (written and any(x is y for y in given)):
                    makes.append(self._new(x))
        is_view = not makes
        if not is_view:
            known = {n for n in reads if n is not None}
            self.ops.append(TracedOp(tuple(sorted(known)), tuple(makes), seconds))
        return out

    def _number(self, x: Tensor) -> int | None:
        key = x.untyped_storage()._cdata
        return self._now[key] if key in self._now else self._new(x)

    def _new(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        self._alive.append(storage)
        self._now[storage._cdata] = len(self.nbytes)
        self.nbytes.append(max(512, -(-storage.nbytes() // 512) * 512))
        return len(self.nbytes) - 1


def traced(work: Task) -> Trace:
    """Forward and backward of one step. Small tensors count as being elsewhere."""
    torch.manual_seed(0)
    model = work.model()
    x, y = next(work.batches(0))
    work.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    writing = _Writing()
    with writing:
        work.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    large = {i for i, nbytes in enumerate(writing.nbytes) if nbytes > SMALL}
    ops = [
        TracedOp(
            tuple(i for i in op.reads if i in large),
            tuple(i for i in op.makes if i in large),
            op.seconds,
        )
        for op in writing.ops
    ]
    return Trace(tuple(op for op in ops if op.reads or op.makes), tuple(writing.nbytes))


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    rows = [row for work in options.tasks for row in _rows(work, options.traces)]
    result = {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **facts(),
        "n": f"{options.traces} traces a network; the simulation has no noise",
        "settings": {"networks": "of the demo: ResNet-18 32, batch 32; U-Net 16, 16; GPT 128, 16"},
        "rows": rows,
        "table": {
            "head": [
                "network, budget",
                *(f"{rule} {what}" for what in WHAT for rule in ("DTR", "Coop")),
            ],
            "rows": [_cells(row) for row in rows],
        },
        "targets": [_goal(rows, work.name) for work in options.tasks],
        "notes": [],
    }
    finish(result, out_path(options, NAME))


def _options() -> argparse.Namespace:
    parser = arguments(__doc__, threads=1)
    options = parser.parse_args()
    sizes = [("resnet18", 32, 32), ("unet", 16, 16), ("gpt", 128, 16)]
    options.traces = 2 if options.quick else TRACES
    if options.quick:
        sizes = [("gpt", 32, 4)]
    options.tasks = [task(name, width=width, batch=batch) for name, width, batch in sizes]
    return options


def _rows(work: Task, traces: int) -> Iterator[dict[str, Any]]:
    steps = [traced(work) for _ in range(traces)]
    tell(f"{work.name}: {len(steps[0].ops)} ops, {plain_peak(steps[0]) / 2**20:.0f} MiB")
    for share in SHARES:
        found = {rule: [_run(trace, share, rule) for trace in steps] for rule in RULES}
        yield {"network": work.name, "share": share, **found}


def _run(trace: Trace, share: float, rule: Rule) -> dict[str, Any]:
    out = evict(trace, int(share * plain_peak(trace)), rule)
    evicted = out.evicted_nbytes
    return {
        "fits": out.fits,
        "slower": out.seconds / sum(op.seconds for op in trace.ops) - 1,
        "wasted": out.wasted_nbytes / evicted if evicted else 0.0,
        "reruns": out.reruns,
    }


def _through(row: dict[str, Any], rule: Rule) -> int:
    return sum(one["fits"] for one in row[rule])


def _median(row: dict[str, Any], rule: Rule, what: str) -> float | None:
    """The median of the traces that both rules get through; None: there are none."""
    both = [
        dtr["fits"] and coop["fits"] for dtr, coop in zip(*(row[r] for r in RULES), strict=True)
    ]
    values = [one[what] for one, fits in zip(row[rule], both, strict=True) if fits]
    return median(values) if values else None


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['network']}, {row['share']:g}"]
    cells += [f"{_through(row, rule)} of {len(row[rule])}" for rule in RULES]
    for what, digits in (("slower", 1), ("wasted", 0)):
        for rule in RULES:
            value = _median(row, rule, what)
            cells.append("-" if value is None else f"{100 * value:.{digits}f} %")
    return cells


def _goal(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    mine = [row for row in rows if row["network"] == name]
    least = {
        rule: min((r["share"] for r in mine if 2 * _through(r, rule) > len(r[rule])), default=1.0)
        for rule in RULES
    }
    of: dict[tuple[str, str], float] = {}
    for what in ("wasted", "slower"):
        for rule in RULES:
            found = [_median(row, rule, what) for row in mine]
            of[what, rule] = mean([value for value in found if value is not None] or [0.0])
    wasted, slower = ((of[what, "coop"], of[what, "dtr"]) for what in ("wasted", "slower"))
    through = [sum(_through(row, rule) for row in mine) for rule in ("coop", "dtr")]
    return target(
        f"{name}: Coop wastes less, is no slower on average, and gets by with no more than DTR",
        f"wasted {100 * wasted[0]:.0f} % against {100 * wasted[1]:.0f} %, slower "
        f"{100 * slower[0]:.1f} % against {100 * slower[1]:.1f} %, least budget "
        f"{least['coop']:g} against {least['dtr']:g}, through {through[0]} against {through[1]}",
        wasted[0] <= wasted[1] and slower[0] <= slower[1] and least["coop"] <= least["dtr"],
    )


if __name__ == "__main__":
    main()
