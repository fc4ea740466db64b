"""Trains one model twice, plain and through elbowroom, and says what each training took.

    train plain -> score     train ours -> score     then, on the two trained models and one batch:

    saved bytes   the ledger's count before backward     what autograd would hold; what is held
    peak bytes    the allocator's truth over one step    forward, backward, optimizer
    seconds       interleaved pairs of steps             median, and the quartiles of the ratio

Memory and time are measured in steps of their own: a profiler slows a step down, and the first
steps of a run make optimizer states and compile kernels.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

from elbowroom.demo.tasks import Task
from elbowroom.demo.train import Run, score, train
from elbowroom.measure import MemoryCurve, Paired, memory_curve, paired


class LedgerBytes(Protocol):
    """Interface of `saved.ledger` as far as we read it, in bytes before backward."""

    @property
    def before_nbytes(self) -> int: ...
    @property
    def after_nbytes(self) -> int: ...


class Saved(Protocol):
    """Interface of what `with er.saving(...) as saved` gives."""

    @property
    def ledger(self) -> LedgerBytes: ...


Saving = Callable[[], AbstractContextManager[Saved]]


@dataclass(frozen=True)
class Progress:
    """Progress of a stage: `done` of `total` steps, and a few words."""

    stage: str
    done: int
    total: int
    note: str = ""


@dataclass(frozen=True)
class Side:
    """One of the two runs. `score` is a share, 0 to 1; `losses` has one value a step."""

    saved_nbytes: int
    curve: MemoryCurve
    score: float
    losses: tuple[float, ...]

    @property
    def peak_nbytes(self) -> int:
        """The highest level over one step, in bytes above the level before it."""
        return self.curve.peak_nbytes


@dataclass(frozen=True)
class Comparison:
    """Comparison of both runs and their paired step times (a is plain, b is ours)."""

    task: Task
    steps: int
    seed: int
    plain: Side
    ours: Side
    timing: Paired
    ledger: str  # the ledger of one step as a table

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON. All of them are measured; bytes and seconds are in the names."""
        return {
            "task": self.task.name,
            "data": self.task.origin,
            "steps": self.steps,
            "seed": self.seed,
            "score": self.task.score_name,
            "plain": _side_dict(self.plain, self.timing.median_a_s),
            "elbowroom": _side_dict(self.ours, self.timing.median_b_s),
            "step_time_ratio": self.timing.ratio,
            "step_time_ratio_quartiles": list(self.timing.ratio_iqr),
            "step_time_pairs": self.timing.n,
        }


def _side_dict(side: Side, step_s: float) -> dict[str, Any]:
    return {
        "saved_nbytes": side.saved_nbytes,
        "peak_nbytes": side.peak_nbytes,
        "step_s": step_s,
        "score": side.score,
        "final_loss": side.losses[-1] if isfinite(side.losses[-1]) else None,  # JSON has no NaN
    }


@dataclass(frozen=True)
class Glance:
    """One step of the network before it is trained, plain and ours."""

    task: Task
    before_nbytes: int  # saved by autograd
    after_nbytes: int  # held instead
    plain: MemoryCurve
    ours: MemoryCurve
    ledger: str


def try_out(task: Task, saving: Saving) -> Glance:
    """Measures a step of models of its own: what the comparison will show, in seconds.

    A codec that does not take the model's tensors raises its error here, before any training.
    """
    batch = next(task.batches(0))
    ours, plain = Run(task, saving, steps=1), Run(task, nullcontext, steps=1)
    ours.step(batch)  # makes optimizer states, and compiles kernels
    plain.step(batch)
    before_nbytes, after_nbytes, ledger = _saved(ours, saving, batch)
    curves = memory_curve(lambda: plain.step(batch)), memory_curve(lambda: ours.step(batch))
    return Glance(task, before_nbytes, after_nbytes, *curves, ledger)


def compare(
    task: Task,
    saving: Saving,
    *,
    steps: int,
    seed: int = 0,
    pairs: int = 10,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Comparison:
    """Train `task` for `steps` without and with `saving`, from one seed, and measure both."""
    if steps < 1:
        raise ValueError(f"steps is at least 1; got {steps}")
    plain, ours = Run(task, nullcontext, steps, seed), Run(task, saving, steps, seed)
    plain_losses, plain_score = _trained(plain, "plain", on_progress)
    our_losses, our_score = _trained(ours, "elbowroom", on_progress)

    batch = next(task.batches(seed + 1))
    before_nbytes, after_nbytes, ledger = _saved(ours, saving, batch)
    on_progress(Progress("measuring", 0, pairs, "memory of one step each"))
    plain_curve = memory_curve(lambda: plain.step(batch))
    our_curve = memory_curve(lambda: ours.step(batch))
    timing = paired(
        lambda: plain.step(batch),
        lambda: ours.step(batch),
        pairs=pairs,
        on_pair=lambda done: on_progress(Progress("measuring", done, pairs, "pairs of steps")),
    )
    return Comparison(
        task,
        steps,
        seed,
        plain=Side(before_nbytes, plain_curve, plain_score, plain_losses),
        ours=Side(after_nbytes, our_curve, our_score, our_losses),
        timing=timing,
        ledger=ledger,
    )


def _trained(
    run: Run, stage: str, on_progress: Callable[[Progress], None]
) -> tuple[tuple[float, ...], float]:
    """The losses of a training, and the score at its end."""
    losses = []
    for fact in train(run):
        losses.append(fact.loss)
        note = f"loss {fact.loss:.3f}, {fact.seconds:.2f} s a step"
        on_progress(Progress(stage, fact.step + 1, run.steps, note))
    share = score(run)
    on_progress(Progress(stage, run.steps, run.steps, f"{run.task.score_name} {share:.1%}"))
    return tuple(losses), share


def _saved(run: Run, saving: Saving, batch: Any) -> tuple[int, int, str]:
    """Bytes before and after, and the ledger as text, of one forward that is then thrown away."""
    inputs, targets = batch
    with saving() as saved:
        loss = run.task.loss(run.model(inputs), targets)
    ledger = saved.ledger
    counts = ledger.before_nbytes, ledger.after_nbytes, str(ledger)
    del loss
    return counts
