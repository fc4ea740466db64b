"""DELTA's rule in er.fit: what it moves comes back to the same bits, early, inside the budget."""

import torch
from torch import nn

import elbowroom as er
from elbowroom.runtime.tiers import CLOCK
from prices import draw_prices


def make():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Softplus()) for _ in range(8)))


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_delta_moves_to_a_file_and_changes_no_bit(monkeypatch):
    rates = draw_prices(monkeypatch, 0)
    rates["out file"] = rates["in file"] = 1e11  # a busy disk leads to other plans
    model, x = make(), torch.randn(4096, 256)
    plain = gradients(model, x)
    model.zero_grad()
    whole = er.peak(lambda: model(x).square().mean().backward())
    model.zero_grad()
    budget = int(0.6 * whole) + sum(p.nbytes for p in model.parameters())
    er.fit(model, budget=budget, exact=True, offload="file", solver="delta")
    for _ in range(5):
        ours = gradients(model, x)
    before = CLOCK.now()
    ours = gradients(model, x)
    moved = CLOCK.now() - before
    assert moved.nbytes > 0
    assert moved.hidden_fraction is not None
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    model.zero_grad()
    peak = er.peak(lambda: model(x).square().mean().backward())
    assert peak + sum(p.nbytes for p in model.parameters()) <= budget
    er.release(model)
