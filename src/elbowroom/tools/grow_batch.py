"""A batch that grows between epochs, into the room that codes have made.

    er.fit(model, budget="6 GiB", optimizer=optimizer)
    growing = er.grow_batch(loader_factory, model, optimizer, batch=32, budget="6 GiB", loss=loss)
    for epoch in range(epochs):
        for data in growing:        # before the second epoch, and each later one, it may grow
            ...

After COMET (arXiv 2111.09562), which enlarges the batch into the memory that its codes free. Before
an epoch `er.largest_batch` says what fits, and the batch becomes that, at most `growth` times as
large as it was (parts of a sample add up from epoch to epoch) and never smaller. The learning rates
of all groups follow by the rule:

    none    as they are
    linear  times new / old         (Goyal et al., arXiv 1706.02677)
    sqrt    times sqrt(new / old)   (for Adam and its like: Malladi et al., arXiv 2205.10287)

The rates that schedulers begin from (`initial_lr`, and `base_lrs` of those that are given) follow
too, so that a schedule goes on, scaled.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.units import show_nbytes

RULES: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": sqrt,
}
_log = logging.getLogger("elbowroom")


class Grown(NamedTuple):
    """Record that the batch grew before an epoch.

    lr_factor: what learning rates were multiplied by.
    """

    epoch: int
    batch: int
    lr_factor: float


@dataclass
class GrowingBatch:
    """An iterable over the batches of one epoch after the other. `er.grow_batch` makes it.

    loader_factory  batch size -> an iterable over the batches of an epoch
    optimizer       whose learning rates follow
    find            make_batch -> the largest batch that fits
    batch           samples a batch, now
    rule            "none", "linear" or "sqrt"
    most            no larger batch is taken; None: the samples of the largest epoch so far
    growth          a batch becomes at most so many times as large at once
    schedulers      whose `base_lrs` follow
    grown           when it has grown, and by what learning rates were multiplied
    """

    loader_factory: Callable[[int], Iterable[Any]]
    optimizer: Optimizer
    find: Callable[[Callable[[int], Any]], int]
    batch: int
    rule: str
    most: int | None
    growth: float
    schedulers: Sequence[Any]

    def __post_init__(self) -> None:
        self.epoch = 0
        self.grown: list[Grown] = []
        self._samples = 0  # of the largest epoch so far, or as many as are known of it
        self._limit = float(self.batch)  # what growth has allowed so far
        self._is_full = False  # the largest batch has been reached

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of the next epoch."""
        if self.epoch and not self._is_full:
            self._grow()
        self.epoch += 1
        samples = 0
        loader = self.loader_factory(self.batch)
        # The program may end an epoch early. The last batch may be smaller.
        self._samples = max(self._samples, (_length_of(loader) - 1) * self.batch)
        for data in self._batches(loader):
            samples += _size_of(data)
            self._samples = max(self._samples, samples)
            yield data

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        try:
            return iter(loader)
        except TypeError as error:
            raise PlanError(
                "loader_factory(n) returns an iterable over the batches of one epoch, such as a "
                f"DataLoader; got {type(loader).__name__}"
            ) from error

    def _grow(self) -> None:
        most = self._samples if self.most is None else self.most
        if self.batch >= most > 0:
            self._is_full = True
            return
        limit = self.growth * self._limit
        if limit < self.batch + 1:
            self._limit = limit
            return
        try:
            largest = self.find(self._make_batch)
        except BudgetTooSmall as error:
            _log.warning("the batch stays at %d: %s", self.batch, error)
            return
        new = min(largest, int(limit), most or largest)
        self._is_full = largest <= self.batch
        if new <= self.batch:
            return
        self._limit = limit if int(limit) == new else float(new)
        factor = RULES[self.rule](new / self.batch)
        self._scale(factor)
        _log.info(
            "batch %d -> %d (%d would fit); learning rates times %.3g, by the rule '%s'",
            self.batch,
            new,
            largest,
            factor,
            self.rule,
        )
        self.batch = new
        self.grown.append(Grown(self.epoch, new, factor))

    def _make_batch(self, n: int) -> Any:
        """A batch of n samples: a loader's first one, repeated where there are fewer."""
        sizes = n, self.batch  # a loader that drops the last batch may have none of n
        loaders = (self.loader_factory(size) for size in sizes)
        data = next((first for one in loaders for first in one), None)
        size = _size_of(data)
        if size == n:
            return data
        at = torch.arange(n) % size

        def repeated(x: Any) -> Any:
            is_of_samples = isinstance(x, Tensor) and x.dim() > 0 and len(x) == size
            return x[at.to(x.device)] if is_of_samples else x

        return tree_map(repeated, data)

    def _scale(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            for name in ("lr", "initial_lr"):
                if isinstance(group.get(name), Tensor):
                    group[name].mul_(factor)
                elif name in group:
                    group[name] *= factor
        for scheduler in self.schedulers:
            scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs beside the states of the optimizer and the schedulers."""
        return {
            "batch": self.batch,
            "epoch": self.epoch,
            "samples": self._samples,
            "limit": self._limit,
            "is_full": self._is_full,
            "grown": [list(one) for one in self.grown],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`; the learning rates are in the optimizer's state."""
        self.batch, self.epoch = state["batch"], state["epoch"]
        self._samples, self._is_full = state["samples"], state["is_full"]
        self._limit = state.get("limit", float(self.batch))
        self.grown = [Grown(*one) for one in state["grown"]]


def _length_of(loader: Any) -> int:
    """Batches of an epoch; 0 where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # of a DataLoader over an iterable, too
        return 0


def _size_of(data: Any) -> int:
    """Samples of a batch: the length of its first tensor. Raises PlanError if there is none."""
    for x in tree_leaves(data):
        if isinstance(x, Tensor) and x.dim() > 0 and len(x) > 0:
            return len(x)
    raise PlanError(
        "loader_factory(n) must return batches whose first tensor has one row per sample; got "
        f"{type(data).__name__}. It must return at least one batch for every n"
    )


def warn_unfitted(batch: int, budget_nbytes: int) -> None:
    """Says that a batch fits by a plan alone, which nothing carries out."""
    _log.warning(
        "a batch of %d fits %s by a plan, and this model is not fitted, so its steps may take "
        "more; call er.fit(model, budget=%r, optimizer=optimizer) before",
        batch,
        show_nbytes(budget_nbytes),
        budget_nbytes,
    )


def check_growing(
    optimizer: Optimizer,
    batch: int,
    rule: str,
    most: int | None,
    growth: float,
    schedulers: Sequence[Any],
) -> None:
    """Raises PlanError for what is no optimizer, batch, rule, growth or list of schedulers."""
    if not isinstance(optimizer, Optimizer):  # it is not optional, as elsewhere: rates follow
        raise PlanError(
            f"grow_batch takes a torch.optim.Optimizer, whose learning rates follow; got "
            f"{type(optimizer).__name__}"
        )
    if type(batch) is not int or batch < 1:
        raise PlanError(f"batch={batch!r} is not possible; it is an int of 1 or more: samples")
    if not isinstance(rule, str) or rule not in RULES:
        raise PlanError(
            f"rule={rule!r} is not possible; how the learning rate follows is one of "
            f"{', '.join(map(repr, RULES))}"
        )
    if most is not None and (type(most) is not int or most < batch):
        raise PlanError(f"most={most!r} is not possible; it is an int, at least batch={batch}")
    is_number = isinstance(growth, int | float) and not isinstance(growth, bool)
    if not is_number or not 1 < growth < float("inf"):
        raise PlanError(f"growth={growth!r} is not possible; it is a finite number above 1, e.g. 2")
    is_list = isinstance(schedulers, Sequence)
    if not is_list or not all(hasattr(one, "base_lrs") for one in schedulers):
        raise PlanError(
            f"schedulers={schedulers!r} is not possible; it is a list of learning rate schedulers, "
            "with `base_lrs`"
        )
