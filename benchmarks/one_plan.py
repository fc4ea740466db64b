"""One plan over every code against each single policy, at every budget of a sweep.

    ./scripts/bench one_plan [--models resnet50 gpt llama unet] [--quick]

Each network is trained for a few steps, and profiled once, its noise too. At each budget every
policy makes its plan of that one profile: all codes with recompute and offload (what `er.fit`
follows), and the policies that it is made of, one at a time: exact actions and recompute; exact
actions and offload; DELTA's rules for both; and one code alone, without recompute. A plan whose
step is measured above its budget is rebuilt for less, as `er.fit` does, and dropped after two
times. Below the least budget of a policy there is the plan for that least.

One more row trains by `er.fit` alone, with 8-bit states and gradients that are released, which no
plan of the other rows has. It is measured once it has settled, and says what it took until then.

    peak     the highest allocator level over a step, weights and states included
    time     median over pairs of (this step / a plain one next to it), seconds of the clock
    work     the same, seconds of all processors: the threads that copy to the file are in it, which
             a second processor runs. Where the machine does other work, this is the steadier one
    noise    variance that codes add, over that of mini-batches: predicted, but measured of
             `er.fit`; gErr2 is measured

Sizes are small, for a machine of two processors: ratios of peaks are lower than of large batches,
for weights and states stay.
"""

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _common import arguments, facts, finish, mib, out_path, target, tell
from _gradient import GradientError
from _llama import Llama
from _resnet50 import resnet50
from _training import Bench, memory
from _ways import PLAIN, Way
from torch import Tensor, nn

import elbowroom as er
from elbowroom.demo.data import load_images, load_text
from elbowroom.demo.tasks import Batch, NextByte, Outline
from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.fitting import Fitting
from elbowroom.measure import memory_curve
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.runtime.attach import opener_of

NAME = "one_plan"
MODELS = ("resnet50", "gpt", "llama", "unet")
SHARES = (0.6, 0.35, 0.2, 0.16, 0.05)  # the last is below all that fit: it shows the least
NOISE = 0.1
ALL = "all codes"
FIT = "er.fit, int8 states, gradients released"
POLICIES: dict[str, dict[str, Any]] = {
    ALL: {"exact": False, "noise": NOISE, "offload": "file"},
    "keep + recompute": {"exact": True},
    "offload": {"exact": True, "recompute": False, "offload": "file"},
    "delta": {"exact": True, "offload": "file", "solver": "delta"},
    **{
        code: {"exact": False, "recompute": False, "noise": NOISE, "codecs": [code]}
        for code in ("dither", "group", "division", "fdsr")
    },
}
ALIKE = 1.02  # times: peaks and seconds that count as equal
_MIN = 1.01  # times the least: at the very least only few plans are left, and none is fast
_ROUNDS = 2
_SETTLES = 24  # steps of er.fit, at most, until it is measured
_BATCHES = 6  # of which the variance over mini-batches is taken, and on which `er.fit` trains
GOALS = {"resnet50": 5.0, "llama": 6.0}  # times below plain's peak
MAX_TIME = 1.3  # of plain's, at these goals
HEAD = ("model", "budget", "policy", "peak, MiB", "below plain", "time", "work", "noise", "gErr2")


class Seconds(NamedTuple):
    """What a step takes, or its ratio to a plain one's: of the clock, and of all processors."""

    clock: float
    work: float

    @classmethod
    def of(cls, step: Callable[[], Any]) -> "Seconds":
        """Runs a step."""
        gc.collect()
        clock_s, work_s = time.perf_counter(), time.process_time()
        step()
        return cls(time.perf_counter() - clock_s, time.process_time() - work_s)

    def over(self, plain: "Seconds") -> "Seconds":
        return Seconds(self.clock / plain.clock, self.work / plain.work)


@dataclass(frozen=True)
class Pictures:
    """ResNet-50 of a fourth of its width on random pictures, which two processors bear."""

    batch: int
    size: int
    width: int = 0

    def model(self) -> nn.Module:
        return resnet50(classes=100, first=16)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores, targets)

    def batches(self, seed: int) -> Iterator[Batch]:
        draw = torch.Generator().manual_seed(seed)
        while True:
            images = torch.randn(self.batch, 3, self.size, self.size, generator=draw)
            yield images, torch.randint(100, (self.batch,), generator=draw)


@dataclass(frozen=True)
class Bytes(NextByte):
    """The demo's text, for a Llama of `depth` blocks."""

    depth: int = 8
    heads: int = 4

    def model(self) -> nn.Module:
        return Llama(self.width, self.depth, self.heads)

    def loss(self, hidden: Any, targets: Tensor) -> Tensor:
        logits = F.linear(hidden.x, hidden.head)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass
class Found:
    """A policy's plan at a budget, and what was measured of it."""

    policy: str
    share: float
    plan: Plan
    is_least: bool
    peak: int = 0
    gerr2: float = 0.0
    ratios: tuple[Seconds, ...] = ()

    @property
    def way(self) -> Way:
        """Its step."""
        follows = self.plan
        return Way(self.policy, lambda seed: er.following(follows, seed=seed), follows.exact)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    every = [*POLICIES, FIT]
    parser.add_argument("--policies", nargs="+", choices=every, default=every)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of plain's peak")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of steps (5)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    known = facts()
    rows: list[dict[str, Any]] = []
    for model in options.models:
        bench = bench_of(model, quick=options.quick)
        pairs = 2 if options.quick else options.pairs
        rows += of_model(model, bench, options.policies, options.shares, pairs=pairs)
    result = {
        "name": NAME,
        "claim": "A plan over all codes against each single policy, at the same budgets.",
        **known,
        "n": f"{options.pairs} pairs of steps",
        "settings": {"shares": options.shares, "noise": NOISE, "models": options.models},
        "rows": rows,
        "table": {"head": list(HEAD), "rows": [line(row) for row in rows]},
        "targets": targets(rows),
    }
    finish(result, out_path(options, NAME))


def bench_of(model: str, *, quick: bool) -> Bench:
    """A network that was trained for a few steps, and a batch."""
    if model == "resnet50":
        task: Any = Pictures(4 if quick else 128, 32 if quick else 64)
    elif model == "unet":
        task = Outline(load_images(None), 8 if quick else 16, 8 if quick else 48)
    elif model == "gpt":
        task = NextByte(load_text(), *((64, 4, 64) if quick else (96, 16, 128)))
    else:
        task = Bytes(load_text(), *((64, 4, 64) if quick else (64, 32, 128)))
    return Bench.trained(task, steps=4 if quick else 12, batch=4)


def of_model(
    model: str, bench: Bench, policies: Sequence[str], shares: Sequence[float], *, pairs: int
) -> list[dict[str, Any]]:
    """The rows of one network."""
    bench.grads(PLAIN)
    profile = profiled(bench)
    plain = profile.static + memory(bench, PLAIN).peak_nbytes
    tell(f"{model}: {len(profile.storages)} storages, plain peak {mib(plain)} MiB")
    found: list[Found] = []
    for policy in (one for one in policies if one != FIT):
        for share in shares:
            one = planned(bench, profile, policy, POLICIES[policy], share, plain)
            if one is not None:
                found.append(one)
            if one is None or one.is_least:
                break
        tell(f"{model}: {policy}, {[round(one.peak / plain, 3) for one in found[-4:]]}")
    clocked(bench, found, pairs)
    rows = [as_row(model, one, plain) for one in found]
    if FIT in policies:
        rows += [row for share in shares if (row := fitted(model, bench, share, plain, pairs))]
    return rows


def fitted(name: str, bench: Bench, share: float, plain: int, pairs: int) -> dict[str, Any] | None:
    """The row of `er.fit` alone; None if it refuses the budget."""
    budget, model = int(share * plain), copy.deepcopy(bench.model)
    optimizer = _encoded(bench.optimizer, model)
    optimizer.release_gradients()
    er.fit(model, budget=budget, optimizer=optimizer, noise=NOISE)
    drawn = bench.task.batches(7)
    batches = cycle([next(drawn) for _ in range(_BATCHES)])  # whose variance the limit is of

    def step() -> None:
        inputs, targets = next(batches)
        bench.task.loss(model(inputs), targets).backward()
        optimizer.step()

    fitting, steps = opener_of(model), 0
    assert isinstance(fitting, Fitting)
    try:
        while steps < _SETTLES and not fitting.planner.settled:
            step()
            steps += 1
        step()  # its script is there now
    except BudgetTooSmall as error:
        tell(f"{FIT} at {share}: {error}")
        return None
    ratios = []
    for i in range(pairs):
        taken = {}
        for mine in (False, True)[:: 1 if i % 2 else -1]:
            taken[mine] = Seconds.of(step if mine else partial(bench.grads, PLAIN, seed=3))
        ratios.append(taken[True].over(taken[False]))
    gc.collect()
    peak = fitting.model_state.nbytes + memory_curve(step).peak_nbytes
    plan, first = fitting.planner.plan, fitting.highest_nbytes or 0
    er.release(model)
    if plan is None:
        tell(f"{FIT} at {share}: no plan, but the setting {fitting.setting}")
        return None
    found = Found(FIT, share, plan, is_least=False, peak=peak, ratios=tuple(ratios))
    error2 = GradientError(bench.grads(PLAIN))
    for seed in (1, 2):
        error2.add(bench.grads(found.way, seed=seed))
    found.gerr2 = error2.gerr2
    noise = found.gerr2 * error2.norm2 / _variance(bench)
    tell(f"{FIT} at {share}: {mib(peak)} of {mib(budget)} MiB, settled after {steps} steps")
    more = {"budget_nbytes": budget, "highest_nbytes": first, "steps": steps}
    return as_row(name, found, plain) | more | {"noise": noise}


def _encoded(plain: torch.optim.Optimizer, model: nn.Module) -> Any:
    """The same rule with 8-bit states, for another model."""
    group = plain.param_groups[0]
    if isinstance(plain, torch.optim.SGD):
        return er.optim.SGD(
            model.parameters(), lr=group["lr"], momentum=group["momentum"], state="int8"
        )
    return er.optim.AdamW(
        model.parameters(),
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        state="int8",
    )


def _variance(bench: Bench) -> float:
    """The variance of the gradient over mini-batches, summed over its elements."""
    before, batches = bench.batch, bench.task.batches(11)
    each = []
    for _ in range(_BATCHES):
        bench.batch = next(batches)
        each.append([grad.double() for grad in bench.grads(PLAIN)])
    bench.batch = before
    return sum(float(torch.stack(same).var(0).sum()) for same in zip(*each, strict=True))


def profiled(bench: Bench) -> Profile:
    """A step of the bench, over fresh batches, so that mini-batches vary."""
    batches = bench.task.batches(7)

    def step() -> None:
        bench.optimizer.zero_grad(set_to_none=True)
        inputs, targets = next(batches)
        bench.task.loss(bench.model(inputs), targets).backward()
        bench.optimizer.step()

    profile = er.measure(step, noise=True)
    bench.optimizer.zero_grad(set_to_none=True)
    gradients = sum(p.nbytes for p in bench.model.parameters() if p.requires_grad)
    profile = profile.shifted(-bench.input_nbytes)  # the bench's own batch: no part of that step
    return replace(profile, static=profile.static - gradients)


def planned(
    bench: Bench,
    profile: Profile,
    policy: str,
    options: dict[str, Any],
    share: float,
    plain: int,
) -> Found | None:
    """A plan that was measured to fit; at the policy's least budget, where that is higher."""
    budget, is_least, over = int(share * plain), False, 0
    for _ in range(_ROUNDS):
        try:
            plan = er.plan(profile, budget=budget - over, **options)
        except BudgetTooSmall as error:
            if is_least:
                return None
            is_least, budget = True, int(_MIN * error.least_nbytes) + max(over, 0)
            try:
                plan = er.plan(profile, budget=int(_MIN * error.least_nbytes), **options)
            except BudgetTooSmall:
                return None
        except PlanError as error:
            tell(f"{policy}: {error}")
            return None
        one = Found(policy, share, plan, is_least)
        error2 = GradientError(bench.grads(PLAIN))
        for seed in (1, 2):
            error2.add(bench.grads(one.way, seed=seed))
        if plan.exact and not error2.bit_equal:
            raise AssertionError(f"{policy} at {share}: an exact plan has changed the gradient")
        one.gerr2 = error2.gerr2
        one.peak = profile.static + memory(bench, one.way).peak_nbytes
        if one.peak <= budget * ALIKE or is_least:
            return one
        over += one.peak - budget
    return None


def clocked(bench: Bench, found: Sequence[Found], pairs: int) -> None:
    """Times each plan beside a plain step, in turns."""
    ratios: list[list[Seconds]] = [[] for _ in found]
    for i_round in range(pairs):
        for i in range(len(found))[:: 1 if i_round % 2 else -1]:
            bench.grads(found[i].way, seed=3)  # of many plans in turns, the oldest scripts are gone
            both = [PLAIN, found[i].way][:: 1 if (i + i_round) % 2 else -1]
            taken = {way.name: Seconds.of(partial(bench.grads, way, seed=3)) for way in both}
            ratios[i].append(taken[found[i].way.name].over(taken[PLAIN.name]))
        tell(f"round {i_round + 1}/{pairs}")
    for one, times in zip(found, ratios, strict=True):
        one.ratios = tuple(times)


def as_row(model: str, one: Found, plain: int) -> dict[str, Any]:
    """Raw numbers."""
    return {
        "model": model,
        "policy": one.policy,
        "share": one.share,
        "is_least": one.is_least,
        "peak_nbytes": one.peak,
        "plain_nbytes": plain,
        "predicted_nbytes": one.plan.peak,
        "ratio": median(ratio.clock for ratio in one.ratios),
        "ratios": [round(ratio.clock, 4) for ratio in one.ratios],
        "work_ratio": median(ratio.work for ratio in one.ratios),
        "noise": one.plan.noise,
        "gerr2": one.gerr2,
        "recomputed": len(one.plan.recompute),
        "from_codes": sum(line.action == "recompute" and line.error > 0 for line in one.plan.lines),
    }


def line(row: dict[str, Any]) -> list[str]:
    least = " (least)" if row["is_least"] else ""
    return [
        row["model"],
        f"{row['share']:.2f}{least}",
        row["policy"],
        mib(row["peak_nbytes"]),
        f"{row['plain_nbytes'] / row['peak_nbytes']:.2f}x",
        f"{row['ratio']:.3f}",
        f"{row['work_ratio']:.3f}",
        f"{row['noise']:.2g}",
        f"{row['gerr2']:.2g}",
    ]


def timed(row: dict[str, Any]) -> str:
    """The time of a row over plain's, and the range of its pairs."""
    return f"{row['ratio']:.3f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ours = [row for row in rows if row["policy"] == ALL]
    losing, smaller = [], []
    for row in ours:
        rivals = [
            other
            for other in rows
            if other["model"] == row["model"]
            and other["policy"] not in (ALL, FIT)
            and other["peak_nbytes"] <= row["peak_nbytes"] * ALIKE
            and other["noise"] <= max(NOISE, row["noise"])
        ]
        best = min(rivals, key=lambda other: other["ratio"], default=None)
        if best is not None and row["ratio"] > best["ratio"] * ALIKE:
            losing.append(
                f"{row['model']} at {row['share']}: {timed(row)}, {best['policy']} {timed(best)}"
            )
    for model in dict.fromkeys(row["model"] for row in rows):
        least = {
            policy: min(
                (r["peak_nbytes"] for r in rows if (r["model"], r["policy"]) == (model, policy)),
                default=1 << 60,
            )
            for policy in dict.fromkeys(row["policy"] for row in rows if row["policy"] != FIT)
        }
        if ALL not in least:
            continue
        best = min((name for name in least if name != ALL), key=least.__getitem__, default=ALL)
        smaller.append((model, least[ALL] <= least[best] * ALIKE, least[ALL], least[best], best))
    found = []
    if smaller:
        found = [
            target(
                "at no budget more than 2 % above the time of the best single policy that holds "
                "as little",
                f"loses: {'; '.join(losing) or 'nowhere'}",
                not losing,
            ),
            target(
                "its least peak is at most that of any single policy",
                "; ".join(f"{m}: {mib(a)} MiB, {best} {mib(b)}" for m, _, a, b, best in smaller),
                all(met for _, met, *_ in smaller),
            ),
        ]
    models = {row["model"] for row in rows}
    found += [goal(rows, model, times) for model, times in GOALS.items() if model in models]
    return found


def goal(rows: list[dict[str, Any]], model: str, times: float) -> dict[str, Any]:
    """Whether any row of a model is as far below plain's peak, in the time and the noise."""
    mine = [
        row
        for row in rows
        if row["model"] == model and row["policy"] in (ALL, FIT) and row["noise"] <= NOISE
    ]

    def told(row: dict[str, Any] | None) -> str:
        if row is None:
            return "none"
        below = row["plain_nbytes"] / row["peak_nbytes"]
        return f"{below:.2f} times at {timed(row)}, {row['policy']}"

    def peak(row: dict[str, Any]) -> int:
        return int(row["peak_nbytes"])

    small = [row for row in mine if peak(row) * times <= row["plain_nbytes"]]
    fastest = min(small, default=None, key=lambda row: row["ratio"])
    least = min((row for row in mine if row["ratio"] <= MAX_TIME), default=None, key=peak)
    return target(
        f"{model}: {times:g} times below plain's peak at noise <= {NOISE}, time <= {MAX_TIME}",
        f"fastest of {times:g} times or more: {told(fastest)}; least peak within the time: "
        f"{told(least)}",
        fastest is not None and fastest["ratio"] <= MAX_TIME,
    )


if __name__ == "__main__":
    main()
