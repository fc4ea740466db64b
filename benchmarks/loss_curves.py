"""Loss curves: trainings over encoded states and 24-bit weights end where fp32 AdamW ends.

    ./scripts/bench loss_curves [--gpt-seeds 5] [--gpt-steps 300] [--resnet-seeds 10]
                                [--resnet-steps 250] [--fresh] [--quick]

A GPT on Python source and a ResNet-18 on Fashion-MNIST, both thin, one-cycle learning rate to 2e-3,
weight decay 0.01, betas (0.9, 0.95) and (0.9, 0.999). A seed is one recipe: the same weights at the
start and the same batches in every training, but for `order`, whose batches come in another order.

    final      training loss, nats, mean over the last tenth of the steps
    held-out   loss at the end on data not trained on
    d_i        loss of a row, seed i - that of plain torch.optim.AdamW, seed i
    bound      mean(d) + t(0.95, n - 1) sd(d) / sqrt(n): the row loses no more, at 95 % confidence
    noise      sqrt(mean(d_i^2) / 2) of `order`, for each loss: the spread of one training when
               nothing changes but the order of its batches
    within     yes: both bounds are at most their noise. no: not so, and a mean is above 0 by more
               than its margin. open: these seeds cannot tell

`fp32` is our step without codes: it differs from plain in rounding alone, so its row says what the
test makes of no change at all. The ResNet has more seeds: there rounding alone moves the end as far
as another order does, so that a bound over five is wider than the noise for whatever is compared.

In `24-bit` and `sr` weights are bfloat16, and gradients with them; forward computes in float32 from
them, so that nothing else differs. Bytes are weights, gradients and states at the end of a
training, everything counted. Sizes are scaled down so that it runs in three quarters of an hour on
one core; they are in the result. After each training the file is replaced, and a run that was
stopped goes on where it stood, as one does to which a row was added; `--fresh` begins anew.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import torch
from _common import arguments, facts, out_path, show, target, tell, write_json
from _plot_curves import draw
from _resume import earlier, margin
from torch import Tensor, nn
from torch.func import functional_call

import elbowroom as er
from elbowroom.demo.data import Split, load_images, load_text
from elbowroom.demo.models import GPT, ResNet18
from elbowroom.demo.tasks import Batch, Clothing, NextByte, Task
from elbowroom.demo.train import Run, train

NAME = "loss-curves"
BETAS2 = (0.95, 0.999)
LOSSES = ("final", "held_out")
POINTS = 15  # of a curve: each the mean over as many steps
LR, DECAY = 2e-3, 0.01


@dataclass(frozen=True)
class Arm:
    """A way to train: plain torch.optim.AdamW unless it has a state."""

    told: str
    state: str | None = None
    weights: str | None = None  # of bfloat16 weights; float32 without
    other_order: bool = False


PLAIN, ORDER = "plain", "order"
ARMS = {
    PLAIN: Arm("torch.optim.AdamW, float32"),
    ORDER: Arm("the same, other batch order", other_order=True),
    "fp32": Arm("fp32 states", "fp32"),
    "coat": Arm("coat states", "coat"),
    "int8": Arm("int8 states", "int8"),
    "int4": Arm("int4 states: m in 8 bits, v in 4", "int4"),
    "int4x2": Arm("int4x2 states: both in 4 bits", "int4x2"),
    "24-bit": Arm("fp32 states, bf16 weights with residual", "fp32", "residual"),
    "sr": Arm("fp32 states, bf16 weights, stochastic rounding", "fp32", "sr"),
    "int8, 24-bit": Arm("int8 states, bf16 weights with residual", "int8", "residual"),
}
PROMISED = ("coat", "int8", "24-bit", "int8, 24-bit")

Runs = dict[str, dict[str, Any]]  # "gpt 0.95 int8 0": network, beta2, arm, seed -> what came out


@dataclass(frozen=True)
class Network:
    """A task of the demo, with a model of our size."""

    task: Task
    make: Callable[[], nn.Module]
    steps: int
    seeds: int
    told: str


@dataclass(frozen=True)
class Training:
    """The task of one run: its network, with an arm's optimizer, weights and order."""

    task: Task
    make: Callable[[], nn.Module]
    arm: Arm
    beta2: float

    def model(self) -> nn.Module:
        return InFloat(self.make()) if self.arm.weights else self.make()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        settings: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "betas": (0.9, self.beta2)}
        if self.arm.state is None:
            return torch.optim.AdamW(model.parameters(), **settings)
        settings |= {"state": self.arm.state, "weights": self.arm.weights or "nearest"}
        return er.optim.AdamW(model.parameters(), **settings)

    def batches(self, seed: int) -> Iterator[Batch]:
        return self.task.batches(seed + 1000 * self.arm.other_order)

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(scores, targets)

    def test_batches(self) -> Iterator[Batch]:
        return self.task.test_batches()


class InFloat(nn.Module):
    """Weights, and so gradients, in bfloat16; forward computes with them in float32."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held
        for p in held.parameters():
            p.data = p.data.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        wide = {name: p.float() for name, p in self.held.named_parameters()}
        scores: Tensor = functional_call(self.held, wide, (x,))
        return scores


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    path, known, networks = out_path(options, NAME), facts(), _networks(options)
    settings = _settings(networks, options)
    runs: Runs = {} if options.fresh else earlier(path, settings, known["versions"]).get("runs", {})
    tell(f"{len(runs)} trainings are done already")
    for seed in range(max(network.seeds for network in networks.values())):
        for name, network in networks.items():
            if seed >= network.seeds:
                continue
            for beta2, arm in ((beta2, arm) for beta2 in BETAS2 for arm in ARMS):
                key = f"{name} {beta2} {arm} {seed}"
                if key not in runs:
                    runs[key] = trained(network, ARMS[arm], beta2, seed)
                    tell(f"{key}: held-out {runs[key]['held_out']:.4f}")
                    write_json(path, result(runs, networks, settings, known))
    found = json.loads(path.read_text())
    if (picture := draw(found, path.with_suffix(".png"))) and found.get("plot") != picture.name:
        write_json(path, {**found, "plot": picture.name})
    show(found)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__, threads=1)
    for name, seeds, steps in (("gpt", 5, 300), ("resnet", 10, 250)):
        parser.add_argument(f"--{name}-seeds", type=int, default=seeds, help=f"paired ({seeds})")
        parser.add_argument(
            f"--{name}-steps", type=int, default=steps, help=f"of training ({steps})"
        )
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has done")
    options = parser.parse_args()
    if options.quick:
        options.gpt_seeds = options.gpt_steps = options.resnet_seeds = options.resnet_steps = 2
    if (least := min(options.gpt_seeds, options.resnet_seeds)) < 2:
        parser.error(f"{least} seeds have no spread; give 2 or more")
    return options


def _networks(options: argparse.Namespace) -> dict[str, Network]:
    quick = options.quick
    width, depth, context, channels = (32, 1, 16, 2) if quick else (128, 2, 64, 8)
    text, images = load_text(), load_images()
    if quick:
        test = images.test
        images = replace(images, test=Split(test.images[:100], test.labels[:100]))
    gpt = NextByte(text, width, 2 if quick else 8, context)
    resnet = Clothing(images, channels, 4 if quick else 32)
    return {
        "gpt": Network(
            gpt,
            lambda: GPT(width, depth, context, dropout=0.0),
            options.gpt_steps,
            options.gpt_seeds,
            f"{depth} layers, width {width}, {gpt.batch} x {context} bytes a step, no dropout; "
            f"{gpt.origin}",
        ),
        "resnet": Network(
            resnet,
            lambda: ResNet18(channels),
            options.resnet_steps,
            options.resnet_seeds,
            f"ResNet-18 of width {channels} (full: 64), batch {resnet.batch}; {resnet.origin}",
        ),
    }


def _settings(networks: dict[str, Network], options: argparse.Namespace) -> dict[str, Any]:
    return {
        **{name: f"{network.told}; {network.steps} steps" for name, network in networks.items()},
        "recipe": f"one cycle to {LR:g}, weight decay {DECAY:g}, beta1 0.9",
        "threads": options.threads,
    }


def trained(network: Network, arm: Arm, beta2: float, seed: int) -> dict[str, Any]:
    """One training: its curve, its last and its held-out loss, its bytes a parameter."""
    run = Run(Training(network.task, network.make, arm, beta2), nullcontext, network.steps, seed)
    losses = [fact.loss for fact in train(run)]
    span = max(1, len(losses) // POINTS)
    curve = [fmean(losses[i : i + span]) for i in range(0, len(losses), span)]
    return {
        "final": fmean(losses[-max(1, len(losses) // 10) :]),
        "held_out": held_out(run),
        "nbytes": nbytes(run),
        "curve": [round(loss, 5) for loss in curve],
    }


@torch.no_grad()
def held_out(run: Run) -> float:
    """Nats a target over the test set."""
    run.model.eval()
    total = count = 0.0
    for inputs, targets in run.task.test_batches():
        total += float(run.task.loss(run.model(inputs), targets)) * targets.numel()
        count += targets.numel()
    return total / count


def nbytes(run: Run) -> float:
    """Of weights, gradients and states, a parameter."""
    params = list(run.model.parameters())
    states = sum(t.nbytes for p in params for t in run.optimizer.state[p].values())
    return (2 * sum(p.nbytes for p in params) + states) / sum(p.numel() for p in params)


def result(
    runs: Runs, networks: dict[str, Network], settings: dict[str, Any], known: dict[str, Any]
) -> dict[str, Any]:
    rows = [
        row
        for name in networks
        for beta2 in BETAS2
        for row in rows_of({arm: _seeds(runs, f"{name} {beta2} {arm}") for arm in ARMS})
        if row.update(network=name, beta2=beta2) is None
    ]
    return {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": ", ".join(f"{name} {_least(rows, name)}" for name in networks) + " paired seeds",
        "settings": settings,
        "runs": runs,
        "rows": rows,
        "table": {"head": HEAD, "rows": [cells(row) for row in rows]},
        "targets": [goal(arm, [row for row in rows if row["arm"] == arm]) for arm in PROMISED],
        "notes": [
            "Losses in nats; differences and noise in thousandths of a nat, in brackets the "
            "one-sided 95 % bound. Sizes and steps are scaled down; see the settings: a few "
            "hundred steps say little of a v that would go stale over thousands.",
            "The rule was made wider after five seeds had been seen (docs/log.md): first both "
            "losses were held against the held-out noise, by which our own fp32 step was open.",
        ],
    }


def _least(rows: list[dict[str, Any]], network: str) -> int:
    return min(row["n"] for row in rows if row["network"] == network)


def _seeds(runs: Runs, of: str) -> dict[str, dict[str, Any]]:
    """seed -> run."""
    return {
        key.removeprefix(f"{of} "): run for key, run in runs.items() if key.rpartition(" ")[0] == of
    }


def rows_of(arms: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each arm of one network and beta2, from the runs of its seeds and plain's."""
    plain = arms[PLAIN]
    moved = {loss: _differences(arms[ORDER], plain, loss) for loss in LOSSES}
    noise = {loss: sqrt(fmean(x * x for x in d) / 2) for loss, d in moved.items() if d}
    made = []
    for arm, runs in arms.items():
        row: dict[str, Any] = {"arm": arm, "n": len(runs.keys() & plain.keys()), "noise": noise}
        for loss in LOSSES:
            row[loss] = fmean(run[loss] for run in runs.values()) if runs else None
            row[f"{loss}_differences"] = d = _differences(runs, plain, loss)
            if len(d) > 1:
                spread = d if arm != PLAIN else [run[loss] for run in runs.values()]
                row |= {f"{loss}_mean": fmean(d), f"{loss}_bound": fmean(d) + margin(d)}
                row[f"{loss}_sd"] = stdev(spread)
        if runs:
            row["nbytes"] = next(iter(runs.values()))["nbytes"]
            row["curve"] = [round(fmean(at), 5) for at in zip(*_curves(runs, plain), strict=True)]
        if "held_out_bound" in row and noise and arm not in (PLAIN, ORDER):
            row["within"] = verdict(row)
        made.append(row)
    return made


def verdict(row: dict[str, Any]) -> str:
    """yes, no or open: see the head of this file."""
    if all(row[f"{of}_bound"] <= row["noise"][of] for of in LOSSES):
        return "yes"
    # A bound is its mean and the margin, so this asks whether the mean is the larger of the two.
    losing = any(2 * row[f"{of}_mean"] > row[f"{of}_bound"] for of in LOSSES)
    return "no" if losing else "open"


def _differences(
    runs: dict[str, dict[str, Any]], plain: dict[str, dict[str, Any]], loss: str
) -> list[float]:
    return [runs[seed][loss] - plain[seed][loss] for seed in plain if seed in runs]


def _curves(
    runs: dict[str, dict[str, Any]], plain: dict[str, dict[str, Any]]
) -> Iterator[list[float]]:
    """Of each seed, above plain's."""
    for seed in runs.keys() & plain.keys():
        pairs = zip(runs[seed]["curve"], plain[seed]["curve"], strict=True)
        yield [a - b for a, b in pairs]


def goal(arm: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Within noise everywhere, over at least five seeds."""
    told = [
        f"{row['network']} {row['beta2']}: {' and '.join(_of_noise(row, of) for of in LOSSES)}"
        for row in rows
        if "within" in row
    ]
    met = len(told) == len(rows) and all(row["within"] == "yes" and row["n"] >= 5 for row in rows)
    measured = "; ".join(told) or "too few seeds"
    return target(
        f"{arm}: final and held-out loss within seed noise of plain AdamW, both networks and "
        "beta2, one-sided 95 % bound over at least 5 seeds",
        f"bounds of noise, final and held-out, in thousandths of a nat: {measured}",
        met,
    )


def _of_noise(row: dict[str, Any], loss: str) -> str:
    return f"{_thousandths(row[f'{loss}_bound'])} of {1e3 * row['noise'][loss]:.1f}"


HEAD = [
    *("network, beta2", "training", "bytes a parameter", "final loss", "difference (bound)"),
    *("held-out loss", "difference (bound)", "noise", "within noise"),
]


def cells(row: dict[str, Any]) -> list[str]:
    plain, known = row["arm"] == PLAIN, "held_out_bound" in row
    told = []
    for loss in LOSSES:
        told.append("" if row[loss] is None else f"{row[loss]:.4f}")
        difference = "" if not known else _difference(row, loss)
        told.append(f"sd {1e3 * row[f'{loss}_sd']:.1f}" if plain and known else difference)
    noise = [f"{1e3 * row['noise'][loss]:.1f}" for loss in LOSSES if loss in row["noise"]]
    within = row.get("within", "").replace("no", "**no**")
    size = f"{row['nbytes']:.2f}" if "nbytes" in row else ""
    where = f"{row['network']}, {row['beta2']}"
    shown = " and ".join(noise) if row["arm"] == ORDER else ""
    return [where, f"{row['arm']}: {ARMS[row['arm']].told}", size, *told, shown, within]


def _difference(row: dict[str, Any], loss: str) -> str:
    return f"{_thousandths(row[f'{loss}_mean'])} ({_thousandths(row[f'{loss}_bound'])})"


def _thousandths(nats: float) -> str:
    return f"{1e3 * nats:+.1f}"


if __name__ == "__main__":
    main()
