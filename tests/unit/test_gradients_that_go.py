"""Gradients that stand in a forward may go before its backward, which is no ground to refuse it."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import BudgetTooSmall

STEPS, MIB = 6, 2**20


class Scaled(nn.Module):
    """Blocks with a scale each, which an iterator gives: such a forward cannot be rehearsed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)
        )

    def forward(self, x: Tensor, scales: Iterator[float]) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * next(scales)
        return x


def train(budget: float | None, *, zeroes: bool) -> tuple[nn.Module, list[Tensor]]:
    """Returns a model after some steps, and their losses.

    zeroes: gradients go after forward; else they are added up
    """
    torch.manual_seed(0)
    model, losses = Scaled(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if budget is not None:
        er.fit(model, budget=int(budget * MIB), optimizer=optimizer, exact=True)
    for _ in range(STEPS):
        loss = model(torch.randn(512, 128), iter((1.0, 0.5, 0.25, 0.125))).square().mean()
        if zeroes:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


def test_a_budget_that_holds_once_gradients_have_gone_is_not_refused() -> None:
    plain, losses = train(None, zeroes=True)
    model, fitted = train(10.5, zeroes=True)
    assert all(map(torch.equal, losses, fitted))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    summary = er.summary(model)
    assert summary.last_nbytes is not None
    assert summary.last_nbytes <= 10.5 * MIB


def test_what_is_refused_where_gradients_stay_names_a_budget_that_holds() -> None:
    with pytest.raises(BudgetTooSmall) as refused:
        train(7.0, zeroes=False)
    least = refused.value.least_nbytes / MIB
    plain, losses = train(None, zeroes=False)
    model, fitted = train(least, zeroes=False)
    assert all(map(torch.equal, losses, fitted))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
