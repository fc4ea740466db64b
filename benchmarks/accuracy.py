"""Accuracy: a network trained through elbowroom is at most half a point worse than plainly.

    ./scripts/bench accuracy [--data DIR] [--width 16] [--steps 150] [--seeds 5] [--arms plain,ours]
                             [--fit 0.35] [--compiled] [--net gpt] [--fresh] [--quick]

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
over all codes of a profile whose noise was measured, at most 0.1 of that of mini-batches. With
`--compiled` all arms are compiled (benchmarks/_compiled_arms.py), and plain is plain
`torch.compile`. `--net gpt` trains a GPT on Python source; its accuracy is the share of held-out
bytes that it guesses.

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
from _compiled_arms import compiled_arms, uncompiled
from _resume import earlier, margin
from _training import Bench
from _ways import PLAIN, Arm, Way, saving

import elbowroom as er
from elbowroom.demo.data import load_images, load_text
from elbowroom.demo.tasks import Clothing, NextByte, Task
from elbowroom.demo.train import Run, score, train

NAME = "accuracy"
WIDTHS = {"resnet18": 16, "gpt": 64}
BATCHES = {"resnet18": 128, "gpt": 16}
WORST_POINTS = -0.5
GROUP = saving("group", bits=2, group_size=256, rebuild=False)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    name = _name(options)
    path, known = out_path(options, name), facts()
    task = _task(options)
    if options.compiled:
        arms = compiled_arms(task)
    elif options.fit:
        fit = {"plain": PLAIN, "fit": fitted(task, options.fit)}
        arms = {name: uncompiled(way) for name, way in fit.items()}
    else:
        arms = options.arms or {"plain": PLAIN, "elbowroom": _ours(options), "group": GROUP}
        arms = {name: uncompiled(way) for name, way in arms.items()}
    settings = _settings(options, task, arms)
    scores, costs = ({}, {}) if options.fresh else _done(path, settings, known["versions"])
    wanted = [(seed, arm) for seed in range(options.seeds) for arm in arms]
    missing = [(seed, arm) for seed, arm in wanted if f"{arm} {seed}" not in scores]
    for seed, arm in missing:
        run = _trained(task, arms[arm], options.steps, seed)
        scores[f"{arm} {seed}"] = score(run)
        if arm not in costs:
            costs[arm] = _cost(task, run, arms[arm], arms["plain"])
        tell(f"seed {seed}, {arm}: {scores[f'{arm} {seed}']:.2%}")
        write_json(path, _result(name, scores, costs, arms, settings, known))
    show(json.loads(path.read_text()))  # if nothing was missing, the file and its date stay


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="folder with the IDX files of the full set")
    parser.add_argument("--net", choices=list(WIDTHS), default="resnet18", help="(resnet18)")
    parser.add_argument("--width", type=int, help="channels (ResNet-18: 16 of 64; GPT: 64 of 256)")
    parser.add_argument("--batch", type=int, help="(ResNet-18: 128; GPT: 16)")
    parser.add_argument("--steps", type=int, default=150, help="training steps (150)")
    parser.add_argument("--seeds", type=int, default=5, help="paired seeds (5)")
    parser.add_argument("--levels", type=int, help="of the dithered code (6)")
    parser.add_argument("--group-size", type=int, help="of the dithered code (its default)")
    parser.add_argument("--arms", help=f"other arms, with commas: {', '.join(ARMS)}")
    parser.add_argument("--fit", type=float, help="er.fit within this share of plain's peak")
    parser.add_argument("--compiled", action="store_true", help="all arms inside torch.compile")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has done")
    options = parser.parse_args()
    if options.quick:
        options.width, options.steps, options.seeds = {"resnet18": 8, "gpt": 32}[options.net], 10, 2
    options.width = options.width or WIDTHS[options.net]
    options.batch = options.batch or BATCHES[options.net]
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds} has no spread; give 2 or more")
    own = [options.arms, options.compiled, options.fit]
    if any(own) and (options.levels or options.group_size):
        parser.error("--levels and --group-size go without --arms, --compiled and --fit")
    if sum(map(bool, own)) > 1:
        parser.error("--arms, --compiled and --fit each have arms of their own; give one")
    if options.data and options.net == "gpt":
        parser.error("--data names a folder of images; the gpt trains on text")
    if options.arms:
        try:
            options.arms = ways([name.strip() for name in options.arms.split(",")])
        except ValueError as error:
            parser.error(f"--arms: {error}")
    return options


def _name(options: argparse.Namespace) -> str:
    """Of the result: each net and each width has one of its own."""
    name = f"{NAME}-fit" if options.fit else f"{NAME}-arms" if options.arms else NAME
    name = f"{NAME}-compiled" if options.compiled else name
    name = name if options.net == "resnet18" else f"{name}-{options.net}"
    usual = options.quick or options.width == WIDTHS[options.net]
    return name if usual else f"{name}-width-{options.width}"


def _task(options: argparse.Namespace) -> Task:
    if options.net == "gpt":
        return NextByte(load_text(), options.width, options.batch)
    return Clothing(load_images(options.data), options.width, options.batch)


def _ours(options: argparse.Namespace) -> Way:
    given = {"levels": options.levels or 6, "group_size": options.group_size}
    return saving("dither", **{name: value for name, value in given.items() if value is not None})


def _settings(options: argparse.Namespace, task: Task, arms: dict[str, Arm]) -> dict[str, Any]:
    if isinstance(task, Clothing):
        model = f"ResNet-18 (CIFAR form), width {options.width} (full: 64)"
        recipe = "SGD, Nesterov momentum 0.9, weight decay 5e-4, one cycle to 0.05"
        tested = {"test images": len(task.images.test)}
    else:
        model = f"GPT of 4 blocks, width {options.width}, contexts of 128, dropout 0.1"
        recipe = "AdamW, weight decay 0.01, one cycle to 2e-3"
        tested = {"test bytes": sum(targets.numel() for _, targets in task.test_batches())}
    return {
        "model": model,
        "data": task.origin,
        **tested,
        "batch": options.batch,
        "steps": options.steps,
        "recipe": recipe,
        "threads": options.threads,
        **{name: arm.name for name, arm in arms.items()},
    }


def _trained(task: Task, arm: Arm, steps: int, seed: int) -> Run:
    """The end of a training. Noise differs between steps and repeats in a rerun."""
    seeds = count(1_000_000 * (seed + 1))

    def context() -> AbstractContextManager[Any]:
        return way.context(next(seeds))

    run = Run(task, context, steps, seed)
    way = arm.of(run.model)
    if way.fit:
        run.saving = nullcontext
        way.fit(run.model, run.optimizer)
    for _ in train(run):
        pass
    er.release(run.model)
    return run


def _cost(task: Task, run: Run, arm: Arm, plain: Arm) -> dict[str, float]:
    bench = Bench(task, run.model, next(task.batches(run.seed)))
    return cost(bench, arm.of(run.model), plain.of(run.model))


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
    arms: dict[str, Arm],
    settings: dict[str, Any],
    known: dict[str, Any],
) -> dict[str, Any]:
    rows = [_row(name, arm, scores, costs) for name, arm in arms.items()]
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
    return arm in ("elbowroom", "fit") or arm.startswith(("ours-", "lean-", "planned-"))


def _goal(row: dict[str, Any]) -> dict[str, Any]:
    n, bound = row["n"], row.get("bound_points")
    arm = "" if row["arm"] == "elbowroom" else f"{row['arm']}: "
    return target(
        f"{arm}accuracy at most {-WORST_POINTS:g} points below plain, one-sided 95 % bound over "
        "at least 5 seeds",
        "too few seeds" if bound is None else f"bound {bound:+.2f} points, n = {n}",
        bound is not None and n >= 5 and bound >= WORST_POINTS,
    )


def _row(name: str, arm: Arm, scores: dict[str, float], costs: Costs) -> dict[str, Any]:
    """One arm, over the seeds that both it and the plain arm have finished."""
    seeds = [key.split()[1] for key in scores if key.startswith(f"{name} ")]
    seeds = [seed for seed in seeds if f"plain {seed}" in scores]
    row: dict[str, Any] = {"arm": name, "way": arm.name, "n": len(seeds), **costs.get(name, {})}
    if seeds:
        row["accuracy"] = mean(scores[f"{name} {seed}"] for seed in seeds)
    if name != "plain" and len(seeds) > 1:
        points = [100 * (scores[f"{name} {seed}"] - scores[f"plain {seed}"]) for seed in seeds]
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
