"""Accuracy: ResNet-18 trained through elbowroom is at most half a point worse than plainly.

    ./scripts/bench accuracy [--data DIR] [--width 16] [--steps 150] [--seeds 5] [--arms plain,ours]
                             [--fit 0.35] [--fresh] [--quick]

    d_i   = accuracy(ours, seed i) - accuracy(plain, seed i)
    bound = mean(d) - t(0.95, n - 1) * sd(d) / sqrt(n)

A seed has one recipe: the same weights, batches and learning rates in every arm. The bound is
one-sided: with 95 % confidence the mean difference is no worse. The full test set decides: 10,000
images with `--data` (Fashion-MNIST's IDX files), else the 3,000 in the package. Width and steps are
scaled down so that it runs in 10 to 15 minutes on two cores; both are in the result. After each
training the file is replaced, and a run that was stopped goes on where it stood; `--fresh` begins
anew.

Each width has a file of its own, and so have other arms than the three of the claim, which
`--arms` trains (benchmarks/_arms.py), and `--fit`: er.fit at a share of plain's peak, with the plan
over all codes of a profile whose noise was measured, at most 0.1 of that of mini-batches.

Bytes and seconds are those of one step on the weights that the first training of an arm ended
with, as in benchmarks/_training.py; the seconds are medians of pairs of it and a plain one.
"""

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from _arms import ARMS, Costs, cost, fitted, ways
from _common import arguments, facts, mib, out_path, show, target, tell, write_json
from _resume import earlier, margin
from _training import Bench
from _ways import PLAIN, Way, saving

import elbowroom as er
from elbowroom.demo.data import load_images
from elbowroom.demo.tasks import Clothing
from elbowroom.demo.train import Run, score, train

NAME = "accuracy"
WIDTH = 16
WORST_POINTS = -0.5
GROUP = saving("group", bits=2, group_size=256, rebuild=False)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    name = _name(options)
    path, known = out_path(options, name), facts()
    arms = options.arms or {"plain": PLAIN, "elbowroom": _ours(options), "group": GROUP}
    task = Clothing(load_images(options.data), options.width, options.batch)
    if options.fit:
        arms = {"plain": PLAIN, "fit": fitted(task, options.fit)}
    settings = _settings(options, task, arms)
    scores, costs = ({}, {}) if options.fresh else _done(path, settings, known["versions"])
    wanted = [(seed, arm) for seed in range(options.seeds) for arm in arms]
    missing = [(seed, arm) for seed, arm in wanted if f"{arm} {seed}" not in scores]
    for seed, arm in missing:
        run = _trained(task, arms[arm], options.steps, seed)
        scores[f"{arm} {seed}"] = score(run)
        if arm not in costs:
            costs[arm] = cost(Bench(task, run.model, next(task.batches(seed))), arms[arm])
        tell(f"seed {seed}, {arm}: {scores[f'{arm} {seed}']:.2%}")
        write_json(path, _result(name, scores, costs, arms, settings, known))
    show(json.loads(path.read_text()))  # if nothing was missing, the file and its date stay


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="folder with the IDX files of the full set")
    parser.add_argument("--width", type=int, default=WIDTH, help="channels; the full is 64 (16)")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150, help="training steps (150)")
    parser.add_argument("--seeds", type=int, default=5, help="paired seeds (5)")
    parser.add_argument("--levels", type=int, help="of the dithered code (6)")
    parser.add_argument("--group-size", type=int, help="of the dithered code (its default)")
    parser.add_argument("--arms", help=f"other arms, with commas: {', '.join(ARMS)}")
    parser.add_argument("--fit", type=float, help="er.fit within this share of plain's peak")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has done")
    options = parser.parse_args()
    if options.quick:
        options.width, options.steps, options.seeds = 8, 10, 2
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds} has no spread; give 2 or more")
    if (options.arms or options.fit) and (options.levels or options.group_size):
        parser.error("--levels and --group-size go without --arms and --fit, which fix them")
    if options.arms:
        try:
            options.arms = ways([name.strip() for name in options.arms.split(",")])
        except ValueError as error:
            parser.error(f"--arms: {error}")
    return options


def _name(options: argparse.Namespace) -> str:
    """Of the result: each width has one of its own."""
    name = f"{NAME}-fit" if options.fit else f"{NAME}-arms" if options.arms else NAME
    return name if options.quick or options.width == WIDTH else f"{name}-width-{options.width}"


def _ours(options: argparse.Namespace) -> Way:
    given = {"levels": options.levels or 6, "group_size": options.group_size}
    return saving("dither", **{name: value for name, value in given.items() if value is not None})


def _settings(options: argparse.Namespace, task: Clothing, arms: dict[str, Way]) -> dict[str, Any]:
    return {
        "model": f"ResNet-18 (CIFAR form), width {options.width} (full: 64)",
        "data": task.origin,
        "test images": len(task.images.test),
        "batch": options.batch,
        "steps": options.steps,
        "recipe": "SGD, Nesterov momentum 0.9, weight decay 5e-4, one cycle to 0.05",
        "threads": options.threads,
        **{arm: way.name for arm, way in arms.items()},
    }


def _trained(task: Clothing, way: Way, steps: int, seed: int) -> Run:
    """The end of a training. Noise differs between steps and repeats in a rerun."""
    seeds = count(1_000_000 * (seed + 1))

    def context() -> AbstractContextManager[Any]:
        return way.context(next(seeds))

    run = Run(task, nullcontext if way.fit else context, steps, seed)
    if way.fit:
        way.fit(run.model, run.optimizer)
    for _ in train(run):
        pass
    er.release(run.model)
    return run


def _done(
    path: Path, settings: dict[str, Any], versions: dict[str, Any]
) -> tuple[dict[str, float], Costs]:
    """Accuracies and costs of an earlier run with the same settings and versions."""
    found = earlier(path, settings, versions)
    scores: dict[str, float] = found.get("scores", {})
    if scores:
        tell(f"{len(scores)} trainings are done already")
    return scores, found.get("costs", {})  # older files have none


def _result(
    name: str,
    scores: dict[str, float],
    costs: Costs,
    arms: dict[str, Way],
    settings: dict[str, Any],
    known: dict[str, Any],
) -> dict[str, Any]:
    rows = [_row(arm, way, scores, costs) for arm, way in arms.items()]
    others = [row for row in rows if row["arm"] != "plain"]
    ours = [row for row in others if _is_promised(row["arm"])]
    return {
        "name": name,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": f"{min((row['n'] for row in ours or others), default=0)} paired seeds",
        "settings": settings,
        "scores": scores,
        "costs": costs,
        "rows": rows,
        "table": {"head": _HEAD, "rows": [_cells(row, costs.get("plain")) for row in rows]},
        "targets": [_goal(row) for row in ours],
        "notes": ["Width and steps are scaled down; see the settings."],
    }


def _is_promised(arm: str) -> bool:
    """Whether an arm must be as good as plain: rivals need not."""
    return arm in ("elbowroom", "fit") or arm.startswith(("ours-", "lean-"))


def _goal(row: dict[str, Any]) -> dict[str, Any]:
    n, bound = row["n"], row.get("bound_points")
    arm = "" if row["arm"] == "elbowroom" else f"{row['arm']}: "
    return target(
        f"{arm}accuracy at most {-WORST_POINTS:g} points below plain, one-sided 95 % bound over "
        "at least 5 seeds",
        "too few seeds" if bound is None else f"bound {bound:+.2f} points, n = {n}",
        bound is not None and n >= 5 and bound >= WORST_POINTS,
    )


def _row(arm: str, way: Way, scores: dict[str, float], costs: Costs) -> dict[str, Any]:
    """One arm, over the seeds that both it and the plain arm have finished."""
    seeds = [key.split()[1] for key in scores if key.startswith(f"{arm} ")]
    seeds = [seed for seed in seeds if f"plain {seed}" in scores]
    row: dict[str, Any] = {"arm": arm, "way": way.name, "n": len(seeds), **costs.get(arm, {})}
    if seeds:
        row["accuracy"] = mean(scores[f"{arm} {seed}"] for seed in seeds)
    if arm != "plain" and len(seeds) > 1:
        points = [100 * (scores[f"{arm} {seed}"] - scores[f"plain {seed}"]) for seed in seeds]
        row.update(points=points, **paired_bound(points))
    return row


def paired_bound(points: list[float]) -> dict[str, float]:
    """Mean, spread, and the one-sided 95 % lower bound of the mean (Student's t)."""
    average = mean(points)
    bound = average - margin(points)
    return {"mean_points": average, "sd_points": stdev(points), "bound_points": bound}


_HEAD = [
    *("training", "test accuracy", "mean difference", "sd", "95 % bound", "seeds"),
    *("saved MiB", "peak MiB", "step s (plain)"),
]


def _cells(row: dict[str, Any], plain: dict[str, float] | None) -> list[str]:
    accuracy = f"{row['accuracy']:.2%}" if "accuracy" in row else ""
    points = [f"{row[key]:{form}}" if key in row else "" for key, form in _POINTS.items()]
    costs = ["", "", ""]
    if "step_s" in row:
        costs = [_bytes(row, plain, key) for key in ("saved_nbytes", "peak_nbytes")]
        costs.append(f"{row['step_s']:.2f} ({row['plain_step_s']:.2f})")
    return [f"{row['arm']}: {row['way']}", accuracy, *points, str(row["n"]), *costs]


def _bytes(row: dict[str, Any], plain: dict[str, float] | None, key: str) -> str:
    below = f" ({plain[key] / row[key]:.2f}x below)" if plain and row["arm"] != "plain" else ""
    return mib(row[key]) + below


_POINTS = {"mean_points": "+.2f", "sd_points": ".2f", "bound_points": "+.2f"}


if __name__ == "__main__":
    main()
