"""One training loop for every task and for both runs; what happens in it is data.

    for fact in train(run): ...        fact = (step, loss, seconds)

The only difference between a plain run and one through elbowroom is the context manager around
forward. Everything else (weights, batches, dropout, learning rate) follows from the seed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from elbowroom.demo.tasks import Batch, Task
from elbowroom.measure import mark

Saving = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class StepFact:
    """Facts about one step: its number from 0, the loss, and its seconds, data loading left out."""

    step: int
    loss: float
    seconds: float


@dataclass
class Run:
    """One model in training: `saving` makes the context that forward runs in."""

    task: Task
    saving: Saving
    steps: int
    seed: int = 0
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.model = self.task.model()
        self.optimizer = self.task.optimizer(self.model)

    def step(self, batch: Batch) -> Tensor:
        """One training step; gradients are dropped at its end, so that they belong to its peak."""
        inputs, targets = batch
        with self.saving():
            loss = self.task.loss(self.model(inputs), targets)
        mark("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        mark("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def train(run: Run) -> Iterator[StepFact]:
    """Train for `run.steps`, with a one-cycle learning rate; yields after each step."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        run.optimizer,
        max_lr=[group["lr"] for group in run.optimizer.param_groups],
        total_steps=run.steps + 1,
        # Of five steps a fifth would rise for none, which torch divides by.
        pct_start=0.2 if run.steps + 1 != 5 else 0.4,
        cycle_momentum=False,
    )
    run.model.train()
    batches = run.task.batches(run.seed)
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(run.seed)  # dropout: the same masks in both runs
    try:
        for step in range(run.steps):
            batch = next(batches)
            start_s = time.perf_counter()
            loss = run.step(batch)
            seconds = time.perf_counter() - start_s
            schedule.step()
            yield StepFact(step, float(loss), seconds)
    finally:
        torch.random.set_rng_state(generator_state)


@torch.no_grad()
def score(run: Run) -> float:
    """The share of right answers on the whole test set, 0 to 1. The model ends in training mode."""
    run.model.eval()
    right = total = 0
    for inputs, targets in run.task.test_batches():
        scores: Tensor = run.model(inputs)
        classes = 1 if scores.dim() == targets.dim() + 1 and scores.dim() == 4 else -1
        right += int((scores.argmax(classes) == targets).sum())
        total += targets.numel()
    run.model.train()
    return right / total
