"""Coop against DTR in the simulator: evictions that leave contiguous room, on traces of real steps.

    ./scripts/bench coop [--quick]

Forward and backward of each network are written down op by op (`TorchDispatchMode`): what is read,
what is made, the seconds that it took. `plan/eviction.py` runs that step again in less memory.

    slower   added seconds / seconds of the step
    wasted   of the evicted bytes, the share that went beyond what was asked for, because no gap
             was wide enough
    least    the least budget, as a share of the plain peak, that the rule gets through, of those
             tried
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from _common import arguments, facts, finish, out_path, target, tell
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elbowroom.demo.tasks import Task, task
from elbowroom.plan.eviction import Outcome, Trace, TracedOp, evict, plain_peak

NAME = "coop"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
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
    rows = [row for work in options.tasks for row in _rows(work)]
    result = {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **facts(),
        "n": "1 trace a network; the simulation has no noise",
        "settings": {"networks": "of the demo: ResNet-18 32, batch 32; U-Net 16, 16; GPT 128, 16"},
        "rows": rows,
        "table": {
            "head": ["network, budget", "DTR slower", "Coop slower", "DTR wasted", "Coop wasted"],
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
    if options.quick:
        sizes = [("gpt", 32, 4)]
    options.tasks = [task(name, width=width, batch=batch) for name, width, batch in sizes]
    return options


def _rows(work: Task) -> Iterator[dict[str, Any]]:
    trace = traced(work)
    peak, plain_s = plain_peak(trace), sum(op.seconds for op in trace.ops)
    tell(f"{work.name}: {len(trace.ops)} ops, {peak / 2**20:.0f} MiB")
    for share in SHARES:
        found = {rule: evict(trace, int(share * peak), rule) for rule in ("dtr", "coop")}
        yield {
            "network": work.name,
            "share": share,
            **{rule: _dict(out, plain_s) for rule, out in found.items()},
        }


def _dict(out: Outcome, plain_s: float) -> dict[str, Any]:
    evicted = out.evicted_nbytes
    return {
        "fits": out.fits,
        "slower": out.seconds / plain_s - 1,
        "wasted": out.wasted_nbytes / evicted if evicted else 0.0,
        "reruns": out.reruns,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    rules = row["dtr"], row["coop"]
    slower = (f"{100 * one['slower']:.1f} %" if one["fits"] else "no room" for one in rules)
    wasted = (f"{100 * one['wasted']:.0f} %" if one["fits"] else "-" for one in rules)
    return [f"{row['network']}, {row['share']:g}", *slower, *wasted]


def _goal(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    mine = [row for row in rows if row["network"] == name]
    both = [row for row in mine if row["dtr"]["fits"] and row["coop"]["fits"]]
    least = {
        rule: min((row["share"] for row in mine if row[rule]["fits"]), default=1.0)
        for rule in ("dtr", "coop")
    }
    wasted = [sum(row[rule]["wasted"] for row in both) for rule in ("dtr", "coop")]
    slower = [sum(row[rule]["slower"] for row in both) for rule in ("dtr", "coop")]
    n = max(1, len(both))
    return target(
        f"{name}: Coop wastes less, is no slower on average, and gets by with no more than DTR",
        f"wasted {100 * wasted[1] / n:.0f} % against {100 * wasted[0] / n:.0f} %, slower "
        f"{100 * slower[1] / n:.1f} % against {100 * slower[0] / n:.1f} %, least budget "
        f"{least['coop']:g} against {least['dtr']:g}",
        wasted[1] <= wasted[0] and slower[1] <= slower[0] and least["coop"] <= least["dtr"],
    )


if __name__ == "__main__":
    main()
