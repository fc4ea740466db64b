"""COMET: one fixed error bound for all against bounds that follow the momentum.

    ./scripts/bench comet_bounds [--net resnet18] [--seeds 3] [--steps 100] [--quick]

The demo's networks of width 8 on Fashion-MNIST, batch 32, SGD with momentum, a learning rate that
falls to 0. Every way is `comet` with dither; fixed bounds are shares of a tensor's range, as is
what the controller starts with.

    held    mean over the last half of the steps of all that is saved, below plain autograd's, by
            the ledger: x times less
    loss    mean of the last 20 steps
    right   share of the test set
    gErr2   |g~ - g|^2 / |g|^2 at the end of the training, mean of 4 batches

Accuracies differ by points from seed to seed. So the ways are compared by gErr2: what a fixed bound
would hold at the gErr2 of a controller is taken from the two fixed bounds beside it, between which
the size is taken as linear in the logarithm of gErr2.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice, pairwise
from math import log
from statistics import mean
from typing import Any

import torch
from _common import arguments, facts, finish, out_path, target, tell
from torch import nn
from torch.optim import Optimizer

import elbowroom as er
from elbowroom.adaptive import CometBounds
from elbowroom.codecs import Codec, codec
from elbowroom.demo.tasks import Batch, Task, task

NAME = "comet-bounds"
NETS = ("resnet18", "unet")
BOUNDS = (0.2, 0.05, 0.0125, 0.003)
FRACTIONS = (0.01, 0.05, 0.1, 0.2)
Make = Callable[[Optimizer], Any]


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    rows = []
    name = NAME if options.net == NETS[0] else f"{NAME}-{options.net}"
    for way, kind, make in ways():
        runs = [_trained(options, make, seed) for seed in range(options.seeds)]
        rows.append({"way": way, "kind": kind, "runs": runs})
        tell(f"{way}: {runs}")
    result = {
        "name": name,
        "claim": __doc__.splitlines()[0],
        **facts(),
        "n": f"{options.seeds} paired seeds",
        "settings": {
            "network": f"the demo's {options.net}, width 8, batch 32",
            "steps": options.steps,
            "optimizer": "SGD, lr 0.05 to 0, momentum 0.9",
        },
        "rows": rows,
        "table": {
            "head": ["forward inside", "held below plain", "gErr2", "loss", "right"],
            "rows": [_cells(row) for row in rows],
        },
        "targets": [_goal_of_error(rows), _goal(rows)],
        "notes": [],
    }
    finish(result, out_path(options, name))


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
            lambda optimizer, f=fraction: CometBounds(optimizer, fraction=f, every=20),
        )


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--net", choices=NETS, default=NETS[0], help=f"({NETS[0]})")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each way (3)")
    parser.add_argument("--steps", type=int, default=100, help="steps of a training (100)")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, 3
    return options


def _trained(options: argparse.Namespace, make: Make, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    steps, work = options.steps, task(options.net, width=8, batch=32)
    model, batches, losses, ratios = work.model(), work.batches(seed), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    policy = make(optimizer)
    for nth, (images, labels) in enumerate(islice(batches, steps)):
        optimizer.zero_grad()
        context = nullcontext() if policy is None else er.saving(policy, min_nbytes=0, seed=nth)
        with context as saved:
            loss = work.loss(model(images), labels)
        if saved is not None and nth >= steps // 2:
            ratios.append(saved.ledger.before_nbytes / saved.ledger.after_nbytes)
        loss.backward()
        optimizer.step()
        falling.step()
        losses.append(float(loss.detach()))
    error = 0.0 if policy is None else _error(work, model, policy, islice(batches, 4))
    right = count = 0
    model.eval()
    with torch.no_grad():
        for images, labels in work.test_batches():
            right += int((model(images).argmax(1) == labels).sum())
            count += labels.numel()
    return {
        "loss": mean(losses[-20:]),
        "right": right / count,
        "ratio": mean(ratios) if ratios else 1.0,
        "gerr2": error,
    }


def _error(work: Task, model: nn.Module, policy: Any, batches: Iterator[Batch]) -> float:
    """Mean gErr2; a controller's codecs stay as they are."""
    fixed = policy if isinstance(policy, Codec) else lambda site: policy(site)
    errors = []
    for nth, (images, labels) in enumerate(batches):
        grads = []
        for context in (nullcontext(), er.saving(fixed, min_nbytes=0, seed=10_000 + nth)):
            with context:
                loss = work.loss(model(images), labels)
            found = torch.autograd.grad(loss, list(model.parameters()))
            grads.append(torch.cat([grad.flatten() for grad in found]))
        exact, coded = grads
        errors.append(float((coded - exact).square().sum() / exact.square().sum()))
    return mean(errors)


def _of(row: dict[str, Any], name: str) -> float:
    return mean(run[name] for run in row["runs"])


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["way"],
        f"{_of(row, 'ratio'):.1f}x",
        f"{_of(row, 'gerr2'):.2g}" if row["kind"] != "plain" else "0",
        f"{_of(row, 'loss'):.3f}",
        f"{100 * _of(row, 'right'):.1f} %",
    ]


def _goal_of_error(rows: list[dict[str, Any]]) -> dict[str, Any]:
    fixed = [(_of(row, "gerr2"), _of(row, "ratio")) for row in rows if row["kind"] == "fixed"]
    gains = []
    for row in rows:
        held = _fixed_at(_of(row, "gerr2"), fixed) if row["kind"] == "adaptive" else None
        if held is not None:
            gains.append((row["way"], _of(row, "ratio"), held))
    return target(
        "at the same gErr2, bounds that follow hold less than a fixed bound",
        "; ".join(f"{way}: {ratio:.1f}x against {held:.1f}x" for way, ratio, held in gains),
        bool(gains) and all(ratio > held for _, ratio, held in gains),
    )


def _fixed_at(error: float, fixed: list[tuple[float, float]]) -> float | None:
    """What a fixed bound of this gErr2 would hold; None beyond those that were tried."""
    for (low, less), (high, more) in pairwise(sorted(fixed)):
        if low <= error <= high:
            return less + (more - less) * log(error / low) / log(high / low)
    return None


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
