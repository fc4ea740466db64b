"""Plans at the measured peak of every rival: how many are slower, and how far down plans go.

    ./scripts/bench budgets [--model resnet18|gpt] [--quick]

Each rival is measured first; then a plan is made for exactly the bytes that it needed, with exact
actions only where the rival's gradients are those of plain but for rounding, and all run in turns.
Rivals: save_on_cpu, per-block torch.utils.checkpoint, torch.compile with an
activation_memory_budget, uniform settings of our own, and the same profile planned by DELTA's,
DTR's and Capuchin's rules and by a greedy one. Then the sweep, from 90 % of plain's peak down to
the least: the cheapest plan with codes allowed, and with exact actions only. A compiled step is
compared by its slowdown against torch.compile without a budget, all others by theirs against plain.
What each column means: benchmarks/_training.py; "peak" here includes what stood before the step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from _beside import TOLERANCE, claim, compared, lowest
from _common import arguments, facts, finish, mib, out_path, target, tell, times
from _sweep_plot import draw
from _training import Bench, Findings, Row, measure, memory
from _ways import ON_CPU, PLAIN, Way, checkpointed, compiled, saving
from torch import nn
from torch._inductor.exc import InductorError

import elbowroom as er
from elbowroom.demo.data import load_images, load_text
from elbowroom.demo.models import GPT, BasicBlock, GPTBlock
from elbowroom.demo.tasks import Clothing, NextByte
from elbowroom.errors import BudgetTooSmall
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile

NAME = "budgets"
_ROUNDS = 4
SWEEP = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
SHARES = (0.8, 0.65, 0.5)  # of plain's peak: budgets of other planners
COMPILED_SHARES = (0.8, 0.6, 0.4, 0.2, 0.0)
HEAD = (
    "way",
    "peak MiB",
    "of plain",
    "predicted MiB",
    "step time / plain",
    "slowdown",
    "gErr2",
    "plan for the same peak",
)


@dataclass(frozen=True)
class Entry:
    """A way; the plan that it follows, if it does; the rivals whose peak that was made for."""

    way: Way
    plan: Plan | None = None
    rivals: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeepNextByte(NextByte):
    """The demo's task with six blocks."""

    def model(self) -> nn.Module:
        return GPT(self.width, 6, self.context)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=("resnet18", "gpt"), default="resnet18")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of steps (7)")
    options = parser.parse_args()
    if options.quick:
        options.pairs = 2
    torch.set_num_threads(options.threads)
    known = facts()
    bench, blocks = _bench(options)
    profile = er.measure(lambda: _whole_step(bench))
    bench.optimizer.zero_grad(set_to_none=True)
    # What stands before a step here has no gradients; the profiled one began with those of before.
    gradients = sum(p.nbytes for p in bench.model.parameters() if p.requires_grad)
    profile = replace(profile, static=profile.static - gradients)
    tell(f"profiled: {len(profile.storages)} storages, plain needs {mib(_plain(profile))} MiB")
    shares = COMPILED_SHARES[-1:] if options.quick else COMPILED_SHARES
    entries, failed = _entries(bench, blocks, profile, shares)
    found = measure(bench, [entry.way for entry in entries], pairs=options.pairs)
    name = f"{NAME}-{options.model}"
    result = _result(found, entries, profile, options, known, name)
    result["notes"] += failed
    path = out_path(options, name)
    picture = draw(result, path.with_suffix(".png"))
    finish(result if picture is None else result | {"plot": picture.name}, path)


def _bench(options: Any) -> tuple[Bench, list[nn.Module]]:
    quick = options.quick
    if options.model == "gpt":
        task: Any = DeepNextByte(load_text(), *((64, 4, 64) if quick else (192, 8, 256)))
        kind: type[nn.Module] = GPTBlock
    else:
        task = Clothing(load_images(None), *((8, 32) if quick else (32, 96)))
        kind = BasicBlock
    bench = Bench.trained(task, steps=8 if quick else 32, batch=16)
    return bench, [module for module in bench.model.modules() if isinstance(module, kind)]


def _whole_step(bench: Bench) -> None:
    bench.optimizer.zero_grad(set_to_none=True)
    bench.step(PLAIN)


def _plain(profile: Profile) -> int:
    return er.plan(profile, budget=1 << 50).peak


def _entries(
    bench: Bench, blocks: list[nn.Module], profile: Profile, shares: Sequence[float]
) -> tuple[list[Entry], list[str]]:
    """Rivals with the plans for their peaks, then the sweep; each plan once. And what failed."""
    plain, found, failed = _plain(profile), dict[str, Entry](), []

    def add(way: Way, *, theirs: Plan | None = None, exact: bool) -> None:
        bench.grads(way, seed=1)
        needed = profile.static + memory(bench, way).peak_nbytes
        found[way.name] = Entry(way, theirs)
        plan(needed, exact=exact, rival=way.name)

    def plan(budget: int, *, exact: bool | None, rival: str = "") -> None:
        ours = _planned(bench, profile, budget, exact=exact)
        if ours is not None:
            same = found.get(ours.way.name, ours)
            found[ours.way.name] = replace(same, rivals=(*same.rivals, rival))

    for rival in (ON_CPU, checkpointed(blocks), saving()):
        add(rival, exact=True)
    for levels in (256, 16, 4):
        add(saving("dither", levels=levels), exact=False)
    for rival in (compiled(bench.model), *(compiled(bench.model, share) for share in shares)):
        try:
            add(rival, exact=True)
        except InductorError as error:  # dropout that is run again, with PyTorch's own RNG
            failed.append(f"{rival.name} does not compile: {str(error).splitlines()[0]}")
            tell(failed[-1])
    for solver in ("delta", "dtr", "capuchin", "greedy"):
        for share in SHARES:
            theirs = _plan(profile, int(share * plain), exact=True, solver=solver)
            if theirs is not None:
                name = f"{solver}'s plan, {share:.0%} of plain"
                add(_following(name, theirs), theirs=theirs, exact=True)
    for exact in (False, True):
        for share in SWEEP:
            plan(int(share * plain), exact=exact)
    return list(found.values()), failed


def _planned(bench: Bench, profile: Profile, budget: int, *, exact: bool | None) -> Entry | None:
    """A plan that was seen to fit: rebuilt with what it was over, as `er.fit` does."""
    allowed = budget
    for _ in range(_ROUNDS):
        plan = _plan(profile, allowed, exact=exact)
        if plan is None:
            return None
        kind = "exact" if plan.exact else "lossy"
        way = _following(f"plan for {mib(budget)} MiB, {kind}", plan)
        bench.grads(way, seed=1)
        over = profile.static + memory(bench, way).peak_nbytes - budget
        if over <= 0:
            return Entry(way, plan)
        allowed -= over
    return None


def _plan(
    profile: Profile, budget: int, *, exact: bool | None, solver: str = "auto"
) -> Plan | None:
    try:
        return er.plan(profile, budget=budget, exact=exact, solver=solver)
    except BudgetTooSmall as error:
        tell(f"{solver}: {error}")
        return None


def _following(name: str, plan: Plan) -> Way:
    return Way(name, lambda seed: er.following(plan, seed=seed), exact=plan.exact, ours=True)


def _result(
    found: Findings,
    entries: list[Entry],
    profile: Profile,
    options: Any,
    known: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    peaks = {row.way.name: profile.static + row.memory.peak_nbytes for row in found.rows}
    plain = profile.static + found.plain.peak_nbytes
    pairs = list(zip(entries, found.rows, strict=True))
    beside = {rival: row for entry, row in pairs for rival in entry.rivals if rival}
    slowdowns = _slowdowns(found.rows)
    rows = [
        {
            **row.as_dict(found.plain, found.elements),
            "whole_peak_nbytes": peaks[row.way.name],
            "predicted_nbytes": None if entry.plan is None else entry.plan.peak,
            "rivals": entry.rivals,
            "solver": None if entry.plan is None else entry.plan.solver,
            "slowdown": slowdowns[row.way.name],
        }
        for entry, row in pairs
    ]
    table = [["plain fp32", mib(plain), "100 %", "", f"1 ({found.plain_s:.2f} s)", "1", "0", ""]]
    for entry, row in pairs:
        slowdown, ours = slowdowns[row.way.name], beside.get(row.way.name)
        table.append(_line(entry, row, peaks, plain, slowdown, ours))
    return {
        "name": name,
        "claim": claim(rows, plain),
        **known,
        "n": f"{options.pairs} pairs of steps",
        "settings": {"model": options.model, "storages": len(profile.storages)},
        "plain": {**vars(found.plain), "step_s": found.plain_s, "static_nbytes": profile.static},
        "rows": rows,
        "table": {"head": list(HEAD), "rows": table},
        "targets": [
            _no_slower(rows),
            _predicted(pairs, peaks),
            _below(rows, plain),
        ],
        "notes": [
            "save_on_cpu has nowhere to move a tensor to on a CPU: its peak is that of plain.",
            "The error of lossy plans is estimated by size when a plan is made, and measured here.",
        ],
    }


def _slowdowns(rows: Iterable[Row]) -> dict[str, float | None]:
    """Each way's time over that of the way that it is without its economies."""
    ratios = {row.way.name: row.pairs.ratio for row in rows if row.passed and row.pairs}
    base = {PLAIN.name: 1.0} | ratios
    return {
        row.way.name: ratios[row.way.name] / base[row.way.base] if row.way.name in ratios else None
        for row in rows
    }


def _line(
    entry: Entry,
    row: Row,
    peaks: dict[str, int],
    plain: int,
    slowdown: float | None,
    ours: Row | None,
) -> list[str]:
    peak = peaks[row.way.name]
    return [
        row.way.name,
        mib(peak),
        f"{peak / plain:.0%}",
        "" if entry.plan is None else mib(entry.plan.peak),
        times(row.pairs) if row.passed and row.pairs else "gradients differ",
        "" if slowdown is None else f"{slowdown:.3f}",
        "0" if row.error.bit_equal else f"{row.error.gerr2:.2g}",
        "" if ours is None or ours.pairs is None else times(ours.pairs),
    ]


def _no_slower(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every rival for whose peak there is a plan."""
    found = compared(rows)
    losing = [
        f"{one.rival} ({one.ours:.3f} against {one.theirs:.3f})" for one in found if one.loses
    ]
    return target(
        f"at the measured peak of each of {len(found)} rivals a plan takes at most {TOLERANCE}x "
        "its time",
        f"loses to: {'; '.join(losing) or 'none'}",
        not losing,
    )


def _predicted(pairs: list[tuple[Entry, Row]], peaks: dict[str, int]) -> dict[str, Any]:
    off = [peaks[row.way.name] / e.plan.peak - 1 for e, row in pairs if e.plan is not None]
    worst = max(off, key=abs)
    return target(
        "predicted peak within 5 % of the measured one, every plan",
        f"{len(off)} plans, worst {worst:+.1%} (measured against predicted)",
        abs(worst) <= 0.05,
    )


def _below(rows: list[dict[str, Any]], plain: int) -> dict[str, Any]:
    (ours, _), (theirs, rival) = ((row["whole_peak_nbytes"], row["way"]) for row in lowest(rows))
    return target(
        "plans reach peaks that no rival reaches",
        f"{ours / plain:.1%} of plain; the lowest rival {theirs / plain:.1%}, by {rival}: "
        f"{(theirs - ours) / 1024:.0f} KiB more",
        ours < theirs,
    )


if __name__ == "__main__":
    main()
