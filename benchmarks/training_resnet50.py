"""ResNet-50 at 224 x 224: saved bytes at least 18x below plain fp32, everything counted.

    ./scripts/bench training_resnet50 [--batch 4] [--warm] [--quick]

Bytes are those of a real step and scale with the batch. Weights are at their random start and
images are noise, so gErr2 compares the rows of this table with each other, and says nothing of a
training. Published, on other machines, of what they count: ActNN and DIVISION 10.5x, FDSR 10.2x,
COMET up to 13.5x (of convolution inputs). What each column means: benchmarks/_training.py.

With --warm all steps run in a process that keeps what it frees (`elbowroom run --warm`). Else glibc
takes tensors above 32 MiB fresh from the kernel, whose pages cost more than what is computed.
"""

from typing import Any

import torch
from _common import arguments, facts, finish, out_path, target
from _resnet50 import Noise, resnet50
from _training import HEAD, Bench, Findings, measure, table
from _ways import saving

from elbowroom.cli.warm import WARM, start_warm

NAME = "training-resnet50"
GOAL, TIME = 18.0, 1.05
BATCH = 4

WAYS = (
    saving("group", bits=2, group_size=256, rebuild=False),
    saving("division", bits=2, rebuild=False),  # each tensor its own code, as in the paper
    saving(),
    saving("dither", levels=4),
    saving("lean", upper=4, plain=4),
    saving("lean", upper=4, plain=4, group_size=128),
    saving("lean", upper=6, plain=4),
    saving("lean", upper=8, plain=6),
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of steps, noise seeds (6)")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--warm", action="store_true", help="freed memory stays in the process")
    options = parser.parse_args()
    if options.warm:
        start_warm()
    if options.quick:
        options.batch, options.pairs = 1, 1
    torch.set_num_threads(options.threads)
    known, task = facts(), Noise(options.batch)
    torch.manual_seed(0)
    bench = Bench(task, resnet50(), next(task.batches(0)))  # type: ignore[arg-type]
    found = measure(bench, WAYS, pairs=options.pairs)
    finish(_result(found, options, known), out_path(options, _name(options)))


def _name(options: Any) -> str:
    """Of the result: each batch has one of its own."""
    given = options.quick or options.batch == BATCH
    name = NAME if given else f"{NAME}-batch-{options.batch}"
    return f"{name}-warm" if options.warm else name


def _result(found: Findings, options: Any, known: dict[str, Any]) -> dict[str, Any]:
    rows = [row.as_dict(found.plain, found.elements) for row in found.rows]

    def verdict(row: dict[str, Any]) -> str:
        return ("yes" if _meets(row) else "no") if _competes(row) else ""

    return {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": f"{options.pairs} pairs of steps, {options.pairs + 1} noise seeds",
        "settings": {
            "model": "ResNet-50, 224 x 224, random weights",
            "data": "noise",
            "batch": options.batch,
            "malloc": " ".join(f"{k}={v}" for k, v in WARM.items()) if options.warm else "as it is",
            "saved elements": found.elements,
        },
        "plain": {**vars(found.plain), "step_s": found.plain_s},
        "rows": rows,
        "table": {"head": list(HEAD), "rows": table(found, verdict)},
        "targets": [_goal(rows)],
        "notes": [
            "Peak: what the step allocates, gradients included; weights and optimizer states are "
            "held before it and are not counted.",
            "gErr2 at random weights and on noise: for comparing rows only.",
        ],
    }


def _competes(row: dict[str, Any]) -> bool:
    return '"dither"' in row["way"] or '"lean"' in row["way"]


def _meets(row: dict[str, Any]) -> bool:
    fast = row["time"] is not None and row["time"]["ratio"] <= TIME
    return fast and bool(row["saved_ratio"] >= GOAL)


def _goal(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ours = [row for row in rows if _competes(row) and row["time"]]
    best = max(ours, key=lambda row: row["saved_ratio"])
    shown = (
        f"{best['way']}: {best['saved_ratio']:.1f}x saved, {best['time']['ratio']:.3f}x time, "
        f"peak {best['peak_ratio']:.1f}x"
    )
    text = f"saved bytes >= {GOAL:g}x below plain at step time <= {TIME}x"
    return target(text, shown, any(_meets(row) for row in rows if _competes(row)))


if __name__ == "__main__":
    main()
