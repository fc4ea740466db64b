"""The parameters of one step, gathered into as few kernel calls as their formats allow.

    device, dtypes, weights, kinds -> one call of `ops.optimizer_step`

A sparse gradient is made dense for its call alone, so that only one exists at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elbowroom.kernels import ops
from elbowroom.kernels.fakes import has_values
from elbowroom.optim.device_steps import DeviceSteps, Step, counts_for_itself, table_of
from elbowroom.optim.formats import Group, seed_of
from elbowroom.optim.parameters import Update
from elbowroom.optim.sharded import is_sharded, local, shard_of

_FACTORS = 8  # the most numbers that a rule takes
States = dict[str, Tensor]


class Due(NamedTuple):
    """A parameter that is to be updated, at its place among all; this rank's part of its gradient.

    A dense gradient lies as the parameter does; a sparse one is coalesced.
    """

    place: int
    group: Group
    p: Tensor
    grad: Tensor
    update: Update


# A named tuple's own way to make one is a function of Python's.
new_due: Callable[[type[Due], Any], Due] = tuple.__new__


@dataclass
class Batch:
    """The arguments of one call: tensors as `ops.optimizer_step` takes them, and numbers."""

    weights: str
    kinds: tuple[str, str]
    tensors: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(7)])
    rows: list[int] = field(default_factory=list)
    factors: list[int] = field(default_factory=list)  # places in the list of all
    seeds: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of its parameters, among all
    steps: list[int] = field(default_factory=list)
    groups: list[tuple[Group, int]] = field(default_factory=list)  # of how many parameters


class Batches:
    """All calls of a step.

    factors  the numbers of a rule in a param group at a step
    written  the tensors that the calls write
    """

    def __init__(
        self,
        rule: str,
        factors: Callable[[Group, Step], list[Any]],
        counts: DeviceSteps | None = None,
    ) -> None:
        """counts: where devices count steps for themselves; None: the host does."""
        self.written: list[Tensor] = []
        self._rule, self._factors_of, self._counts = rule, factors, counts
        self._batches: dict[tuple[object, ...], Batch] = {}
        self._factors: list[list[float]] = []
        self._places: dict[tuple[int, int], int] = {}  # (group, step) -> place among them

    def add(self, due: list[Due], states: list[States], steps: list[int]) -> None:
        """Adds parameters, their states, and the steps that they are at."""
        alike: dict[tuple[object, ...], list[tuple[Due, States, int]]] = {}
        for one, state, step in zip(due, states, steps, strict=True):
            place, group, p, grad, update = one
            alone = place if grad.is_sparse else -1
            key = (id(update), id(group), p.device, grad.dtype, type(p), alone)
            some = alike.get(key)
            if some is None:
                some = alike[key] = []
            some.append((one, state, step))
        for some in alike.values():
            self._add(*map(list, zip(*some, strict=True)))

    def _add(self, due: list[Due], states: list[States], steps: list[int]) -> None:
        """Adds some of one param group whose states have the same names and formats."""
        (place, group, p, grad, update), *_ = due
        first, second = update.first, update.second
        tensors: list[list[Tensor]] = [
            [one.p for one in due],
            [state["residual"] for state in states] if update.residual else [],
            [one.grad for one in due],
            [state[first.codes] for state in states],
            [] if update.m_kind == "fp32" else [state[first.bounds] for state in states],
            [] if second is None else [state[second.codes] for state in states],
            []
            if second is None or update.v_kind == "fp32"
            else [state[second.bounds] for state in states],
        ]
        for some in (*tensors[:2], *tensors[3:]):
            self.written += some
        shards = [0] * len(due)
        if is_sharded(p):
            shards = [shard_of(one.p) for one in due]
            tensors = [[local(x) for x in some] for some in tensors]
        weights, kinds = group["weights"], (update.m_kind, update.v_kind)
        alone = place if grad.is_sparse else -1
        key = (p.device, p.dtype, grad.dtype, weights, kinds, update.residual, alone)
        batch = self._batches.setdefault(key, Batch(weights, kinds))
        for mine, more in zip(batch.tensors, tensors, strict=True):
            mine += more
        batch.rows += [update.row] * len(due)
        seed = group["seed"]
        if self._counts is None or not counts_for_itself(p):
            batch.factors += [self._place(group, step) for step in steps]
        else:
            batch.places += [one.place for one in due]
            batch.steps += steps
            batch.groups.append((group, len(due)))
            steps = [0] * len(due)  # which the device adds to the seeds
        batch.seeds += [
            seed_of(seed, step, one.place, shard)
            for one, step, shard in zip(due, steps, shards, strict=True)
        ]

    def run(self, skip: Tensor | None) -> None:
        """Does all calls. skip: see `ops.optimizer_step`."""
        factors = torch.tensor(self._factors, dtype=torch.float32)
        for batch in self._batches.values():
            (p, *_), _, (grad, *_), *_ = batch.tensors
            if grad.is_sparse:
                batch.tensors[2] = [torch.empty_like(p).copy_(grad.to_dense())]
            skips, steps = None if skip is None else skip.to(p.device), None
            if batch.groups:
                assert self._counts is not None
                steps = self._counts.advance(p, tuple(batch.places), batch.steps, skips)
                mine = self._factors_there(batch, steps)
            else:
                mine = _chosen(factors, batch.factors, p)
            ops.optimizer_step(
                *batch.tensors,
                *(self._rule, batch.weights, *batch.kinds, batch.rows),
                *(mine, batch.seeds, skips, steps),
            )

    def _factors_there(self, batch: Batch, steps: Tensor) -> Tensor:
        """Return the factors of a batch's parameters, computed where their steps are."""
        parts = torch.split(steps.double(), [n for _, n in batch.groups])
        tables = [
            table_of(self._factors_of(group, part), part, _FACTORS)
            for (group, _), part in zip(batch.groups, parts, strict=True)
        ]
        return torch.cat(tables)

    def _place(self, group: Group, step: int) -> int:
        key = id(group), step
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._factors)
            made = self._factors_of(group, step)
            self._factors.append(made + [0.0] * (_FACTORS - len(made)))
        return place


def _chosen(factors: Tensor, places: list[int], p: Tensor) -> Tensor:
    """Returns `factors` at these places; where p has no values, an empty table on its device."""
    if not has_values(p):
        return p.new_empty(len(places), _FACTORS, dtype=torch.float32)
    return factors[torch.tensor(places)]
