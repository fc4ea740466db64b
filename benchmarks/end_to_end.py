"""A Llama trained whole: every byte of a step against bf16 trainings, its time, its loss.

    ./scripts/bench end_to_end [--seeds 5] [--steps 300] [--pairs 10] [--fresh] [--quick]

    bytes a parameter   weights + masters + states + gradients that exist at a time, counted
    one line            the allocator's peak of a step over 16 tokens with all that stands, a
                        parameter: next to no activations, but workspaces and copies
    peak                the same over a whole batch
    less                than plain, than masters
    time                median over interleaved pairs of (this step / a plain step)
    losses              thousandths of a nat above plain's: mean over paired seeds, and in brackets
                        the one-sided 95 % bound; final, noise and within as in loss_curves.py

`plain` is bf16 autocast over fp32 weights with torch.optim.AdamW(fused=True), `masters` has bf16
weights beside fp32 ones; both take 16 bytes a parameter. An arm with a twin differs in memory only:
after three steps their weights must be equal, and its losses are the twin's. Losses come from a
smaller net than bytes and times: see the settings. After each arm and training the file is
replaced, and a run that was stopped goes on; `--fresh` begins anew.
"""

import argparse
import json
from statistics import fmean
from typing import Any

import torch
from _common import (
    arguments,
    facts,
    mib,
    out_path,
    paired_dict,
    show,
    target,
    tell,
    times,
    write_json,
)
from _llama import Arm, Training
from _resume import earlier
from _whole import parts, same_bits, whole_nbytes
from loss_curves import LOSSES, ORDER, PLAIN, rows_of

from elbowroom.demo.data import Text, load_text
from elbowroom.demo.tasks import NextByte
from elbowroom.demo.train import Run, train
from elbowroom.measure import Paired
from elbowroom.measure.timing import paired

NAME = "end-to-end"
LINE = 16  # tokens
MASTERS = "masters"
ARMS = {
    PLAIN: Arm("bf16 autocast, fp32 weights, torch AdamW"),
    ORDER: Arm("the same, other batch order", other_order=True),
    "plain, checkpoint": Arm("torch.utils.checkpoint, per block", recompute=True, twin=PLAIN),
    MASTERS: Arm("bf16 weights, fp32 masters, torch AdamW", MASTERS),
    "masters, checkpoint": Arm(
        "torch.utils.checkpoint, per block", MASTERS, recompute=True, twin=MASTERS
    ),
    "autocast, coat": Arm('coat states, er.saving("coat")', "autocast", "coat", "coat"),
    "residual": Arm("int8 states, bf16 weights with residual", "residual", "int8"),
    "residual, exact": Arm("the same, er.saving()", "residual", "int8", "exact", twin="residual"),
    "residual, coat": Arm('er.saving("coat")', "residual", "int8", "coat"),
    "residual, coat int8": Arm(
        'er.saving("coat", format="int8", group_size=128)',
        *("residual", "int8", "coat"),
        {"format": "int8", "group_size": 128},
    ),
    "residual, coat, released": Arm(
        'er.saving("coat"), gradients released',
        *("residual", "int8", "coat"),
        released=True,
        twin="residual, coat",
    ),
    "residual, checkpoint, released": Arm(
        "torch.utils.checkpoint, per block, gradients released",
        *("residual", "int8"),
        recompute=True,
        released=True,
        twin="residual",
    ),
    "sr, coat": Arm('stochastic rounding, er.saving("coat")', "sr", "int8", "coat"),
    "sr, coat, released": Arm(
        'stochastic rounding, er.saving("coat"), gradients released',
        *("sr", "int8", "coat"),
        released=True,
        twin="sr, coat",
    ),
}
PROMISED = {  # bytes a parameter
    "residual, coat": 7.1,
    "sr, coat": 6.1,
    "residual, coat, released": 5.1,
    "sr, coat, released": 5.1,
}
MIN_SEEDS = 3

Found = dict[str, dict[str, Any]]  # arm -> its numbers
Runs = dict[str, dict[str, Any]]  # "residual, coat/0": arm, seed -> what came out


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    path, known, text = out_path(options, NAME), facts(), load_text()
    settings = _settings(options, text)
    before = {} if options.fresh else earlier(path, settings, known["versions"])
    found: Found = before.get("found", {})
    runs: Runs = before.get("runs", {})
    tell(f"{len(found)} arms are measured, {len(runs)} trainings are done already")
    base = _large(ARMS[PLAIN], text, options)
    for name in ARMS:
        if name != ORDER and name not in found:
            found[name] = measured(name, base, text, options)
            write_json(path, result(found, runs, settings, known))
    del base
    for seed in range(options.seeds):
        for name, arm in ARMS.items():
            if arm.twin is None and (key := f"{name}/{seed}") not in runs:
                runs[key] = trained(_small(arm, text, options, seed))
                tell(f"{key}: held-out {runs[key]['held_out']:.4f}")
                write_json(path, result(found, runs, settings, known))
    show(json.loads(path.read_text()))


def _options() -> argparse.Namespace:
    parser = arguments(__doc__, heads=4)
    sizes = {"hidden": 256, "depth": 12, "batch": 4, "tokens": 256, "pairs": 10}
    sizes |= {"loss-hidden": 128, "loss-depth": 4, "loss-batch": 8, "loss-tokens": 64}
    for name, size in (sizes | {"steps": 300, "seeds": 5}).items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"({size})")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has done")
    options = parser.parse_args()
    if options.quick:
        options.hidden, options.depth, options.batch, options.tokens = 64, 2, 2, 32
        options.loss_hidden, options.loss_depth, options.loss_batch = 64, 1, 2
        options.pairs = options.steps = options.seeds = 2
    if options.seeds < 2:
        parser.error(f"{options.seeds} seeds have no spread; give 2 or more")
    return options


def _settings(options: argparse.Namespace, text: Text) -> dict[str, Any]:
    large = (options.hidden, options.depth, options.heads)
    small = (options.loss_hidden, options.loss_depth, options.heads)
    shape = "hidden {}, {} blocks, {} heads"
    return {
        "bytes and times": f"{shape.format(*large)}, {options.batch} x {options.tokens} bytes",
        "losses": f"{shape.format(*small)}, {options.loss_batch} x {options.loss_tokens} bytes, "
        f"{options.steps} steps, one cycle to 0.002, weight decay 0.01, betas 0.9 and 0.95",
        "data": text.origin,
        "threads": options.threads,
    }


def _large(arm: Arm, text: Text, options: argparse.Namespace) -> Run:
    task = NextByte(text, options.hidden, options.batch, options.tokens)
    return Run(Training(task, arm, options.depth, options.heads), arm.context, 0)  # type: ignore[arg-type]


def _small(arm: Arm, text: Text, options: argparse.Namespace, seed: int) -> Run:
    task = NextByte(text, options.loss_hidden, options.loss_batch, options.loss_tokens)
    training = Training(task, arm, options.loss_depth, options.heads)
    return Run(training, arm.context, options.steps, seed)  # type: ignore[arg-type]


def measured(name: str, base: Run, text: Text, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes of an arm, its time next to plain's, and whether its bits are its twin's."""
    arm = ARMS[name]
    run = _large(arm, text, options)
    x, y = batch = next(run.task.batches(0))
    numel = sum(p.numel() for p in run.model.parameters())
    line_nbytes = whole_nbytes(run, (x[:1, :LINE].contiguous(), y[:1, :LINE].contiguous()))
    peak_nbytes = whole_nbytes(run, batch)
    shares = [nbytes / numel for nbytes in parts(run, batch)]
    clocked = paired(lambda: base.step(batch), lambda: run.step(batch), pairs=options.pairs)
    equal = None
    if arm.twin is not None:
        equal = same_bits(
            *(_small(one, text, options, 0) for one in (ARMS[arm.twin], arm)), steps=3
        )
    tell(f"{name}: {mib(peak_nbytes)} MiB, {sum(shares):.3f} bytes a parameter, {times(clocked)}")
    return {
        "line_nbytes": line_nbytes / numel,
        "peak_nbytes": peak_nbytes,
        "parts": shares,
        "time": paired_dict(clocked),
        "same_bits": equal,
    }


def trained(run: Run) -> dict[str, Any]:
    """One training: its last and its held-out loss, and its curve in ten points."""
    losses = [fact.loss for fact in train(run)]
    tenth = max(1, len(losses) // 10)
    curve = [fmean(losses[i : i + tenth]) for i in range(0, len(losses), tenth)]
    return {"final": fmean(losses[-tenth:]), "held_out": held_out(run), "curve": curve, "nbytes": 0}


@torch.no_grad()
def held_out(run: Run) -> float:
    """Nats a byte over the test set, in the precision of the training."""
    total = count = 0.0
    task: Any = run.task
    for inputs, targets in task.test_batches():
        with task.arm.precision():
            total += float(task.loss(run.model(inputs), targets)) * targets.numel()
        count += targets.numel()
    return total / count


def result(
    found: Found, runs: Runs, settings: dict[str, Any], known: dict[str, Any]
) -> dict[str, Any]:
    rows = rows_with_losses(found, runs)
    batch = settings["bytes and times"].rpartition(", ")[2]
    pairs = min(row["time"]["pairs"] for row in found.values())
    head = [
        *("training", "weights + masters + states + gradients", "bytes a parameter"),
        *("one line", "less", f"peak of {batch}, MiB", "less", "step / plain"),
        *("final loss (bound)", "held-out loss (bound)", "within noise"),
    ]
    return {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": f"{min(row['n'] for row in rows)} paired seeds, {pairs} pairs of steps",
        "settings": settings,
        "found": found,
        "runs": runs,
        "rows": rows,
        "table": {"head": head, "rows": [cells(row) for row in rows]},
        "targets": [line for name in PROMISED for line in goals(rows, name)],
        "notes": [
            "`less`: than plain, than masters. Published for COAT: 1.54x end to end, on GPUs, of "
            "larger models and longer trainings than here.",
        ],
    }


def rows_with_losses(found: Found, runs: Runs) -> list[dict[str, Any]]:
    """A row an arm; one with a twin has the losses of its twin."""
    by_seed: dict[str, Runs] = {name: {} for name, arm in ARMS.items() if arm.twin is None}
    for key, run in runs.items():
        name, _, seed = key.rpartition("/")
        by_seed[name][seed] = run
    losses = {row["arm"]: row for row in rows_of(by_seed)}
    rows = []
    for name, arm in ARMS.items():
        row = losses[arm.twin or name] | {"arm": name} | found.get(name, {})
        if "peak_nbytes" in row:
            for of in ("line_nbytes", "peak_nbytes"):
                plain, masters = (found.get(base, {}).get(of) for base in (PLAIN, MASTERS))
                row[of.replace("nbytes", "less")] = [
                    base / row[of] for base in (plain, masters) if base is not None
                ]
        rows.append(row)
    return rows


def goals(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """What is promised of an arm: bytes a parameter, and the whole at equal loss."""
    row = next(row for row in rows if row["arm"] == name)
    if "parts" not in row:
        return []
    got, most = sum(row["parts"]), PROMISED[name]
    small = target(
        f"{name}: weights, masters, states and gradients <= {most} bytes a parameter",
        f"{got:.3f}",
        got <= most,
    )
    less = row["line_less"] + row["peak_less"]
    losses = "too few seeds"
    if "within" in row:
        losses = f"within noise: {row['within']}, over {row['n']} seeds; " + ", ".join(
            f"{of.replace('_', '-')} {_bound(row, of)} of {1e3 * row['noise'][of]:.1f}"
            for of in LOSSES
        )
    fewer = target(
        f"{name}: the whole >= 2x less than both bf16 trainings at either load, at equal loss "
        f"(bounds within seed noise, >= {MIN_SEEDS} seeds)",
        f"one line {_less(row['line_less'])}, batch {_less(row['peak_less'])}; {losses}",
        len(less) == 4
        and min(less) >= 2
        and row.get("within") == "yes"
        and row["n"] >= MIN_SEEDS
        and row["same_bits"] is not False,
    )
    return [small, fewer]


def cells(row: dict[str, Any]) -> list[str]:
    name, arm = row["arm"], ARMS[row["arm"]]
    told = [f"{name}: {arm.told}"]
    if "parts" in row:
        told += [
            " + ".join(f"{part:.2f}" for part in row["parts"]),
            f"{sum(row['parts']):.2f}",
            f"{row['line_nbytes']:.2f}",
            _less(row["line_less"]),
            mib(row["peak_nbytes"]),
            _less(row["peak_less"]),
            _time(row["time"]),
        ]
    else:
        told += [""] * 7
    if row.get("same_bits") is False:
        return [*told, "", "", f"**bits differ from {arm.twin}**"]
    if arm.twin is not None:
        return [*told, f"as {arm.twin}, bit for bit", "", row.get("within", "")]
    return [*told, *(_loss(row, of) for of in LOSSES), _within(row)]


def _less(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.2f}x" for ratio in ratios)


def _time(clocked: dict[str, Any]) -> str:
    return times(Paired(tuple(clocked["a_s"]), tuple(clocked["b_s"])))


def _loss(row: dict[str, Any], of: str) -> str:
    if row[of] is None or f"{of}_bound" not in row:
        return ""
    if row["arm"] == PLAIN:
        return f"{row[of]:.4f} nats, sd {1e3 * row[f'{of}_sd']:.1f}"
    if row["arm"] == ORDER:
        return f"noise {1e3 * row['noise'][of]:.1f}"
    return f"{1e3 * row[f'{of}_mean']:+.1f} ({_bound(row, of)})"


def _bound(row: dict[str, Any], of: str) -> str:
    return f"{1e3 * row[f'{of}_bound']:+.1f}"


def _within(row: dict[str, Any]) -> str:
    return str(row.get("within", "")).replace("no", "**no**")


if __name__ == "__main__":
    main()
