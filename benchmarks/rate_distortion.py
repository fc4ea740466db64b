"""Rate and distortion: what a bit an element buys in gradient error, ours beside its rivals.

    ./scripts/bench rate_distortion [--task resnet18|unet|gpt|all] [--seeds 8] [--quick]

Weights of a short training, one batch, the whole gradient; bits, ledger, gErr2 and bias^2 as
benchmarks/_training.py has them: bits by the allocator, over all that autograd saves, with codes,
scales, masks, statistics and what no code could take. The columns on activations are those of
benchmarks/_offline.py. ReLU's masks are bits in every row. Rivals: groups (ActNN, GACT), division
(DIVISION), rounding to a bound (COMET), fp8, and SZ3, zfp and blosc2 where they are installed
(benchmarks/requirements.txt).

front: no other row has fewer bits at no more gErr2, nor less gErr2 at no more bits; "of unbiased":
no other row whose bias^2 is below half of its gErr2 has. Rows that change no gradient are on none.
gErr2 is the error of one step: a biased row makes the same error in the next one, so that it does
not average out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _common import arguments, facts, finish, mib, out_path, target, tell
from _gradient import GradientError, Grads
from _offline import Captured, capture, distortion, speed
from _peers import VERSIONS
from _plot import draw
from _settings import Setting, settings
from _training import Bench, Memory, Row, memory, saved_elements
from _ways import PLAIN

from elbowroom.demo.tasks import Task, task

NAME = "rate-distortion"
TASKS = ("resnet18", "unet", "gpt")
_QUICK_WIDTH = {"resnet18": 8, "unet": 8, "gpt": 32}


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    for name in TASKS if options.task == "all" else (options.task,):
        known = facts()
        known["versions"].update(VERSIONS)
        trained = _task(name, options)
        bench = Bench.trained(trained, steps=options.train_steps, batch=options.train_batch)
        wanted, notes = settings(ends_only=options.quick)
        for note in notes:
            tell(note)
        result = {**_result(trained, bench, wanted, notes, options), **known}
        path = out_path(options, f"{NAME}-{name}")
        if drawn := draw(result, path.with_suffix(".png")):
            result["plot"] = drawn.name
        finish(result, path)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--task", choices=(*TASKS, "all"), default="all", help="which net (all)")
    parser.add_argument("--seeds", type=int, default=8, help="noise seeds of a gradient (8)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of (codec, copy_) (5)")
    parser.add_argument("--width", type=int, help="channels (the demo's: 32, 16, 128)")
    parser.add_argument("--batch", type=int, help="measured batch (the demo's: 128, 64, 32)")
    parser.add_argument("--train-steps", type=int, default=64, help="steps to the weights (64)")
    parser.add_argument("--train-batch", type=int, default=32, help="batch on the way there (32)")
    parser.add_argument("--data", type=Path, help="folder with the IDX files, for image tasks")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.seeds, options.pairs = 8, 2, 1
        options.train_steps, options.train_batch = 8, 8
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds} cannot tell bias from noise; give 2 or more")
    if options.out and options.task == "all":
        parser.error("--out names one file; give --task too")
    return options


def _task(name: str, options: argparse.Namespace) -> Task:
    width = _QUICK_WIDTH[name] if options.quick else options.width
    folder = None if name == "gpt" else options.data
    return task(name, width=width, batch=options.batch, folder=folder)


def _result(
    trained: Task,
    bench: Bench,
    wanted: Sequence[Setting],
    notes: list[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    bench.grads(PLAIN)  # makes the optimizer's states
    g = bench.grads(PLAIN)
    if not all(torch.equal(*pair) for pair in zip(bench.grads(PLAIN), g, strict=True)):
        raise AssertionError("a plain step does not repeat its own gradient bit for bit")
    elements, plain, tensors = saved_elements(bench), memory(bench, PLAIN), capture(bench)
    rows = []
    for i, setting in enumerate(wanted):
        found = _row(bench, setting, g, options.seeds)
        numbers = found.as_dict(plain, elements)
        rows.append(_numbers(setting, numbers, tensors, options.pairs))
        rows[-1]["bit_equal"] = found.error.bit_equal
        bits, gerr2 = numbers["bits_per_element"], numbers["gerr2"]
        tell(f"{i + 1}/{len(wanted)} {setting.name}: {bits:.2f} bits, gErr2 {gerr2:.3g}")
    _mark_fronts(rows)
    captured_nbytes = sum(one.x.numel() * one.x.element_size() for one in tensors)
    return {
        "name": f"{NAME}-{trained.name}",
        "claim": __doc__.splitlines()[0],
        "n": f"{options.seeds} noise seeds (2 where there is no noise), {options.pairs} pairs",
        "settings": {
            "model": f"{trained.name}, width {trained.width}",
            "data": trained.origin,
            "batch": trained.batch,
            "weights": f"after {options.train_steps} steps of batch {options.train_batch}, seed 0",
            "saved elements": elements,
            "activations": f"{len(tensors)} tensors, {mib(captured_nbytes)} MiB: inputs of "
            "convolutions, linears and norms",
        },
        "plain": vars(plain),
        "rows": rows,
        "table": {"head": HEAD, "rows": _table(rows, plain, elements)},
        "targets": [_goal(rows)],
        "notes": [
            "Speed: GB/s of float32, in brackets the share of copy_'s speed on the same tensors.",
            "SZ3 and zfp use one thread, all others as many as torch.",
            *(f"{note}." for note in notes),
        ],
    }


def _row(bench: Bench, setting: Setting, g: Grads, seeds: int) -> Row:
    """Gradients over noise seeds, and bytes. Without noise two seeds say all."""
    error, way = GradientError(g), setting.way
    for seed in range(1, seeds + 1):
        error.add(bench.grads(way, seed))
        if seed == 2 and error.errors2[0] == error.errors2[1]:
            break
    row = Row(way, memory(bench, way), error)
    off = row.memory.disagreement
    assert off is not None, "er.saving has a ledger"
    if abs(off) > 0.01:
        raise AssertionError(f"{way.name}: ledger and allocator differ by {off:.2%}")
    return row


def _numbers(
    setting: Setting, numbers: dict[str, Any], tensors: Sequence[Captured], pairs: int
) -> dict[str, Any]:
    """All of a row; a speed only where what comes back is finite."""
    found = distortion(setting.codec, tensors)
    finite = found.rel_mse < float("inf")
    return {
        **{name: value for name, value in numbers.items() if name != "time"},
        "family": setting.family,
        "kind": setting.kind,
        "config": setting.codec.config(),
        "rebuild": setting.rebuild,
        "activation_bits": found.bits,
        "activation_rel_mse": found.rel_mse,
        **(speed(setting.codec, tensors, pairs) if finite else {}),
    }


def front(rows: Sequence[dict[str, Any]]) -> list[bool]:
    """Whether a row is on the Pareto front of bits and gErr2; rows alike in both are together."""
    points = _points(rows)
    return [
        point[1] < float("inf") and not any(_beats(rival, point) for rival in points)
        for point in points
    ]


def _mark_fronts(rows: Sequence[dict[str, Any]]) -> None:
    """The front of all that change a gradient, and the front of those without bias among them."""
    for row in rows:
        row["biased"] = not row["bit_equal"] and row["bias2"] > row["gerr2"] / 2
        row["front"] = row["front_unbiased"] = False
    lossy = [row for row in rows if not row["bit_equal"]]
    unbiased = [row for row in lossy if not row["biased"]]
    for name, part in (("front", lossy), ("front_unbiased", unbiased)):
        for row, is_best in zip(part, front(part), strict=True):
            row[name] = is_best


def _points(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(row["bits_per_element"], row["gerr2"]) for row in rows]


def _beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether a is no worse in both, and not the same."""
    return a[0] <= b[0] and a[1] <= b[1] and a != b


HEAD = [
    "forward inside",
    "bits/element",
    "gErr2",
    "bias^2 (sampling)",
    "front",
    "activations: bits",
    "rel-MSE",
    "encode GB/s (of copy_)",
    "decode GB/s (of copy_)",
]


def _table(rows: Sequence[dict[str, Any]], plain: Memory, elements: int) -> list[list[str]]:
    bits = f"{8 * plain.saved_nbytes / elements:.2f}"
    return [[PLAIN.name, bits, "0", "0", "", "32", "0", "", ""], *map(_cells, rows)]


def _cells(row: dict[str, Any]) -> list[str]:
    exact = row["bit_equal"]
    return [
        row["way"],
        f"{row['bits_per_element']:.2f}",
        "0 (bit-equal)" if exact else f"{row['gerr2']:.3g} ± {row['gerr2_sd']:.1g}",
        "0" if exact else f"{row['bias2']:.1e} ({row['sampling2']:.1e})",
        "yes" if row["front"] else "of unbiased" if row["front_unbiased"] else "",
        f"{row['activation_bits']:.2f}",
        f"{row['activation_rel_mse']:.2g}",
        _speed(row.get("encode")),
        _speed(row.get("decode")),
    ]


def _speed(found: dict[str, Any] | None) -> str:
    return "not finite" if found is None else f"{found['gb_s']:.2f} ({found['ratio']:.2f})"


def _goal(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rivals that change a gradient, against the best of ours."""
    ours = [row for row in rows if row["kind"] == "ours" and not row["bit_equal"]]
    rivals = [row for row in rows if row["kind"] != "ours" and not row["bit_equal"]]
    points = _points(ours)
    unbeaten = [
        row["way"]
        for row, point in zip(rivals, _points(rivals), strict=True)
        if not any(_beats(own, point) for own in points)
    ]
    shown = f"{len(rivals) - len(unbeaten)} of {len(rivals)}"
    if unbeaten:
        shown += f"; not {'; '.join(unbeaten)}"
    text = "goal: each row of a rival has one of ours with no more bits and no more gErr2"
    return target(text, shown, not unbeaten)


if __name__ == "__main__":
    main()
