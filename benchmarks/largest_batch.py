"""The largest batch in the memory that a plain step takes, and what a sample takes then.

    ./scripts/bench largest_batch [--model resnet50|resnet101] [--batch 8] [--warm] [--quick]

A plain step at `--batch` is measured first: its peak, everything counted (weights, gradients,
momentum, the batch itself), is the budget of all others. `er.largest_batch` then names a batch,
with exact actions and with whatever is cheapest; and the largest batch of torch.utils.checkpoint
around each block is found by measuring, too. At that batch `er.fit` trains, beginning with the plan
that it was found with, until it has settled;
its steps are then timed in turns with plain ones at `--batch`, and the peak of one is measured.
The same at the batch that the goal asks for, if that is clearly less: milder actions have room.
The last rows are plain steps at the largest of these batches, whatever they need.

glibc takes a tensor of 32 MiB and more fresh from the kernel every time, and that may cost more
than a step has to compute: a larger batch has such tensors, a small one has not. With --warm all
runs under the settings of malloc that `elbowroom doctor` names, which keep freed memory in the
process (and more of it than a step needs at a time).

Published, of a GPU: DELTA 2.04x (ResNet-50) and 2.25x (ResNet-101), arXiv 2203.15980.
"""

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from _common import arguments, facts, finish, mib, out_path, paired_dict, target, tell, times
from _resnet50 import Bottleneck, Noise, resnet50, resnet101
from _ways import PLAIN, Way, checkpointed
from torch import Tensor, nn

import elbowroom as er
from elbowroom.cli.warm import WARM, start_warm
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting import Fitting
from elbowroom.measure import Paired
from elbowroom.plan.plan import Plan
from elbowroom.runtime.attach import attached
from elbowroom.tools import LargestBatch

NAME = "largest-batch"
MODELS = {"resnet50": resnet50, "resnet101": resnet101}
GOALS = {"er.fit, exact=True": (2.5, 1.30), "er.fit, exact=False": (4.0, 1.15)}
CHECKPOINT = "torch.utils.checkpoint, per block"
_CLEARLY_LESS = 0.9  # of the largest batch: else its row says what there is to say
_SETTLES = 24  # steps; a plan that is not found, verified and watched by then is taken as it is
HEAD = (
    "way",
    "batch",
    "named",
    "of plain's",
    "predicted MiB",
    "peak MiB",
    "time a sample / plain",
    "exact",
)


@dataclass
class Trainer:
    """A model in training at one batch, one way; the batch is drawn inside the step."""

    task: Noise
    model: nn.Module
    way: Way = PLAIN
    optimizer: torch.optim.Optimizer = field(init=False)
    batches: Iterator[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = self.task.optimizer(self.model)
        self.batches = self.task.batches(0)

    def step(self) -> None:
        inputs, targets = next(self.batches)
        with self.way.context(0):
            loss = self.task.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def seconds_a_sample(self) -> float:
        start_s = time.perf_counter()
        self.step()
        return (time.perf_counter() - start_s) / self.task.batch

    @property
    def static_nbytes(self) -> int:
        """Weights, buffers and momentum."""
        held = [*self.model.parameters(), *self.model.buffers()]
        states = [s for one in self.optimizer.state.values() for s in one.values()]
        return sum(x.nbytes for x in [*held, *states] if isinstance(x, Tensor))

    def peak_nbytes(self) -> int:
        """Of a step, everything counted; the optimizer must have its states."""
        gc.collect()
        return self.static_nbytes + er.peak(self.step)


@dataclass(frozen=True)
class Found:
    """One way at its largest batch. named: the batch that `er.largest_batch` gave."""

    way: str
    batch: int
    named: int | None
    predicted_nbytes: int | None
    peak_nbytes: int
    pairs: Paired
    exact: bool


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="resnet50")
    parser.add_argument("--batch", type=int, default=8, help="of the plain step (8)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of steps (5)")
    parser.add_argument("--warm", action="store_true", help="freed memory stays in the process")
    options = parser.parse_args()
    if options.warm:
        start_warm()
    if options.quick:
        options.batch, options.pairs = 2, 1
    torch.set_num_threads(options.threads)
    known = facts()
    torch.manual_seed(0)
    model = resnet50(10, (1, 1)) if options.quick else MODELS[options.model]()
    plain = Trainer(Noise(options.batch, 10 if options.quick else 1000), model)
    plain.step()
    budget = plain.peak_nbytes()
    tell(f"plain at batch {options.batch} takes {mib(budget)} MiB: the budget")
    found = [_checkpointed(plain, budget, options.pairs)]
    for way, (ratio, _) in GOALS.items():
        found.append(_largest(way, plain, budget, options.pairs))
        batch = ceil(ratio * options.batch)
        if batch < _CLEARLY_LESS * found[-1].batch:
            found.append(_fitted(way, plain, budget, options.pairs, batch))
    for batch in sorted({one.batch for one in found if not one.exact}):
        found.append(_plainly(plain, batch, options.pairs))
    name = f"{NAME}-{options.model}" + ("-warm" if options.warm else "")
    finish(_result(found, plain, budget, options, known, name), out_path(options, name))


def _at(plain: Trainer, batch: int, way: Callable[[nn.Module], Way] | None = None) -> Trainer:
    """The same training at another batch, with states."""
    model = copy.deepcopy(plain.model)
    made = Trainer(Noise(batch, plain.task.classes), model, PLAIN if way is None else way(model))
    made.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    return made


def _checkpointed(plain: Trainer, budget: int, pairs: int) -> Found:
    """The largest batch whose measured step fits, by bisection from a line through two."""

    def way(model: nn.Module) -> Way:
        return checkpointed([m for m in model.modules() if isinstance(m, Bottleneck)])

    def peak(batch: int) -> int:
        return _at(plain, batch, way).peak_nbytes()

    small = plain.task.batch
    first, second = peak(small), peak(2 * small)
    batch = small + max(0, int((budget - first) * small / (second - first)))
    while batch > 1 and peak(batch) > budget:
        batch -= 1
    trainer = _at(plain, batch, way)
    tell(f"{CHECKPOINT}: batch {batch}")
    peak_nbytes = trainer.peak_nbytes()
    timed = _timed(plain, trainer, pairs)
    return Found(CHECKPOINT, batch, None, None, peak_nbytes, timed, exact=True)


def _plainly(plain: Trainer, batch: int, pairs: int) -> Found:
    """What a sample takes at that batch anyway, with all the memory that it wants."""
    trainer = _at(plain, batch)
    peak_nbytes = trainer.peak_nbytes()
    return Found(
        PLAIN.name, batch, None, None, peak_nbytes, _timed(plain, trainer, pairs), exact=True
    )


def _largest(way: str, plain: Trainer, budget: int, pairs: int) -> Found:
    exact = _is_exact(way)
    trial = copy.deepcopy(plain.model)
    draw = plain.task

    def drawn(batch: int) -> tuple[Tensor, Tensor]:
        return next(Noise(batch, draw.classes).batches(0))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return draw.loss(model(batch[0]), batch[1])

    each = sum(x.nbytes for x in drawn(1))  # of the budget, but no part of what is planned
    best = er.largest_batch(
        *(trial, drawn),
        budget=budget - int(GOALS[way][0] * draw.batch) * each,
        loss=loss,
        optimizer=draw.optimizer(trial),
        exact=exact,
    )
    tell(f"{way}: {best}")
    batch = best.batch
    while True:  # what the optimizer's update takes beside its states was not counted
        try:
            return _fitted(way, plain, budget, pairs, batch, best)
        except BudgetTooSmall as error:
            tell(f"{way}: batch {batch}: {error}")
            batch -= 1


def _fitted(
    way: str,
    plain: Trainer,
    budget: int,
    pairs: int,
    batch: int,
    best: LargestBatch | None = None,
) -> Found:
    """At one batch; beginning with the plan of the best, if it is given."""
    trainer = _at(plain, batch)
    allowed = budget - sum(x.nbytes for x in next(trainer.batches))
    first, named = (None, None) if best is None else (best.plan, best.batch)
    with _fitting(trainer, allowed, _is_exact(way), first) as plan:
        peak = trainer.peak_nbytes()
        measured = _timed(plain, trainer, pairs)
        return Found(way, batch, named, plan.peak, peak, measured, plan.exact)


def _is_exact(way: str) -> bool:
    return "exact=True" in way


@contextmanager
def _fitting(
    trainer: Trainer, budget: int, exact: bool | None, first: Plan | None
) -> Iterator[Plan]:
    """Inside, the trainer's model is fitted, and has settled: on this plan, if not on `first`."""
    given = first if first is not None and first.peak <= budget else None
    er.fit(trainer.model, budget=budget, optimizer=trainer.optimizer, exact=exact, plan=given)
    try:
        fitting = next(one for model, one in attached() if model is trainer.model)
        assert isinstance(fitting, Fitting)
        steps = 0
        while steps < _SETTLES and not fitting.planner.settled:
            trainer.step()
            steps += 1
        plan = fitting.planner.plan
        tell(f"after {steps} steps: {fitting.planner.setting}")
        assert plan is not None
        yield plan
    finally:
        er.release(trainer.model)


def _timed(plain: Trainer, other: Trainer, pairs: int) -> Paired:
    """Seconds a sample, plain and other in turns, each first in every other pair."""
    ours: list[float] = []
    theirs: list[float] = []
    other.step()
    for i in range(pairs):
        order = [(plain, theirs), (other, ours)]
        for trainer, clocked in order if i % 2 == 0 else order[::-1]:
            clocked.append(trainer.seconds_a_sample())
        tell(f"pair {i + 1}/{pairs}: {ours[-1] / theirs[-1]:.3f}")
    return Paired(tuple(theirs), tuple(ours))


def _result(
    found: list[Found],
    plain: Trainer,
    budget: int,
    options: Any,
    known: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    base, within = plain.task.batch, [one for one in found if one.way != PLAIN.name]
    seconds = found[0].pairs.median_a_s
    first = ["plain fp32", f"{base}", "", "1.00x", "", mib(budget), f"1 ({seconds:.3f} s)", "yes"]
    return {
        "name": name,
        "claim": __doc__.splitlines()[0],
        **known,
        "n": f"{options.pairs} pairs of steps",
        "settings": {
            "model": options.model,
            "images": "224 x 224, noise",
            "plain batch": base,
            "malloc": " ".join(f"{k}={v}" for k, v in WARM.items()) if options.warm else "as it is",
        },
        "plain": {"batch": base, "peak_nbytes": budget, "static_nbytes": plain.static_nbytes},
        "rows": [
            {
                "way": one.way,
                "batch": one.batch,
                "named_batch": one.named,
                "predicted_nbytes": one.predicted_nbytes,
                "peak_nbytes": one.peak_nbytes,
                "exact": one.exact,
                "time": paired_dict(one.pairs),
            }
            for one in found
        ],
        "table": {"head": list(HEAD), "rows": [first, *(_line(one, base) for one in found)]},
        "targets": [
            *(_goal(way, found, base, budget) for way in GOALS),
            target(
                "no step takes more than the plain one whose memory it was given",
                ", ".join(f"{one.way} {one.peak_nbytes / budget:.3f}" for one in within),
                all(one.peak_nbytes <= budget for one in within),
            ),
        ],
        "notes": [
            "named: what er.largest_batch says; batch: the largest from there down at which er.fit "
            "trains, beginning with its plan. Without a name: at the goal's batch.",
            "Weights are random and images noise: which plans fit depends on shapes alone; what "
            "their codes would add to a training's gradient is another benchmark's matter (noise).",
        ],
    }


def _line(one: Found, base: int) -> list[str]:
    return [
        one.way,
        f"{one.batch}",
        "" if one.named is None else f"{one.named}",
        f"{one.batch / base:.2f}x",
        "" if one.predicted_nbytes is None else mib(one.predicted_nbytes),
        mib(one.peak_nbytes),
        times(one.pairs),
        "yes" if one.exact else "no",
    ]


def _goal(way: str, found: list[Found], base: int, budget: int) -> dict[str, Any]:
    """Met by one row at both."""
    ratio, seconds = GOALS[way]
    rows = [one for one in found if one.way == way and one.peak_nbytes <= budget]
    return target(
        f"{way}: batch >= {ratio:g}x at <= {seconds:.2f}x the time of a sample",
        "; ".join(f"{one.batch / base:.2f}x at {one.pairs.ratio:.3f}x" for one in rows),
        any(one.batch >= ratio * base and one.pairs.ratio <= seconds for one in rows),
    )


if __name__ == "__main__":
    main()
