"""Modules that make their parameters in the first forward."""

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.errors import PlanError
from elbowroom.tools import Discovery


def test_lazy_modules_may_be_initialized_inside_a_context():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    x = torch.randn(2, 3, 8, 8)
    with er.saving(min_nbytes=0):
        loss = model(x).square().sum()
    loss.backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for a, b in zip(ours, model.parameters(), strict=True):
        assert torch.equal(a, b.grad)


def lazy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_fit_asks_for_parameters_that_have_a_size():
    model, optimizer = lazy()
    with pytest.raises(PlanError, match=r"'0\.weight' has no size yet.* once, before er\.fit"):
        er.fit(model, budget="1 GiB", optimizer=optimizer)
    model(torch.zeros(2, 8))
    er.release(er.fit(model, budget="1 GiB", optimizer=optimizer))


def test_a_script_whose_first_step_makes_the_parameters_is_fitted_from_the_second_on():
    found, unmet = [], []
    with Discovery(found.append, unmet=lambda: unmet.append(True)):
        model, optimizer = lazy()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 8)).square().sum().backward()
            optimizer.step()
    assert found[0] is model
    assert not unmet


def test_a_script_that_calls_no_module_after_a_lazy_one_is_told_so():
    unmet = []
    with Discovery(lambda _: None, unmet=lambda: unmet.append(True)):
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        nn.LazyLinear(1)(torch.zeros(2, 2))
        for _ in range(2):
            weight.square().sum().backward()
            optimizer.step()
    assert unmet
