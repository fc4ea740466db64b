"""Ways to hold what autograd saves, measured side by side on one trained net and one batch.

All rows share one process, one model object, its weights, one batch and one dropout seed. The
weights come from a short training, because gradients at random weights are unlike those of a
training. They stay what they are: the optimizer runs at a learning rate of 0 (the same work, no
change), so that every step has the same true gradient g.

    saved bytes  allocator level when backward begins, above that before the step, less the loss
    ledger       our own count of them, less the inputs, which their owner holds; shown is how far
                 it is off; more than 1 % fails the run
    bits         8 x saved bytes / elements that plain autograd saves: codes, scales, masks,
                 statistics, all of it
    peak         highest allocator level over the step (forward, backward, optimizer), plus what
                 the arena held before
    time         median over pairs of (this step / a plain step right before or after it)
    gErr2        E |g~ - g|^2 / |g|^2 over noise seeds, one a pair and one before
    bias^2       see benchmarks/_gradient.py; in brackets, what that many seeds would leave anyway

A row has a time only if its gradients passed in that run: bit-equal for the exact ones, finite and
gErr2 < 1 for the others.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from _common import mib, paired_dict, tell, times
from _gradient import GradientError, Grads
from _ways import PLAIN, Way
from torch import nn

import elbowroom as er
from elbowroom.demo.tasks import Batch, Task
from elbowroom.demo.train import Run, train
from elbowroom.measure import MemoryCurve, Paired, mark, memory_curve
from elbowroom.runtime.arena import ARENA

_DROPOUT_SEED = 1234


@dataclass
class Bench:
    """A model with trained weights, a batch, and an optimizer that works and changes nothing."""

    task: Task
    model: nn.Module
    batch: Batch
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = self.task.optimizer(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

    @classmethod
    def trained(cls, task: Any, *, steps: int, batch: int, seed: int = 0) -> "Bench":
        """Train for `steps` on batches of `batch`, smaller than the measured one to save time."""
        run = Run(replace(task, batch=batch), nullcontext, steps, seed)
        for fact in train(run):
            if (fact.step + 1) % 16 == 0:
                tell(f"training {fact.step + 1}/{steps}, loss {fact.loss:.3f}")
        return cls(task, run.model, next(task.batches(seed + 1)))

    def step(self, way: Way, seed: int = 0) -> Any:
        """One step; its gradients stay. What the context gave comes back."""
        inputs, targets = self.batch
        with way.context(seed) as saved:
            loss = self.task.loss(self.model(inputs), targets)
        mark("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        mark("optimizer")
        self.optimizer.step()
        return saved

    def take_grads(self) -> Grads:
        """The gradients of the last step; the model has none afterwards."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return grads

    def grads(self, way: Way, seed: int = 0) -> Grads:
        torch.manual_seed(_DROPOUT_SEED)
        self.step(way, seed)
        return self.take_grads()

    def seconds(self, way: Way, seed: int) -> float:
        """Time one step; its gradients stay."""
        torch.manual_seed(_DROPOUT_SEED)
        start_s = time.perf_counter()
        self.step(way, seed)
        return time.perf_counter() - start_s

    @property
    def input_nbytes(self) -> int:
        """Bytes of the batch: saved by autograd too, but held by whoever made it."""
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in self.batch}
        return sum(storages.values())


@dataclass(frozen=True)
class Memory:
    """Bytes of one step. `ledger_nbytes` is None for what has no ledger."""

    saved_nbytes: int
    peak_nbytes: int
    ledger_nbytes: int | None = None

    @property
    def disagreement(self) -> float | None:
        """Ledger against allocator, as a fraction."""
        return None if self.ledger_nbytes is None else self.ledger_nbytes / self.saved_nbytes - 1


def memory(bench: Bench, way: Way) -> Memory:
    """Saved and peak bytes of one step, by the allocator, and by the ledger where there is one."""
    gc.collect()
    kept: list[Any] = []

    def step() -> None:
        kept.append(bench.step(way))
        bench.optimizer.zero_grad(set_to_none=True)

    torch.manual_seed(_DROPOUT_SEED)
    held_nbytes = ARENA.nbytes
    curve = memory_curve(step)
    ledger = getattr(kept[0], "ledger", None)
    counts = ledger is not None and ledger.before_nbytes > 0  # a plan that does nothing has none
    counted = ledger.after_nbytes - bench.input_nbytes if counts else None
    loss_nbytes = torch.float32.itemsize
    return Memory(level(curve, "backward") - loss_nbytes, curve.peak_nbytes + held_nbytes, counted)


def level(curve: MemoryCurve, moment: str) -> int:
    """Bytes held at a mark."""
    at_s = dict(curve.marks)[moment]
    before = [nbytes for t, nbytes in zip(curve.times_s, curve.nbytes, strict=True) if t <= at_s]
    return before[-1] if before else 0


def saved_elements(bench: Bench) -> int:
    """How many elements plain autograd saves, the inputs left out."""
    bench.model.zero_grad(set_to_none=True)
    with er.saving("keep") as saved:
        loss = bench.task.loss(bench.model(bench.batch[0]), bench.batch[1])
    count = sum(row.before_nbytes // _itemsize(row.dtype) for row in saved.ledger.rows)
    del loss
    storages = {x.untyped_storage()._cdata: x for x in bench.batch}.values()
    return count - sum(x.untyped_storage().nbytes() // x.element_size() for x in storages)


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype.removeprefix("torch.")).itemsize)


@dataclass
class Row:
    """What was found about one way."""

    way: Way
    memory: Memory
    error: GradientError
    pairs: Paired | None = None

    @property
    def passed(self) -> bool:
        """Whether its gradients are what they should be, so that a time means something."""
        if self.way.exact:
            return self.error.bit_equal
        return isfinite(self.error.gerr2) and self.error.gerr2 < 1

    def as_dict(self, plain: Memory, elements: int) -> dict[str, Any]:
        """Raw numbers."""
        timed = self.passed and self.pairs is not None
        return {
            "way": self.way.name,
            "exact": self.way.exact,
            "ours": self.way.ours,
            "saved_nbytes": self.memory.saved_nbytes,
            "saved_ratio": plain.saved_nbytes / self.memory.saved_nbytes,
            "ledger_nbytes": self.memory.ledger_nbytes,
            "ledger_vs_allocator": self.memory.disagreement,
            "bits_per_element": 8 * self.memory.saved_nbytes / elements,
            "peak_nbytes": self.memory.peak_nbytes,
            "peak_ratio": plain.peak_nbytes / self.memory.peak_nbytes,
            "gradients_passed": self.passed,
            "seeds": len(self.error.errors2),
            "gerr2": self.error.gerr2,
            "gerr2_sd": self.error.gerr2_sd,
            "bias2": self.error.bias2,
            "sampling2": self.error.sampling2,
            "time": paired_dict(self.pairs) if timed and self.pairs else None,
        }


@dataclass(frozen=True)
class Findings:
    """All rows, against one plain step."""

    plain: Memory
    plain_s: float
    elements: int
    rows: list[Row]


def measure(bench: Bench, ways: Sequence[Way], *, pairs: int) -> Findings:
    """Gradients, then bytes, then time. Raises AssertionError if our own promises do not hold."""
    bench.grads(PLAIN)  # makes the optimizer's states
    g = bench.grads(PLAIN)
    errors = [GradientError(g) for _ in ways]
    for way, error in zip(ways, errors, strict=True):
        error.add(bench.grads(way, seed=1))  # compiles kernels too
        tell(f"gradient of {way.name}: {_verdict(way, error)}")
    elements, plain = saved_elements(bench), memory(bench, PLAIN)
    rows = [Row(way, memory(bench, way), error) for way, error in zip(ways, errors, strict=True)]
    tell("memory of all ways is measured")
    plain_s: list[float] = []
    timed: list[list[float]] = [[] for _ in ways]
    beside: list[list[float]] = [[] for _ in ways]
    for i_round in range(pairs):
        for i_way, plain_now_s, way_s in _round(bench, ways, errors, i_round, g):
            beside[i_way].append(plain_now_s)
            timed[i_way].append(way_s)
            plain_s.append(plain_now_s)
        tell(f"round {i_round + 1}/{pairs}")
    for row, a_s, b_s in zip(rows, beside, timed, strict=True):
        row.pairs = Paired(tuple(a_s), tuple(b_s))
    _check(rows)
    return Findings(plain, sorted(plain_s)[len(plain_s) // 2], elements, rows)


def _verdict(way: Way, error: GradientError) -> str:
    return ("bit-equal" if error.bit_equal else "DIFFERS") if way.exact else f"{error.gerr2:.4f}"


def _round(
    bench: Bench, ways: Sequence[Way], errors: Sequence[GradientError], i_round: int, g: Grads
) -> Iterator[tuple[int, float, float]]:
    """(way, plain seconds, its seconds): each way runs next to a plain step, which two ways share.

    P a b P c d P e ..., reversed in every other round, so that each way comes as often before its
    plain step as after it.
    """
    order: list[int | None] = []  # None is a plain step
    for i in range(len(ways)):
        order += [None, i] if i % 2 == 0 else [i]
    if len(ways) % 2 == 0:
        order.append(None)
    order = order[::-1] if i_round % 2 else order
    clocked = []
    for i_way in order:
        way = PLAIN if i_way is None else ways[i_way]
        clocked.append(bench.seconds(way, seed=2 + i_round))
        grads = bench.take_grads()
        if i_way is not None:
            errors[i_way].add(grads)
        elif not all(torch.equal(new, true) for new, true in zip(grads, g, strict=True)):
            raise AssertionError("a plain step does not repeat its own gradient bit for bit")
        del grads
    for place, i_way in enumerate(order):
        if i_way is not None:
            at = place - 1 if place > 0 and order[place - 1] is None else place + 1
            yield i_way, clocked[at], clocked[place]


def _check(rows: Iterable[Row]) -> None:
    for row in rows:
        if row.way.ours and not row.passed:
            raise AssertionError(f"{row.way.name}: wrong gradients, {_verdict(row.way, row.error)}")
        off = row.memory.disagreement
        if off is not None and abs(off) > 0.01:
            raise AssertionError(f"{row.way.name}: ledger and allocator differ by {off:.2%}")


HEAD = (
    "forward inside",
    "saved MiB",
    "below plain",
    "ledger",
    "bits/element",
    "peak MiB",
    "below plain",
    "step time / plain",
    "gErr2",
    "bias^2 (sampling)",
    "meets all",
)


def table(found: Findings, verdict: Callable[[dict[str, Any]], str]) -> list[list[str]]:
    """The rows as printed; `verdict` says of a row's numbers whether it keeps the promise."""
    plain = found.plain
    bits = f"{8 * plain.saved_nbytes / found.elements:.2f}"
    first = [PLAIN.name, mib(plain.saved_nbytes), "1.00x", "", bits, mib(plain.peak_nbytes)]
    lines = [[*first, "1.00x", f"1 ({found.plain_s:.2f} s)", "0", "0", ""]]
    for row in found.rows:
        numbers = row.as_dict(plain, found.elements)
        off = row.memory.disagreement
        lines.append(
            [
                row.way.name,
                mib(row.memory.saved_nbytes),
                f"{numbers['saved_ratio']:.2f}x",
                "" if off is None else f"{off:+.2%}",
                f"{numbers['bits_per_element']:.2f}",
                mib(row.memory.peak_nbytes),
                f"{numbers['peak_ratio']:.2f}x",
                times(row.pairs) if row.passed and row.pairs else "gradients differ",
                _error_cell(row),
                _bias_cell(row),
                verdict(numbers),
            ]
        )
    return lines


def _error_cell(row: Row) -> str:
    if row.error.bit_equal:
        return "0 (bit-equal)"
    return f"{row.error.gerr2:.3g} ± {row.error.gerr2_sd:.1g}"


def _bias_cell(row: Row) -> str:
    if row.error.bit_equal:
        return "0"
    return f"{row.error.bias2:.1e} ({row.error.sampling2:.1e})"
