"""Checkpoints of the program's own that `er.fit` opens where no plan fits beside them."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

import elbowroom as er
from elbowroom.runtime.context import Context
from elbowroom.runtime.opened_checkpoints import as_now, noticing


class Blocks(nn.Module):
    """Perceptrons [2048, 64] -> [2048, 512] -> [2048, 64], each inside of a checkpoint."""

    def __init__(self, dropout=0.0, **given):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(dropout), nn.Linear(512, 64))
            for _ in range(4)
        )
        self.given = {"use_reentrant": False} | given
        self.runs = 0

    def block(self, nth, x):
        self.runs += 1
        return x + self.blocks[nth](x)

    def forward(self, x):
        for nth in range(len(self.blocks)):
            x = checkpoint(self.block, nth, x, **self.given)
        return x.square().mean()


def stepper(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, optimizer


def made(**given):
    torch.manual_seed(0)
    return Blocks(**given), torch.randn(2048, 64)


def test_a_budget_below_what_checkpoints_put_back_is_held():
    """It was refused: what a second run saves stood whole, and no plan saw it."""
    model, x = made()
    plain, _ = stepper(copy.deepcopy(model), x)
    static = sum(p.nbytes for p in model.parameters())
    before = static + er.peak(plain)
    step, optimizer = stepper(model, x)
    budget = int(0.8 * before)
    er.fit(model, budget=budget, optimizer=optimizer)
    losses = [step() for _ in range(6)]
    gc.collect()
    assert static + er.peak(step) <= budget
    truth, _ = stepper(made()[0], x)
    assert losses == pytest.approx([truth() for _ in range(6)], rel=1e-3)
    er.release(model)
    model.runs = 0
    step()
    assert model.runs == 8  # the program's own checkpoints again


def test_a_budget_that_holds_beside_checkpoints_leaves_them():
    model, x = made()
    step, optimizer = stepper(model, x)
    er.fit(model, budget="200 MiB", optimizer=optimizer)
    step()
    model.runs = 0
    step()
    assert model.runs == 8


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_opened_checkpoints_give_the_same_bits(dropout):
    model, x = made(dropout=dropout)
    context = Context()

    def gradients():
        torch.manual_seed(1)
        with noticing(context):
            loss = model(x)
            opens = as_now()
        with opens():
            loss.backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return [loss.detach(), *found]

    closed, runs = gradients(), model.runs
    assert context.has_checkpoints
    context.opens_checkpoints = True
    opened = gradients()
    assert (runs, model.runs - runs) == (8, 4)
    assert all(map(torch.equal, closed, opened))


def another_context():
    return noop_context_fn()


@pytest.mark.parametrize("given", [{"use_reentrant": True}, {"context_fn": another_context}])
def test_other_checkpoints_are_left_alone(given):
    model, x = made(**given)
    context = Context()
    context.opens_checkpoints = True
    with noticing(context):
        model(x.requires_grad_()).backward()
    assert model.runs == 8
    assert not context.has_checkpoints
