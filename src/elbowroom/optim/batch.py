"""The parameters of one step, gathered into as few kernel calls as their formats allow.

    device, dtypes, rule, weights, kinds -> one call of `ops.optimizer_step`

A sparse gradient is made dense for its call alone, so that only one exists at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from elbowroom.kernels import ops
from elbowroom.kernels.fakes import has_values
from elbowroom.optim.formats import Group, seed_of
from elbowroom.optim.parameters import Update
from elbowroom.optim.sharded import is_sharded, local, shard_of

_FACTORS = 8  # the most numbers that a rule takes


@dataclass
class Batch:
    """The arguments of one call: `tensors` as `ops.optimizer_step` takes them, and numbers."""

    weights: str
    kinds: tuple[str, str]
    tensors: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(7)])
    rows: list[int] = field(default_factory=list)
    factors: list[int] = field(default_factory=list)  # places in the list of all
    seeds: list[int] = field(default_factory=list)


class Batches:
    """All calls of a step.

    factors  the numbers of a rule in a param group at a step
    written  the tensors that the calls write
    """

    def __init__(self, rule: str, factors: Callable[[Group, int], list[float]]) -> None:
        self.written: list[Tensor] = []
        self._rule, self._factors_of = rule, factors
        self._batches: dict[tuple[object, ...], Batch] = {}
        self._factors: list[list[float]] = []
        self._places: dict[tuple[int, int], int] = {}  # (group, step) -> place among them

    def add(
        self,
        group: Group,
        p: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        update: Update,
        step: int,
        index: int,
    ) -> None:
        """One parameter, the index-th of all, at its `step`."""
        first, second = update.first, update.second
        tensors = [p, state.get("residual"), grad, state[first.codes]]
        tensors.append(None if update.m_kind == "fp32" else state[first.bounds])
        if second is None:
            tensors += [None, None]
        else:
            tensors.append(state[second.codes])
            tensors.append(None if update.v_kind == "fp32" else state[second.bounds])
        self.written += [x for x in tensors if x is not None and x is not grad]
        shard = 0
        if is_sharded(p):
            tensors, shard = [None if x is None else local(x) for x in tensors], shard_of(p)
        weights, kinds = group["weights"], (update.m_kind, update.v_kind)
        alone = index if grad.is_sparse else -1
        key = (p.device, p.dtype, grad.dtype, weights, kinds, update.residual, alone)
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = Batch(weights, kinds)
        for some, x in zip(batch.tensors, tensors, strict=True):
            if x is not None:
                some.append(x)
        batch.rows.append(update.row)
        batch.factors.append(self._place(group, step))
        batch.seeds.append(seed_of(group["seed"], step, index, shard))

    def run(self, skip: Tensor | None) -> None:
        """Do all calls; skip: see `ops.optimizer_step`."""
        factors = torch.tensor(self._factors, dtype=torch.float32)
        for batch in self._batches.values():
            (p, *_), _, (grad, *_), *_ = batch.tensors
            if grad.is_sparse:
                batch.tensors[2] = [torch.empty_like(p).copy_(grad.to_dense())]
            ops.optimizer_step(
                *batch.tensors,
                *(self._rule, batch.weights, *batch.kinds, batch.rows),
                _chosen(factors, batch.factors, p),
                batch.seeds,
                None if skip is None else skip.to(p.device),
            )

    def _place(self, group: Group, step: int) -> int:
        key = id(group), step
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._factors)
            made = self._factors_of(group, step)
            self._factors.append(made + [0.0] * (_FACTORS - len(made)))
        return place


def _chosen(factors: Tensor, places: list[int], p: Tensor) -> Tensor:
    """The rows of `factors` at these places; on a stand-in's device, where p has no values."""
    if not has_values(p):
        return p.new_empty(len(places), _FACTORS, dtype=torch.float32)
    return factors[torch.tensor(places)]
