"""COMET: one fixed error bound for all against bounds that follow the momentum.

    ./scripts/bench comet_bounds [--seeds 3] [--steps 120] [--quick]

The demo's ResNet-18 of width 8 on Fashion-MNIST, batch 32, SGD with momentum. Every way is `comet`
with dither; fixed bounds are shares of a tensor's range, as is what the controller starts with.

    held    mean over the last half of the steps of all that is saved, below plain autograd's, by
            the ledger: x times less
    loss    mean of the last 20 steps
    right   share of 1000 held-out images and more
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from statistics import mean
from typing import Any

import torch
from _common import arguments, facts, finish, out_path, target, tell
from torch.optim import Optimizer

import elbowroom as er
from elbowroom.adaptive import CometBounds
from elbowroom.codecs import codec
from elbowroom.demo.tasks import task

NAME = "comet-bounds"
BOUNDS = (0.2, 0.05, 0.0125)
FRACTIONS = (0.01, 0.05)
Make = Callable[[Optimizer], Any]


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    rows = []
    for name, kind, make in ways():
        runs = [_trained(make, options.steps, seed) for seed in range(options.seeds)]
        rows.append({"way": name, "kind": kind, "runs": runs})
        tell(f"{name}: {runs}")
    result = {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **facts(),
        "n": f"{options.seeds} paired seeds",
        "settings": {"steps": options.steps, "optimizer": "SGD, lr 0.05, momentum 0.9"},
        "rows": rows,
        "table": {
            "head": ["forward inside", "held below plain", "loss", "right"],
            "rows": [_cells(row) for row in rows],
        },
        "targets": [_goal(rows)],
        "notes": [],
    }
    finish(result, out_path(options, NAME))


def ways() -> Iterator[tuple[str, str, Make]]:
    """Each: its name, what kind it is of, and optimizer -> policy."""
    yield "plain fp32", "plain", lambda optimizer: None
    for bound in BOUNDS:
        fixed = codec("comet", bound=bound)
        yield f"comet, bound={bound}", "fixed", lambda optimizer, c=fixed: c
    for fraction in FRACTIONS:
        yield (
            f"CometBounds, fraction={fraction}",
            "adaptive",
            lambda optimizer, f=fraction: CometBounds(optimizer, fraction=f, every=8),
        )


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each way (3)")
    parser.add_argument("--steps", type=int, default=120, help="steps of a training (120)")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, 3
    return options


def _trained(make: Make, steps: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    work = task("resnet18", width=8, batch=32)
    model, batches, losses, ratios = work.model(), work.batches(seed), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    policy = make(optimizer)
    for nth in range(steps):
        images, labels = next(batches)
        optimizer.zero_grad()
        context = nullcontext() if policy is None else er.saving(policy, min_nbytes=0, seed=nth)
        with context as saved:
            loss = work.loss(model(images), labels)
        if saved is not None and nth >= steps // 2:
            ratios.append(saved.ledger.before_nbytes / saved.ledger.after_nbytes)
        loss.backward()
        optimizer.step()
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
        "ratio": mean(ratios) if ratios else 1.0,
    }


def _of(row: dict[str, Any], name: str) -> float:
    return mean(run[name] for run in row["runs"])


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["way"],
        f"{_of(row, 'ratio'):.1f}x",
        f"{_of(row, 'loss'):.3f}",
        f"{100 * _of(row, 'right'):.1f} %",
    ]


def _goal(rows: list[dict[str, Any]]) -> dict[str, Any]:
    plain = _of(rows[0], "loss")
    best: dict[str, tuple[float, str]] = {}
    for row in rows[1:]:
        if _of(row, "loss") <= plain + 0.05:
            found = _of(row, "ratio"), row["way"]
            best[row["kind"]] = max(found, best.get(row["kind"], (0.0, "none")))
    adaptive, fixed = (best.get(kind, (0.0, "none")) for kind in ("adaptive", "fixed"))
    return target(
        "at a loss within 0.05 of plain, bounds that follow hold less than any fixed one of these",
        f"{adaptive[0]:.1f}x by {adaptive[1]} against {fixed[0]:.1f}x by {fixed[1]}",
        adaptive[0] > fixed[0],
    )


if __name__ == "__main__":
    main()
