"""The benchmark of states that run: what it compares with what."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn


@pytest.fixture
def running(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("running_states")


def grads(n: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(64, 128, generator=generator)] for _ in range(n)]


@pytest.mark.parametrize("nth", range(5))
def test_float32_beside_itself_has_no_error_and_codes_gather_it(running, nth):
    rule = running.RULES[nth]._replace(formats=("fp32", "coat"))
    made = running.Comparison(rule, [nn.Parameter(torch.zeros(64, 128))])
    for step, g in enumerate(grads(12), 1):
        made.step(g, summed=step > 8, compared=step == 12)
    assert [error.rel_mse for error in made.errors["fp32"].values()] == [0, 0, 0]
    once, several, _ = (error.rel_mse for error in made.errors["coat"].values())
    assert 0 < once < several < 0.1


def test_updates_are_those_of_weights_that_begin_at_zero(running):
    beside = running.Beside(running.RULES[3], "fp32", [nn.Parameter(torch.ones(4, 4))])
    first = [u.clone() for u in beside.update([torch.ones(4, 4)])]
    second = beside.update([torch.ones(4, 4)])
    assert torch.equal(first[0], -torch.ones(4, 4))
    assert torch.allclose(second[0], -1.9 * torch.ones(4, 4))
