"""A guard over the loss: what it saves of a training that a fixed setting harms.

    ./scripts/bench guard [--seeds 3] [--steps 120] [--quick]

The demo's ResNet-18 of width 8 on Fashion-MNIST, batch 32. The guard starts at the very setting
that stays fixed beside it, looks every 8 steps, and is told each loss.

    loss   mean of the last 20 steps
    right  share of 1000 held-out images and more
    held   bytes of all that is saved, by the ledger, in the first step and in the last
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from statistics import mean
from typing import Any

import torch
from _common import arguments, facts, finish, out_path, target, tell

import elbowroom as er
from elbowroom.adaptive import Guard
from elbowroom.codecs import Codec, codec
from elbowroom.codecs.names import setting_name
from elbowroom.demo.tasks import task

NAME = "guard"
HARSH = (codec("group", bits=1), codec("fdsr", bands="6/3/0", min_numel=0))


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    rows = [_row("plain fp32", lambda: None, options)]
    for harsh in HARSH:
        name = setting_name(harsh)
        rows.append(_row(f"{name}, fixed", lambda c=harsh: c, options))
        rows.append(_row(f"{name}, guarded", lambda c=harsh: Guard(c, every=8), options))
    rows.append(_row("Guard(), from its default", lambda: Guard(every=8), options))
    result = {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **facts(),
        "n": f"{options.seeds} paired seeds",
        "settings": {"steps": options.steps, "optimizer": "SGD, lr 0.05, momentum 0.9"},
        "rows": rows,
        "table": {
            "head": ["forward inside", "loss", "right", "held, first to last", "alarms"],
            "rows": [_cells(row) for row in rows],
        },
        "targets": [_goal(rows, setting_name(harsh)) for harsh in HARSH],
        "notes": [],
    }
    finish(result, out_path(options, NAME))


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each way (3)")
    parser.add_argument("--steps", type=int, default=120, help="steps of a training (120)")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, 3
    return options


def _row(
    name: str, make: Callable[[], Codec | Guard | None], options: argparse.Namespace
) -> dict[str, Any]:
    runs = [_trained(make(), options.steps, seed) for seed in range(options.seeds)]
    tell(f"{name}: {runs}")
    return {"way": name, "runs": runs}


def _trained(policy: Codec | Guard | None, steps: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    work = task("resnet18", width=8, batch=32)
    model, batches, losses, held = work.model(), work.batches(seed), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for nth in range(steps):
        images, labels = next(batches)
        optimizer.zero_grad()
        context = nullcontext() if policy is None else er.saving(policy, min_nbytes=0, seed=nth)
        with context as saved:
            loss = work.loss(model(images), labels)
        if saved is not None:
            held.append(saved.ledger.after_nbytes)
        loss.backward()
        optimizer.step()
        if isinstance(policy, Guard):
            policy.loss(loss)
        losses.append(float(loss.detach()))
    right = count = 0
    model.eval()
    with torch.no_grad():
        for images, labels in work.test_batches():
            right += int((model(images).argmax(1) == labels).sum())
            count += len(labels)
            if count >= 1000:
                break
    return {
        "loss": mean(losses[-20:]),
        "right": right / count,
        "held_nbytes": [held[0], held[-1]] if held else None,
        "alarms": policy.alarms if isinstance(policy, Guard) else None,
    }


def _of(row: dict[str, Any], name: str) -> float:
    return mean(run[name] for run in row["runs"])


def _cells(row: dict[str, Any]) -> list[str]:
    first = row["runs"][0]
    held = first["held_nbytes"]
    alarms = [run["alarms"] for run in row["runs"]]
    return [
        row["way"],
        f"{_of(row, 'loss'):.3f}",
        f"{100 * _of(row, 'right'):.1f} %",
        "-" if held is None else f"{held[0] / 2**20:.2f} to {held[1] / 2**20:.2f} MiB",
        "-" if first["alarms"] is None else ", ".join(map(str, alarms)),
    ]


def _goal(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    by_way = {row["way"]: row for row in rows}
    plain, fixed, guarded = (
        _of(by_way[way], "right") for way in ("plain fp32", f"{name}, fixed", f"{name}, guarded")
    )
    return target(
        f"{name}: the guard gives back half of what the fixed setting takes from accuracy",
        f"plain {100 * plain:.1f} %, fixed {100 * fixed:.1f} %, guarded {100 * guarded:.1f} %",
        guarded - fixed >= 0.5 * (plain - fixed),
    )


if __name__ == "__main__":
    main()
