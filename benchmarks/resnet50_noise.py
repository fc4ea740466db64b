"""ResNet-50 at 224 x 224 in training: what codes add to the gradient beside what mini-batches vary.

    ./scripts/bench resnet50_noise [--data DIR] [--steps 240] [--batch 8] [--quick]

A training on Fashion-MNIST (28 x 28, enlarged to 224 x 224), all of it inside
er.saving("lean", noise=0.1). At points of it, with the weights as they are there:

    saved   below plain fp32, by the ledger of a step: codes, scales, masks, statistics, all of it
    added   E|g~ - g|^2 over noise seeds, each on a batch of its own, in % of the mean |g|^2
    varies  variance of g from batch to batch, in % of the same
    noise   added / varies, and what the training's meter would say of it, from one more step

The first row of each point is the training's own setting there, found by its controller from what
it reads along; others are fixed settings at the same weights and batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _common import arguments, facts, finish, out_path, target, tell
from _resnet50 import resnet50
from torch import Tensor

from elbowroom.adaptive.noise_budget import LeanBudget
from elbowroom.demo.data import Images, load_images
from elbowroom.demo.tasks import Batch
from elbowroom.measure import NoiseMeter
from elbowroom.plan import KeepAll, Lean, Policy
from elbowroom.runtime.context import Context
from elbowroom.runtime.saving import Saving

NAME = "resnet50-noise"
SIDE, CLASSES = 224, 10
NOISE, GOAL = 0.1, 18.0
OURS = 'er.saving("lean", noise=0.1)'
SETTINGS: dict[str, Policy] = {
    'er.saving("lean", upper=4)': Lean(upper=4),
    'er.saving("lean", upper=4, group_size=128)': Lean(upper=4, group_size=128),
    'er.saving("lean", upper=6)': Lean(upper=6),
}
HEAD = ("step", "loss", "setting", "saved below plain", "added", "varies", "noise", "predicted")


@dataclass
class Training:
    """The net, its optimizer and its images."""

    images: Images
    batch: int

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = resnet50(CLASSES)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)

    def batches(self, seed: int) -> Iterator[Batch]:
        draw, train = torch.Generator().manual_seed(seed), self.images.train
        while True:
            index = torch.randint(len(train), (self.batch,), generator=draw)
            pixels = F.interpolate(train.pixels(index), (SIDE, SIDE), mode="bilinear")
            yield pixels.expand(-1, 3, -1, -1).contiguous(), train.labels[index]

    def backward(self, batch: Batch, saving: Saving) -> Tensor:
        """Loss; gradients stay with the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        with saving:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def gradient(self, batch: Batch, saving: Saving) -> Tensor:
        """Of the whole net, flat."""
        self.backward(batch, saving)
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="folder with Fashion-MNIST's IDX files")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--points", type=int, default=4, help="of the training (4)")
    parser.add_argument("--draws", type=int, default=12, help="batches at each point (12)")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.batch, options.points, options.draws = 2, 2, 1, 2
    torch.set_num_threads(options.threads)
    known = facts()
    training = Training(load_images(options.data), options.batch)
    rows = _train(training, options.steps, options.steps // options.points, options.draws)
    finish(_result(rows, training, options, known), out_path(options, NAME))


def _train(training: Training, steps: int, every: int, draws: int) -> list[dict[str, Any]]:
    budget, context, rows = LeanBudget(Lean(), noise=NOISE), Context(0), []
    batches = training.batches(1)
    for step in range(1, steps + 1):
        saving = Saving(budget, observer=budget, context=context)
        loss = float(training.backward(next(batches), saving))
        training.optimizer.step()
        context.begin_step()
        if step % 10 == 0:
            tell(f"step {step}/{steps}, loss {loss:.3f}")
        if step % every == 0:
            budget.error_report()  # what was read so far moves the levels now
            point = _point(training, {OURS: budget, **SETTINGS}, draws)
            point[0]["predicted"] = _predicted(training, budget)
            rows += [{"step": step, "loss": loss, **row} for row in point]
            tell("; ".join(f"{row['saved_ratio']:.1f}x noise {row['noise']:.3f}" for row in point))
    return rows


def _predicted(training: Training, budget: LeanBudget) -> float | None:
    """By what was learned so far, of a step more; the training's own meter does not hear of it."""
    before = {key: value.clone() for key, value in training.model.state_dict().items()}
    meter = NoiseMeter(probes=0)
    meter.load_state_dict(budget.meter.state_dict())
    meter.step = 0  # watched in full
    saving = Saving(budget, observer=meter, context=Context(99))
    training.backward(next(training.batches(3)), saving)
    meter.harvest()
    training.model.load_state_dict(before)
    return meter.table.ratio


def _point(training: Training, settings: dict[str, Policy], draws: int) -> list[dict[str, Any]]:
    """A row a setting, all at the weights of this moment."""
    model, batches = training.model, training.batches(2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain, added = [], {name: [0.0] * draws for name in settings}
    ledgers = {}
    for draw in range(draws):
        batch = next(batches)
        g = training.gradient(batch, Saving(KeepAll()))
        plain.append(g)
        for name, policy in settings.items():
            saving = Saving(policy, context=Context(1000 + draw))
            error = training.gradient(batch, saving).sub_(g)
            added[name][draw] = _square(error)
            ledgers[name] = saving.ledger
    model.load_state_dict(before)
    training.optimizer.zero_grad(set_to_none=True)
    gs = torch.stack(plain)
    variance = _square(gs - gs.mean(0)) / (draws - 1)
    size = _square(gs) / draws
    return [
        {
            "setting": name,
            "saved_ratio": _ratio(ledgers[name], batch),
            "added": sum(errors) / draws / size,
            "varies": variance / size,
            "noise": sum(errors) / draws / variance,
        }
        for name, errors in added.items()
    ]


def _ratio(ledger: Any, batch: Batch) -> float:
    """The batch itself is its owner's."""
    own = sum(x.untyped_storage().nbytes() for x in batch)
    return float((ledger.before_nbytes - own) / (ledger.after_nbytes - own))


def _square(x: Tensor) -> float:
    return float(x.double().square().sum()) if x.dim() == 1 else sum(map(_square, x))


def _result(
    rows: list[dict[str, Any]], training: Training, options: Any, known: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": f"{options.draws} batches, a noise seed each, at {options.points} points",
        "settings": {
            "model": f"ResNet-50, {SIDE} x {SIDE}, {CLASSES} classes",
            "data": f"{training.images.origin}, enlarged",
            "batch": options.batch,
            "training": f"{options.steps} steps of AdamW, lr 3e-4, by {OURS}",
        },
        "rows": rows,
        "table": {"head": list(HEAD), "rows": [_cells(row) for row in rows]},
        "targets": [_goal(rows)],
    }


def _cells(row: dict[str, Any]) -> list[str]:
    shares = [f"{100 * row[name]:.3g} %" for name in ("added", "varies")]
    start = [str(row["step"]), f"{row['loss']:.3f}", row["setting"], f"{row['saved_ratio']:.2f}x"]
    told = row.get("predicted")
    return [*start, *shares, f"{row['noise']:.3f}", "" if told is None else f"{told:.3f}"]


def _goal(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each setting its worst point; told is the smallest noise among those that save enough."""
    worst = []
    for name in dict.fromkeys(row["setting"] for row in rows):
        of_it = [row for row in rows if row["setting"] == name]
        saved, noise = min(r["saved_ratio"] for r in of_it), max(r["noise"] for r in of_it)
        worst.append(
            (saved < GOAL, noise, f"{name}: at least {saved:.1f}x, noise at most {noise:.3f}")
        )
    misses, noise, told = min(worst)
    text = f"saved bytes >= {GOAL:.0f}x below plain at noise <= {NOISE}, at all points"
    return target(text, told, not misses and noise <= NOISE)


if __name__ == "__main__":
    main()
