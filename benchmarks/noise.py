"""Gradient noise: what is predicted is what lossy codes add; reading gradients costs under 2 %.

    ./scripts/bench noise [--quick]

Three networks of the demo, a little trained (dropout at a fixed seed). For each setting:

    measured    E|g~ - g|^2 of the whole gradient, over noise seeds, at frozen weights on one batch;
                in % of |g|^2
    predicted   what the meter says on the same batch, mean over watched steps
    sampling    variance of the gradient from batch to batch, in % of the mean |g|^2: along a
                training that goes on for some steps, as the meter reads it; and from batches drawn
                at frozen weights at points of the same path
    watching    time of a step in which errors are read (one probe) over one that is not watched,
                and of one that only reads gradients; spread over 50 steps, as controllers do
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _common import arguments, facts, finish, out_path, target, tell
from _gradient import GradientError
from _training import Bench
from _ways import PLAIN, Way

import elbowroom as er
from elbowroom.demo.tasks import task
from elbowroom.measure import NoiseMeter, Paired, paired
from elbowroom.measure.gradient_variance import GradientVariance
from elbowroom.plan import Lean, Lossy, Policy
from elbowroom.runtime.context import Context
from elbowroom.runtime.saving import Saving

NAME = "noise"
EVERY, RUN = 50, 4  # of the controllers
SIZES = {"resnet18": (32, 64), "unet": (16, 32), "gpt": (128, 16)}  # width, batch
HEAD = ("network", "setting", "measured", "predicted", "measured / predicted")
SETTINGS: dict[str, Policy] = {
    "dither, 4 levels": Lossy(er.codec("dither", levels=4)),
    "dither, 16 levels": Lossy(er.codec("dither", levels=16)),
    "group, 4 bits": Lossy(er.codec("group", bits=4)),
    "lean": Lean(),
}


@dataclass(frozen=True)
class Watched:
    """How much slower watched steps are."""

    full: Paired
    light: Paired

    @property
    def sampling(self) -> float:
        """What reading gradients adds to all steps, as a controller does it."""
        return max(RUN * (self.light.ratio - 1), 0.0) / EVERY

    @property
    def share(self) -> float:
        """What all watching adds to all steps."""
        extra = (self.full.ratio - 1) + (RUN - 1) * (self.light.ratio - 1)
        return max(extra, 0.0) / EVERY


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=16, help="of noise, and watched steps (16)")
    parser.add_argument("--steps", type=int, default=100, help="to the weights (100)")
    parser.add_argument("--path", type=int, default=40, help="steps along which V is read (40)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of steps (10)")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.path, options.pairs = 2, 4, 4, 1
    torch.set_num_threads(options.threads)
    known = facts()
    rows: list[dict[str, Any]] = []
    for name, (width, batch) in SIZES.items():
        size = (32, 4) if options.quick else (width, batch)
        chosen = task(name, width=size[0], batch=size[1])
        bench = Bench.trained(chosen, steps=options.steps, batch=size[1])
        tell(name)
        rows += [_errors(name, bench, setting, options.seeds) for setting in SETTINGS]
        rows.append(_cost(name, bench, options.pairs))
        rows.append(_sampling(name, bench, options.path))
    finish(_result(rows, options, known), out_path(options, NAME))


def _way(policy: Policy, meter: NoiseMeter | None = None) -> Way:
    return Way("ours", lambda seed: Saving(policy, context=Context(seed), observer=meter))


def _errors(name: str, bench: Bench, setting: str, seeds: int) -> dict[str, Any]:
    policy = SETTINGS[setting]
    bench.grads(PLAIN)
    g = bench.grads(PLAIN)
    error, meter = GradientError(g), NoiseMeter(run=10**6, probes=4)
    for seed in range(seeds):
        error.add(bench.grads(_way(policy), seed))
    predicted = []
    for seed in range(seeds, 2 * seeds):
        bench.grads(_way(policy, meter), seed)
        meter.harvest()
        predicted.append(meter.table.added)
    norm2 = sum(float(part.double().square().sum()) for part in g)
    told = [value / norm2 for value in predicted if value is not None]
    found = sum(told) / len(told) if told else float("nan")
    row = {"network": name, "setting": setting, "measured": error.gerr2, "predicted": found}
    return row | {
        "kind": "error",
        "ratio": error.gerr2 / found,
        "unknown": len(predicted) - len(told),
    }


def _cost(name: str, bench: Bench, pairs: int) -> dict[str, Any]:
    policy = SETTINGS["dither, 4 levels"]

    def step(meter: NoiseMeter | None) -> None:
        bench.step(_way(policy, meter))
        bench.take_grads()

    def timed(meter: NoiseMeter) -> Paired:
        return paired(lambda: step(None), lambda: step(meter), pairs=pairs)

    full, light = NoiseMeter(run=10**6), NoiseMeter(every=10**6, run=10**6)
    light.step = 2 * 10**6 + 1  # past the first run, in which errors are always read
    watched = Watched(timed(full), timed(light))
    row = {"network": name, "setting": "watching", "kind": "cost", "share": watched.share}
    row["sampling"] = watched.sampling
    return row | {"full": watched.full.ratio, "light": watched.light.ratio}


def _sampling(name: str, bench: Bench, steps: int) -> dict[str, Any]:
    """The share as it is read along a training, against that at frozen weights of the same."""
    model, batches = bench.model, bench.task.batches(7)
    optimizer = bench.task.optimizer(model)
    meter, frozen = GradientVariance(smoothing=1.0), []
    for nth in range(steps):
        for weight in model.parameters():
            meter.listen(weight)
        _flat(bench, next(batches))
        meter.end_step(last=False)
        optimizer.step()
        if nth % 5 == 0:
            frozen.append(_frozen(bench, batches))
    true = sum(frozen) / len(frozen)
    row = {"network": name, "setting": "mini-batch variance", "kind": "sampling"}
    told = min(meter.share, 1.0)  # no variance is larger than the mean square; an estimate may be
    return row | {"measured": true, "predicted": told, "ratio": true / told}


def _flat(bench: Bench, batch: Any) -> torch.Tensor:
    bench.model.zero_grad(set_to_none=True)
    bench.task.loss(bench.model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in bench.model.parameters() if p.grad is not None])


def _frozen(bench: Bench, batches: Iterator[Any], draws: int = 6) -> float:
    """Variance from batch to batch as a share of the mean |g|^2, at the weights of this moment."""
    before = {key: value.clone() for key, value in bench.model.state_dict().items()}
    gs = torch.stack([_flat(bench, next(batches)) for _ in range(draws)])
    bench.model.load_state_dict(before)
    return float((gs - gs.mean(0)).square().sum() / gs.square().sum()) * draws / (draws - 1)


def _result(rows: list[dict[str, Any]], options: Any, known: dict[str, Any]) -> dict[str, Any]:
    errors = [row for row in rows if row["kind"] == "error"]
    ratios = [row["ratio"] for row in errors]
    costs = [row for row in rows if row["kind"] == "cost"]
    shown = ", ".join(f"{r['network']} {100 * r['sampling']:.2f} %" for r in costs)
    whole = ", ".join(f"{r['network']} {100 * r['share']:.1f} %" for r in costs)
    inside = all(0.8 <= ratio <= 1.25 for ratio in ratios)
    between = f"{min(ratios):.2f} to {max(ratios):.2f}"
    sizes = "; ".join(f"{name} width {w}, batch {b}" for name, (w, b) in SIZES.items())
    return {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": f"{options.seeds} noise seeds, {options.seeds} watched steps, {options.pairs} pairs",
        "settings": {"networks": sizes, "weights": f"after {options.steps} steps, seed 0"},
        "rows": rows,
        "table": {"head": list(HEAD), "rows": [_cells(row) for row in rows]},
        "targets": [
            target("measured / predicted within 0.8 and 1.25 on all", between, inside),
            target(
                "mini-batch variance read at <= 2 % of all steps",
                shown,
                max(row["sampling"] for row in costs) <= 0.02,
            ),
            target(
                "all watching, errors and probes too, <= 2 %",
                whole,
                max(row["share"] for row in costs) <= 0.02,
            ),
        ],
        "notes": [
            "Rows `watching`: a step that reads errors, one that reads gradients, and both "
            "spread over 50 steps, as shares of an unwatched step."
        ],
    }


def _cells(row: dict[str, Any]) -> list[str]:
    first = [row["network"], row["setting"]]
    if row["kind"] == "cost":
        full, light = f"{row['full']:.2f}x", f"{row['light']:.3f}x"
        return [*first, full, light, f"+{100 * row['share']:.2f} %"]
    both = f"{100 * row['measured']:.3g} %", f"{100 * row['predicted']:.3g} %"
    return [*first, *both, f"{row['ratio']:.2f}"]


if __name__ == "__main__":
    main()
