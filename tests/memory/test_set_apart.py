"""What a plan holds by a code of its own has one, also where the runtime could rebuild it."""

import importlib
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.plan.make import plain_peak
from elbowroom.plan.plan import Plan

coarse = importlib.import_module("elbowroom.plan.coarse")
MIN_NBYTES = 4096


def net() -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(8))


def step(weights: nn.ParameterList, context: object) -> None:
    torch.manual_seed(1)
    x = torch.randn(256, 64)
    with context:
        for weight in weights:
            x = x + F.gelu(F.linear(F.layer_norm(x, (64,)), weight)) * 0.3
        loss = x.square().mean()
    loss.backward()
    for weight in weights:
        weight.grad = None


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """All that could be rebuilt from codes is set apart, as after four rounds."""
    first = []

    def all_made(profile, built, choice):
        first.append(built)
        made = (i for i, storage in enumerate(profile.storages) if storage.made_of)
        return frozenset(made) if len(first) == 1 else frozenset()

    monkeypatch.setattr(coarse, "made_of_coarse", all_made)
    weights = net()
    profile = er.measure(lambda: step(weights, nullcontext()), min_nbytes=MIN_NBYTES)
    budget = profile.static + int(0.4 * (plain_peak(profile) - profile.static))
    return er.plan(profile, budget=budget, exact=False, recompute=False)


def test_codes_are_held_as_the_plan_says(plan: Plan) -> None:
    apart = [known for known in plan.sites.values() if known.apart]
    assert any(known.preset != "keep" for known in apart)
    said = [line.held for line in plan.lines if line.action.startswith(("dither", "group"))]
    following = er.following(plan, min_nbytes=MIN_NBYTES)
    step(net(), following)
    held = [row for row in following.ledger.rows if row.action.startswith(("dither", "group"))]
    assert sum(row.count for row in held) == len(said)
    assert sum(row.after_nbytes for row in held) == sum(said)
