"""The parameters of a step, gathered into as few kernel calls as their formats allow.

    device, dtypes, weights, kinds -> one call of `ops.optimizer_step`

What is gathered holds no states and no gradients, and serves until other parameters are due, or in
another format. A sparse gradient is made dense for its call alone, so that only one exists at a
time.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elbowroom.kernels import ops
from elbowroom.kernels.fakes import has_values
from elbowroom.kernels.reference.step import STEP_MASK
from elbowroom.optim.device_steps import DeviceSteps, Step, counts_for_itself, table_of
from elbowroom.optim.formats import Group, seed_of
from elbowroom.optim.parameters import Update
from elbowroom.optim.sharded import is_sharded, local, shard_of
from elbowroom.optim.verdict import joined

_FACTORS = 8  # the most numbers that a rule takes
States = dict[str, Tensor]
FactorsOf = Callable[[Group, Step], list[Any]]  # the numbers of a rule in a param group at a step


class Due(NamedTuple):
    """A parameter that is to be updated, at its place among all."""

    place: int
    group: Group
    p: Tensor
    update: Update


# A named tuple's own way to make one is a function of Python's.
new_due: Callable[[type[Due], Any], Due] = tuple.__new__


@dataclass
class Batch:
    """The parameters of one call, by what stays the same from step to step.

    first   one of them, whose formats are those of all
    at      their places in the list of what is due
    params  as `ops.optimizer_step` takes them
    seeds   the lower halves
    groups  of how many parameters, in their order
    """

    first: Due
    at: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # among all
    params: list[Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    groups: list[tuple[Group, int]] = field(default_factory=list)

    def lists(self, states: list[States], grads: list[Tensor]) -> list[list[Tensor]]:
        """Returns the tensors of the call, of all states and gradients that are due."""
        update, mine = self.first.update, [states[i] for i in self.at]
        first, second = update.first, update.second
        names = (
            "residual" if update.residual else None,
            first.codes,
            None if update.m_kind == "fp32" else first.bounds,
            None if second is None else second.codes,
            None if second is None or update.v_kind == "fp32" else second.bounds,
        )
        residuals, *moments = [[state[name] for state in mine] if name else [] for name in names]
        return [self.params, residuals, [grads[i] for i in self.at], *moments]


class Batches:
    """All calls of a step of a rule, for the parameters that are due."""

    def __init__(self, rule: str, due: list[Due], grads: list[Tensor]) -> None:
        self.due, self._rule = due, rule
        self._limited: defaultdict[tuple[torch.device, float], list[int]] = defaultdict(list)
        self._batches: dict[tuple[Any, ...], Batch] = {}
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, ((place, group, p, update), grad) in enumerate(zip(due, grads, strict=True)):
            alone = place if grad.is_sparse else -1
            key: tuple[Any, ...] = id(update), id(group), p.device, grad.dtype, type(p), alone
            alike.setdefault(key, []).append(i)
            self._limited[grad.device, update.limit].append(i)
        for (*_, dtype, kind, alone), at in alike.items():
            self._add([due[i] for i in at], at, (dtype, kind, alone))

    def _add(self, due: list[Due], at: list[int], by: tuple[Any, ...]) -> None:
        """Adds some of one param group whose states have the same names and formats."""
        (_, group, p, update), *_ = due
        kinds = update.m_kind, update.v_kind
        key = (p.device, p.dtype, group["weights"], kinds, update.residual, *by)
        batch = self._batches.setdefault(key, Batch(due[0]))
        batch.at += at
        batch.places += [one.place for one in due]
        batch.params += [one.p for one in due]
        batch.rows += [update.row] * len(due)
        batch.seeds += [seed_of(group["seed"], 0, one.place, shard_of(one.p)) for one in due]
        batch.groups.append((group, len(due)))

    def beyond(self, grads: list[Tensor]) -> Tensor | None:
        """Returns whether a gradient is not finite, or too large for its format: int32 [].

        None: there is none, or none with values.
        """
        if not grads or not has_values(grads[0]):
            return None
        flags = []
        for (_, limit), at in self._limited.items():
            mine = [grads[i] for i in at]
            values = [x.values().contiguous() if x.is_sparse else x for x in mine]
            flags.append(ops.beyond(values, limit))
        return joined(flags)

    def run(
        self,
        states: list[States],
        grads: list[Tensor],
        steps: list[int],
        factors_of: FactorsOf,
        counts: DeviceSteps | None,
        skip: Tensor | None,
    ) -> list[Tensor]:
        """Does all calls, and returns the tensors that they have written.

        steps: that the parameters are at. counts: where devices count steps for themselves; None:
        the host does. skip: see `ops.optimizer_step`.
        """
        written: list[Tensor] = []
        for batch in self._batches.values():
            p, update = batch.first.p, batch.first.update
            tensors = batch.lists(states, grads)
            for some in (*tensors[:2], *tensors[3:]):
                written += some
            if tensors[2][0].is_sparse:
                tensors[2] = [torch.empty_like(p).copy_(tensors[2][0].to_dense())]
            if is_sharded(p):
                tensors = [[local(x) for x in some] for some in tensors]
            mine = [steps[i] for i in batch.at]
            skips, there = None if skip is None else skip.to(p.device), None
            if counts is not None and counts_for_itself(p):
                there = counts.advance(p, tuple(batch.places), mine, skips)
                factors, seeds = _factors_there(batch, there, factors_of), batch.seeds
            else:
                factors = _factors_here(batch, mine, factors_of)
                seeds = [
                    (step & STEP_MASK) << 32 | seed
                    for step, seed in zip(mine, batch.seeds, strict=True)
                ]
            ops.optimizer_step(
                *tensors,
                *(self._rule, batch.first.group["weights"], update.m_kind, update.v_kind),
                *(batch.rows, factors, seeds, skips, there),
            )
        return written


def _factors_here(batch: Batch, steps: list[int], factors_of: FactorsOf) -> Tensor:
    """Returns the factors of a batch's parameters, computed once for those at the same step.

    Where they have no values: an empty table on their device.
    """
    p = batch.first.p
    if not has_values(p):
        return p.new_empty(len(steps), _FACTORS, dtype=torch.float32)
    table: list[list[float]] = []
    rows: list[int] = []
    start = 0
    for group, count in batch.groups:
        mine = steps[start : start + count]
        row_of = {step: row for row, step in enumerate(dict.fromkeys(mine), len(table))}
        made = [factors_of(group, step) for step in row_of]
        table += [one + [0.0] * (_FACTORS - len(one)) for one in made]
        rows += [row_of[step] for step in mine]
        start += count
    return torch.tensor(table, dtype=torch.float32)[torch.tensor(rows)]


def _factors_there(batch: Batch, steps: Tensor, factors_of: FactorsOf) -> Tensor:
    """Returns the same, computed where the steps are."""
    parts = torch.split(steps.double(), [n for _, n in batch.groups])
    tables = [
        table_of(factors_of(group, part), part, _FACTORS)
        for (group, _), part in zip(batch.groups, parts, strict=True)
    ]
    return torch.cat(tables)
