"""Modules that cannot run again, whatever forbids it: a budget holds, or is refused."""

import itertools
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er
from elbowroom.errors import BudgetTooSmall

_STEPS, _WIDTH = 12, 64


class _Block(nn.Module):
    """A residual block whose factor comes from what a second run would change."""

    counted = 0

    def __init__(self, kind):
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.norm, self.kind = nn.LayerNorm(_WIDTH), kind
        if kind == "iterator":
            self.factors = itertools.cycle((1.0, 1.1, 0.9))

    def forward(self, x):
        return x + self._factor() * self.down(F.gelu(self.up(self.norm(x))))

    def _factor(self):
        if self.kind == "counter":
            type(self).counted += 1
            return 1 + 0.01 * (self.counted % 5)
        if self.kind == "clock":
            return 1 + 0.01 * (time.perf_counter_ns() % 5)
        if self.kind == "lazy generator" and not hasattr(self, "factors"):
            self.factors = (1 + 0.01 * (n % 5) for n in itertools.count())
        return next(self.factors)


def _settled(kind, budget=None):
    """Returns the peak of the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(kind) for _ in range(6)), nn.Linear(_WIDTH, 4))
    weights = sum(p.nbytes for p in model.parameters())
    if budget is not None:
        er.fit(model, budget=budget, exact=True)
    x = torch.randn(1024, _WIDTH)

    def step():
        model.zero_grad()
        F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()

    for _ in range(_STEPS):
        step()
    taken = er.peak(step) + weights
    er.release(model)
    return taken


@pytest.mark.parametrize("kind", ["counter", "clock", "lazy generator", "iterator"])
@pytest.mark.parametrize("share", [0.75, 0.5])
def test_a_budget_holds_or_is_refused_and_the_named_one_holds(kind, share):
    budget = int(share * _settled(kind))
    for _ in range(2):
        try:
            assert _settled(kind, budget) <= budget
            return
        except BudgetTooSmall as error:
            budget = error.least_nbytes
    pytest.fail("the budget that was named is refused")


def test_a_refusal_before_anything_was_measured_names_no_more_than_plain_training_takes():
    plain_nbytes = _settled("iterator")
    with pytest.raises(BudgetTooSmall, match="estimated") as refused:
        _settled("iterator", int(0.45 * plain_nbytes))
    assert refused.value.least_nbytes <= plain_nbytes
