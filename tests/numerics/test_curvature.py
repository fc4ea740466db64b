"""How much of an error a smooth function passes on: predicted from its curve, and drawn."""

import pytest
import torch
from torch.nn import functional as F

from elbowroom.measure.curvature import curvature
from elbowroom.runtime.consumers import Call

INPUTS = {
    "gelu": (F.gelu, (), {}),
    "gelu by tanh": (F.gelu, (), {"approximate": "tanh"}),
    "silu in place": (F.silu, (), {"inplace": True}),
    "softplus": (F.softplus, (2.0,), {}),
    "mish": (F.mish, (), {}),
}
RESULTS = {"tanh": torch.tanh, "sigmoid": torch.sigmoid}


def passed_on(derivative, x):
    """Returns what a drawn error of 1e-5 of the energy of x changes, as `curvature` is."""
    error = torch.randn(x.shape, dtype=x.dtype) * (1e-5 * x.square().mean()).sqrt()
    exact = derivative(x)
    return float((derivative(x + error) - exact).square().sum() / exact.square().sum() / 1e-5)


@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", INPUTS)
def test_what_saves_its_input(name, size):
    torch.manual_seed(0)
    function, args, kwargs = INPUTS[name]
    x = size * torch.randn(200, 100, dtype=torch.float64)
    before = x.clone()

    def derivative(values):
        values = values.clone().requires_grad_()
        out_of_place = {key: value for key, value in kwargs.items() if key != "inplace"}
        function(values, *args, **out_of_place).sum().backward()
        return values.grad

    found = curvature(Call(function, (x, *args), kwargs), x)
    assert float(found) == pytest.approx(passed_on(derivative, x), rel=0.25)
    assert torch.equal(x, before)


@pytest.mark.parametrize("size", [0.1, 1.0])
@pytest.mark.parametrize("name", RESULTS)
def test_what_saves_its_result(name, size):
    torch.manual_seed(0)
    x = size * torch.randn(200, 100, dtype=torch.float64)
    y = RESULTS[name](x)
    derivative = {"tanh": lambda y: 1 - y * y, "sigmoid": lambda y: y * (1 - y)}[name]
    found = curvature(Call(RESULTS[name], (x,), {}), y)
    assert float(found) == pytest.approx(passed_on(derivative, y), rel=0.25)


def test_small_values_of_a_gelu_are_nearly_on_a_line():
    x = torch.linspace(-0.1, 0.1, 1000)
    assert float(curvature(Call(F.gelu, (x,), {}), x)) < 0.05
    assert float(curvature(Call(F.gelu, (10 * x,), {}), 10 * x)) > 0.3


def test_what_is_not_known_is_none():
    x = torch.randn(10)
    assert curvature(Call(torch.cumsum, (x, 0), {}), x) is None
    assert curvature(Call(F.gelu, (x,), {}), x > 0) is None
    assert curvature(Call(F.gelu, (x[:0],), {}), x[:0]) is None
    assert float(curvature(Call(F.gelu, (0 * x,), {}), 0 * x)) == 0
