"""Models as the world's libraries ship them: exact, lossy, checkpointed, and inside a budget.

    ./scripts/bench public_models [--only NAME,...] [--lossy "dither levels=16"] [--skip-fit]

One row a model, each in a process of its own with a time limit; one that fails or takes too long
is a row that says so. A step is forward, backward and SGD's update.

    saved       what is alive between forward and backward, less the loss
    peak        the most that a step allocates above its start, gradients included
    room        plain's peak less gradients: what a budget of 70 % leaves seven tenths of
    gErr2       |g~ - g|^2 / |g|^2 over all parameters, one seed
    checkpoint  torch.utils.checkpoint around each block: the children of the longest ModuleList or
                Sequential, and those of its like; where that does not run, what the model's
                library has for it (gradient_checkpointing_enable); else n/a
    fit         er.fit at weights + buffers + gradients + the share of the room: whether it is held,
                refused (BudgetTooSmall) or dies; the first step's peak, that of a step after four
                and what these four took in plain steps, and how much longer a step takes then

Factors of time are medians over interleaved pairs of steps. With --only nothing is written, unless
--out says where.

Where exact bits are not plain's, plain runs up to 50 times more. A tensor of which plain does not
repeat its own bits is not compared, and counted.
"""

import argparse
import ast
import copy
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _common import (
    INSTALL,
    arguments,
    facts,
    finish,
    mib,
    out_path,
    paired_dict,
    show,
    target,
    tell,
    write_json,
)
from _gradient import GradientError, Grads
from _public import MODELS, QUICK
from _training import level
from _ways import PLAIN, Way, checkpointed, saving
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.measure import Paired, mark, memory_curve, paired
from elbowroom.runtime.arena import ARENA

NAME = "public-models"
SHARES = (0.7, 0.4)
_SETTLES = 4  # steps
_SLOW_S = 1.0  # a step that takes longer is timed in fewer pairs
_SLOW_PAIRS = 3
_ACTIVATIONS = 0.5  # of the room: with less in it, codes cannot make much of a difference
_PLAIN_AGAIN = 50  # steps, to see whether plain repeats its own bits
_SEED = 0


@dataclass
class Trainer:
    """A model in training on one batch; `start` puts everything back where it was made."""

    model: nn.Module
    loss_of: Callable[[nn.Module], Tensor]
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model.train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self._state = {k: v.clone() for k, v in self.model.state_dict().items()}

    def copied(self) -> "Trainer":
        return Trainer(copy.deepcopy(self.model), self.loss_of)

    def start(self) -> None:
        self.model.load_state_dict(self._state)
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(_SEED)

    def step(self, way: Way = PLAIN) -> None:
        with way.context(_SEED):
            loss = self.loss_of(self.model)
        mark("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def result(self, way: Way = PLAIN) -> Grads:
        """Loss and gradients, from the start; what has no gradient counts as zeros."""
        self.start()
        with way.context(_SEED):
            loss = self.loss_of(self.model)
        loss.backward()  # type: ignore[no-untyped-call]
        found = [p.grad for p in self.model.parameters() if p.requires_grad]
        params = [p for p in self.model.parameters() if p.requires_grad]
        grads = [
            torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)
        ]
        self.optimizer.zero_grad(set_to_none=True)
        return [loss.detach(), *grads]

    @property
    def static_nbytes(self) -> int:
        """Weights and buffers."""
        held = [*self.model.parameters(), *self.model.buffers()]
        return sum(
            {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in held}.values()
        )

    @property
    def gradient_nbytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    def memory(self, way: Way = PLAIN) -> tuple[int, int]:
        """Saved and peak bytes of a step."""
        self.start()
        gc.collect()
        held_nbytes = ARENA.nbytes
        curve = memory_curve(lambda: self.step(way))
        return level(curve, "backward") - torch.float32.itemsize, curve.peak_nbytes + held_nbytes


def main() -> None:
    options = _options()
    if options.child:
        _child(options)
        return
    known = facts()
    models = QUICK if options.quick else MODELS
    names = options.only.split(",") if options.only else list(models)
    path = None if options.only and not options.out else out_path(options, NAME)
    rows: list[dict[str, Any]] = []
    for name in names:
        rows.append(_row_of(name, options))
        tell(" | ".join(_line(rows[-1], options.lossy)))
        if path is not None and name != names[-1]:  # a run that is ended leaves what it has
            write_json(path.with_suffix(".partial"), _result(rows, options, known))
    result = _result(rows, options, known)
    if path is None:
        show(result)
    else:
        finish(result, path)
        path.with_suffix(".partial").unlink(missing_ok=True)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--only", help="models by name, with commas between")
    parser.add_argument(
        "--lossy",
        action="append",
        help='a setting of er.saving for all models: policy, then fields ("dither levels=16"); '
        "may be given more than once",
    )
    parser.add_argument("--pairs", type=int, default=10, help="pairs of steps (10)")
    parser.add_argument("--limit-s", type=float, default=900, help="seconds a model (900)")
    parser.add_argument("--skip-fit", action="store_true", help="no budgets")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.lossy = options.lossy or ["dither levels=16"]
    for setting in options.lossy:
        _lossy(setting)
    if options.quick:
        options.pairs = 1
    models = QUICK if options.quick else MODELS
    asked = [*(options.only or "").split(","), options.child or ""]
    if unknown := [name for name in asked if name and name not in models]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(models)}")
    return options


def _lossy(setting: str) -> Way:
    """`dither levels=16` as a way."""
    policy, *given = setting.split()
    fields = dict(one.split("=", 1) for one in given)
    return saving(policy, **{name: ast.literal_eval(value) for name, value in fields.items()})


# ------------------------------------------------------------------------------------ the parent


def _row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the child has found out by the time that it ended, or was ended."""
    model = (QUICK if options.quick else MODELS)[name]
    row: dict[str, Any] = {
        "name": name,
        "library": model.library,
        "transformer": model.transformer,
    }
    if importlib.util.find_spec(model.library) is None:
        return row | {"error": f"{model.library} is not installed: {INSTALL}"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        ended = _run_child(name, path, options)
        if path.exists():
            row |= json.loads(path.read_text())
    stage = row.pop("stage", "start")
    if stage != "end":
        row["error"] = f"{ended}, in {stage}"
    return row


def _run_child(name: str, path: Path, options: argparse.Namespace) -> str:
    """How it ended, if not well."""
    command = [sys.executable, str(Path(__file__)), "--child", name, "--out", str(path)]
    command += [f"--threads={options.threads}", f"--pairs={options.pairs}"]
    command += [f"--lossy={setting}" for setting in options.lossy]
    command += ["--quick"] * options.quick + ["--skip-fit"] * options.skip_fit
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit_s)
    except subprocess.TimeoutExpired:
        return f"more than {options.limit_s:.0f} s"
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    said = done.stderr.strip().splitlines()
    return said[-1][:200] if said else f"exit {done.returncode}"


# ------------------------------------------------------------------------------------- the child


def _child(options: argparse.Namespace) -> None:
    """Everything about one model, written down as it becomes known."""
    warnings.simplefilter("ignore")  # of the models' libraries
    torch.set_num_threads(options.threads)
    model = (QUICK if options.quick else MODELS)[options.child]
    row: dict[str, Any] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        row["stage"] = name
        write_json(options.out, row)
        yield
        write_json(options.out, row)

    with stage("plain"):
        torch.manual_seed(_SEED)
        trainer = Trainer(*model.make())
        _plain(trainer, row)
    ways = {"exact": saving(), **{setting: _lossy(setting) for setting in options.lossy}}
    truth = trainer.result()
    for name, way in ways.items():
        with stage(name):
            row[name] = _way(trainer, way, truth, row["plain"])
    with stage("checkpoint"):
        row["checkpoint"], checkpoint = _checkpointed(trainer, truth, row["plain"])
    with stage("times"):
        del truth
        pairs = _pairs(options.pairs, row["plain"]["step_s"])
        # Apart: a library's own checkpoints change the model's hooks, so that each step of ours
        # between two of theirs is another one than the last, and is learned anew.
        alone = {} if checkpoint is None else {"checkpoint": checkpoint}
        for timed in (ways, alone):
            for name, found in _times(timed, trainer, pairs).items():
                row[name]["time"] = found
    row["fit"] = {}
    for share in () if options.skip_fit else SHARES:
        with stage(f"fit at {share:.0%}"):
            row["fit"][f"{share:.0%}"] = _fit(trainer, share, row["plain"], options.pairs)
    with stage("end"):
        pass


def _plain(trainer: Trainer, row: dict[str, Any]) -> None:
    trainer.step()
    trainer.step()
    saved, peak = trainer.memory()
    truth, again = GradientError(trainer.result()), trainer.result()
    truth.add(again)
    step_s = min(_seconds(trainer) for _ in range(3))
    row["plain"] = {
        "saved_nbytes": saved,
        "peak_nbytes": peak,
        "static_nbytes": trainer.static_nbytes,
        "gradient_nbytes": trainer.gradient_nbytes,
        "room_nbytes": peak - trainer.gradient_nbytes,
        "step_s": step_s,
        "same_twice": truth.bit_equal,  # else no way can be asked for the same bits
    }


def _seconds(trainer: Trainer, way: Way = PLAIN) -> float:
    start_s = time.perf_counter()
    trainer.step(way)
    return time.perf_counter() - start_s


def _way(trainer: Trainer, way: Way, truth: Grads, plain: dict[str, Any]) -> dict[str, Any]:
    """Bytes and errors of one way; its time is clocked later, beside that of the others."""
    trainer.start()
    trainer.step(way)  # kernels are compiled here, and what can be learned is
    result = trainer.result(way)
    error = GradientError(truth[1:])  # without the loss, whose square outweighs small gradients
    error.add(result[1:])
    unequal = _unequal(result, truth)
    unrepeated = set() if not (way.exact and unequal) else _unrepeated(trainer, truth, unequal)
    saved, peak = trainer.memory(way)
    return {
        "way": way.name,
        "saved_nbytes": saved,
        "peak_nbytes": peak,
        "saved_less": plain["saved_nbytes"] / max(saved, 1),
        "peak_less": plain["peak_nbytes"] / peak,
        "gerr2": error.gerr2,
        "bit_equal": unequal <= unrepeated,
        "not_compared": len(unequal & unrepeated),
    }


def _unequal(result: Grads, truth: Grads) -> set[int]:
    pairs = zip(result, truth, strict=True)
    return {i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)}


def _unrepeated(trainer: Trainer, truth: Grads, wanted: set[int]) -> set[int]:
    """Those of the wanted tensors that plain itself gives other bits of, now and then."""
    found: set[int] = set()
    for _ in range(_PLAIN_AGAIN):
        found |= _unequal(trainer.result(), truth)
        if wanted <= found:
            break
    return found


def _checkpointed(
    trainer: Trainer, truth: Grads, plain: dict[str, Any]
) -> tuple[dict[str, Any], Way | None]:
    """The first way of checkpointing that works; else why none does."""
    model, whys = trainer.model, []
    ways = [checkpointed(found)] if (found := blocks(model)) else []
    if hasattr(model, "gradient_checkpointing_enable"):
        ways.append(Way("gradient_checkpointing_enable()", lambda _: _by_library(model)))
    for way in ways:
        try:
            return _way(trainer, way, truth, plain), way
        except Exception as error:
            whys.append(f"{way.name}: {type(error).__name__}: {str(error)[:200]}")
            trainer.start()
    return {"why": "; ".join(whys) or "no list of two blocks or more"}, None


def blocks(model: nn.Module) -> list[nn.Module]:
    """The children of the longest list in it, and of those lists that hold only their kinds."""
    lists = [
        one
        for one in model.modules()
        if isinstance(one, nn.ModuleList | nn.Sequential) and len(one) >= 2
    ]
    if not lists:
        return []
    longest = max(lists, key=len)
    kinds = {type(child) for child in longest}
    of_their_own = not kinds & {nn.Sequential, nn.ModuleList}
    alike = [one for one in lists if of_their_own and {type(child) for child in one} <= kinds]
    found = {id(child): child for one in (longest, *alike) for child in one}
    inside = {id(m) for child in found.values() for m in child.modules() if m is not child}
    return [child for at, child in found.items() if at not in inside]


@contextmanager
def _by_library(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def _times(ways: dict[str, Way], trainer: Trainer, rounds: int) -> dict[str, Any]:
    """Rounds of a step of plain and of each way, in turning order; pairs within a round."""
    trainer.start()
    clocked: dict[str, list[float]] = {name: [] for name in ("", *ways)}
    order = list(clocked)
    for i in range(rounds):
        for name in order[i % len(order) :] + order[: i % len(order)]:
            clocked[name].append(_seconds(trainer, ways.get(name, PLAIN)))
    plain = tuple(clocked.pop(""))
    return {name: paired_dict(Paired(plain, tuple(times))) for name, times in clocked.items()}


def _pairs(asked: int, step_s: float) -> int:
    return asked if step_s < _SLOW_S else min(asked, _SLOW_PAIRS)


def _fit(trainer: Trainer, share: float, plain: dict[str, Any], pairs: int) -> dict[str, Any]:
    """One budget: whether it is held, and what that takes."""
    budget = plain["static_nbytes"] + plain["gradient_nbytes"] + int(share * plain["room_nbytes"])
    found: dict[str, Any] = {"budget_nbytes": budget, "outcome": "held"}
    trainer.start()
    try:
        _first_step(trainer.copied(), budget, found)
        _settle(trainer, trainer.copied(), budget, found, plain, pairs)
    except BudgetTooSmall as error:
        found |= {"outcome": "refused", "least_nbytes": error.least_nbytes, "why": str(error)}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        found |= {"outcome": "died", "why": f"{type(error).__name__}: {error} ({where})"[:500]}
    return found


def _first_step(fitted: Trainer, budget: int, found: dict[str, Any]) -> None:
    """Its peak: a profiler of its own, so this training learns nothing, and ends here."""
    er.fit(fitted.model, budget=budget, optimizer=fitted.optimizer)
    gc.collect()
    peak = fitted.static_nbytes + er.peak(fitted.step)
    found["first_peak"] = peak / budget
    er.release(fitted.model)


def _settle(
    plainly: Trainer,
    fitted: Trainer,
    budget: int,
    found: dict[str, Any],
    plain: dict[str, Any],
    pairs: int,
) -> None:
    er.fit(fitted.model, budget=budget, optimizer=fitted.optimizer)
    found["steps_s"] = [_seconds(fitted) for _ in range(_SETTLES)]
    found["settling_steps"] = sum(found["steps_s"]) / plain["step_s"]
    gc.collect()
    found["settled_peak"] = (fitted.static_nbytes + er.peak(fitted.step)) / budget
    timed = paired(plainly.step, fitted.step, pairs=_pairs(pairs, plain["step_s"]))
    found["time"] = paired_dict(timed)
    er.release(fitted.model)


# ------------------------------------------------------------------------------------ the result


def _result(
    rows: list[dict[str, Any]], options: argparse.Namespace, known: dict[str, Any]
) -> dict[str, Any]:
    head = ["model", "plain: saved, peak MiB, step s", "exact: saved, peak, time, bits"]
    head += [f"{_lossy(one).name}: saved, peak, time, gErr2" for one in options.lossy]
    head += ["checkpoint: saved, peak, time"]
    head += [f"fit {share:.0%}: settled, first, time, settling" for share in SHARES]
    return {
        "name": NAME,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": f"{options.pairs} rounds of steps, {_SLOW_PAIRS} where a step takes {_SLOW_S:g} s",
        "settings": {"lossy": "; ".join(options.lossy), "settled after": f"{_SETTLES} steps"},
        "rows": rows,
        "table": {"head": head, "rows": [_line(row, options.lossy) for row in rows]},
        "targets": goals(rows, options.lossy, fits=not options.skip_fit),
        "notes": [
            "saved, peak: times less than plain; time: times plain's; settled, first: peak over "
            "budget; settling: what the first four steps took, in plain steps.",
            *(f"{row['name']}: {row['error']}" for row in rows if "error" in row),
            *(
                f"{row['name']}, fit at {share}: {fit['why']}"
                for row in rows
                for share, fit in row.get("fit", {}).items()
                if "why" in fit
            ),
            *(
                f"{row['name']}, checkpoint: {row['checkpoint']['why']}"
                for row in rows
                if "why" in row.get("checkpoint", {})
            ),
        ],
    }


def _line(row: dict[str, Any], lossy: list[str]) -> list[str]:
    cells = [row["name"]]
    plain = row.get("plain")
    if plain is None:
        return [*cells, row.get("error", "failed"), *[""] * (2 + len(lossy) + len(SHARES))]
    saved, peak = mib(plain["saved_nbytes"]), mib(plain["peak_nbytes"])
    cells.append(f"{saved}, {peak}, {plain['step_s']:.3f}")
    cells.append(_way_cell(row.get("exact"), _bits))
    cells += [_way_cell(row.get(one), lambda way: f"{way['gerr2']:.3f}") for one in lossy]
    cells.append(_way_cell(row.get("checkpoint"), lambda way: ""))
    return cells + [_fit_cell(row, f"{share:.0%}") for share in SHARES]


def _way_cell(way: dict[str, Any] | None, last: Callable[[dict[str, Any]], str]) -> str:
    if way is None:
        return "failed"
    if "why" in way:
        return "n/a"
    time_ = f"{way['time']['ratio']:.2f}" if "time" in way else "?"
    parts = [f"{way['saved_less']:.2f}x", f"{way['peak_less']:.2f}x", time_, last(way)]
    return ", ".join(part for part in parts if part)


def _fit_cell(row: dict[str, Any], share: str) -> str:
    fit = row.get("fit", {}).get(share)
    if fit is None:
        return "failed" if "error" in row else ""
    if fit["outcome"] != "held":
        return str(fit["outcome"])
    settled, first, slower = fit["settled_peak"], fit["first_peak"], fit["time"]["ratio"]
    return f"{settled:.2f}, {first:.2f}, {slower:.2f}, {fit['settling_steps']:.0f}"


def goals(rows: list[dict[str, Any]], lossy: list[str], *, fits: bool) -> list[dict[str, Any]]:
    """What the project promises of public models; one that failed meets nothing."""
    known = [row for row in rows if "not installed" not in row.get("error", "")]
    found = [*_exact_goals(known)]
    for setting in lossy:
        found += _lossy_goals(known, setting)
    return found + (_fit_goals(known) if fits else [])


def _exact_goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    unequal = [row["name"] for row in rows if not row.get("exact", {}).get("bit_equal")]
    transformers = [row for row in rows if row["transformer"]]
    less = {row["name"]: row.get("exact", {}).get("saved_less", 0.0) for row in transformers}
    slower = {row["name"]: _slower(row.get("exact", {})) for row in rows}
    return [
        target(
            "er.saving() gives plain's bits on all",
            f"{len(rows) - len(unequal)} of {len(rows)}{_naming(unequal)}",
            not unequal and bool(rows),
        ),
        target(
            "er.saving(): saved bytes >= 1.6x below plain on every transformer",
            _of(less, lambda value: value >= 1.6),
            all(value >= 1.6 for value in less.values()) and bool(less),
        ),
        target(
            "er.saving(): no step slower than 1.15x",
            _of(slower, lambda value: value <= 1.15),
            all(value <= 1.15 for value in slower.values()) and bool(slower),
        ),
    ]


def _lossy_goals(rows: list[dict[str, Any]], setting: str) -> list[dict[str, Any]]:
    less = {row["name"]: row.get(setting, {}).get("saved_less", 0.0) for row in rows}
    error = {row["name"]: row.get(setting, {}).get("gerr2", float("inf")) for row in rows}
    of_activations = {row["name"]: less[row["name"]] for row in rows if _is_of_activations(row)}
    many = sum(value >= 8 for value in less.values())
    name = _lossy(setting).name
    llama = less.get("llama", 0.0)
    return [
        target(
            f"{name}: saved bytes >= 8x below plain on at least 6 of 7 models",
            f"{many} of {len(rows)}",
            7 * many >= 6 * len(rows) > 0,
        ),
        target(
            f"{name}: >= 4x on all whose room is activations (half of it or more is saved)",
            _of(of_activations, lambda value: value >= 4),
            all(value >= 4 for value in of_activations.values()) and bool(of_activations),
        ),
        target(
            f"{name}: gErr2 <= 0.05 on every one",
            _of(error, lambda value: value <= 0.05, digits=3),
            all(value <= 0.05 for value in error.values()) and bool(error),
        ),
        target(f"{name}: Llama >= 10x", f"{llama:.1f}x", llama >= 10),
    ]


def _fit_goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for share, least, slowest in ((0.7, 1.0, 1.15), (0.4, 0.9, 1.30)):
        fits = {row["name"]: row.get("fit", {}).get(f"{share:.0%}", {}) for row in rows}
        held = {name: fit for name, fit in fits.items() if fit.get("outcome") == "held"}
        settled = {name: fit["settled_peak"] for name, fit in held.items()}
        first = {name: fit["first_peak"] for name, fit in held.items()}
        slower = statistics.median([fit["time"]["ratio"] for fit in held.values()] or [0.0])
        settling = {name: fit["settling_steps"] for name, fit in held.items()}
        good = [name for name in held if settled[name] <= 1.0]
        missing = [name for name in fits if name not in good]
        found += [
            target(
                f"er.fit holds {share:.0%} of the room on {least:.0%} of the models, settled peak "
                "<= 1.00 of the budget",
                f"{len(good)} of {len(fits)}{_naming(missing)}",
                len(good) >= least * len(fits) > 0,
            ),
            target(
                f"er.fit at {share:.0%}: first step <= 1.05 of the budget",
                _of(first, lambda value: value <= 1.05),
                all(value <= 1.05 for value in first.values()) and bool(first),
            ),
            target(
                f"er.fit at {share:.0%}: a step takes <= {slowest:.2f}x plain's, by the median",
                f"{slower:.2f}x over {len(held)} models",
                bool(held) and slower <= slowest,
            ),
            target(
                f"er.fit at {share:.0%}: settles in the time of 8 plain steps",
                _of(settling, lambda value: value <= 8),
                all(value <= 8 for value in settling.values()) and bool(settling),
            ),
        ]
    return found


def _bits(way: dict[str, Any]) -> str:
    """Whether a way's bits are plain's, and how many tensors were not compared."""
    unsure = f" (not {way['not_compared']})" if way.get("not_compared") else ""
    return ("yes" if way["bit_equal"] else "NO") + unsure


def _is_of_activations(row: dict[str, Any]) -> bool:
    """A model of which nothing is known counts."""
    plain = row.get("plain")
    return plain is None or plain["saved_nbytes"] >= _ACTIVATIONS * plain["room_nbytes"]


def _slower(way: dict[str, Any]) -> float:
    return float(way.get("time", {}).get("ratio", float("inf")))


def _of(values: dict[str, float], is_good: Callable[[float], bool], digits: int = 2) -> str:
    """How many are good, and which are not."""
    bad = [f"{name} {value:.{digits}f}" for name, value in values.items() if not is_good(value)]
    return f"{len(values) - len(bad)} of {len(values)}{_naming(bad)}"


def _naming(names: list[str]) -> str:
    return f"; not {', '.join(names)}" if names else ""


if __name__ == "__main__":
    main()
