"""Function modes around a forward, and functions of torch that the program has wrapped."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import elbowroom as er

pytestmark = pytest.mark.usefixtures("one_thread")


class Replaces(TorchFunctionMode):
    """Runs another op in place of one."""

    def __init__(self, one: Any, other: Any) -> None:
        super().__init__()
        self.one, self.other = one, other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.one:
            return self.other(args[0])
        return func(*args, **(kwargs or {}))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.GELU(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.LayerNorm(32),
        nn.Linear(32, 8),
    )


def grads(model: nn.Module, context: Any) -> list[Tensor | None]:
    model.zero_grad()
    with context:
        loss = model(torch.linspace(-2, 2, 512).view(32, 16)).square().mean()
    loss.backward()
    return [p.grad for p in model.parameters()]


def equal(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


MODES = [
    Replaces(F.gelu, F.silu),
    Replaces(F.relu, F.gelu),
    Replaces(F.relu, lambda x: F.relu(x) * 1.5),
    Replaces(F.layer_norm, torch.tanh),
    Replaces(torch.Tensor.square, torch.exp),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("knows", [False, True])
def test_a_mode_around_that_runs_another_op(mode, knows):
    """knows: the step was replayed without the mode before."""
    model, make = net(), lambda: er.saving(min_nbytes=0)
    plain = grads(model, contextlib.nullcontext())
    for _ in range(3 if knows else 0):
        assert equal(grads(model, make()), plain)
    for _ in range(3):
        with mode:
            wanted = grads(model, contextlib.nullcontext())
            assert equal(grads(model, make()), wanted)
    assert equal(grads(model, make()), plain)


@pytest.mark.parametrize("name", ["gelu", "relu", "layer_norm", "linear"])
def test_a_function_that_the_program_has_wrapped_runs_once(name, monkeypatch):
    """As profilers wrap them, with an effect on the result."""
    model, make, inner = net(), lambda: er.saving(min_nbytes=0), getattr(F, name)
    for _ in range(3):
        grads(model, make())
    monkeypatch.setattr(F, name, lambda *args, **kwargs: inner(*args, **kwargs) * 1.25)
    wanted = grads(model, contextlib.nullcontext())
    for _ in range(3):
        assert equal(grads(model, make()), wanted)


def test_a_function_that_chooses_another_by_an_argument_is_none_that_was_wrapped():
    pool, x = nn.MaxPool2d(2), torch.randn(4, 2, 8, 8, requires_grad=True)
    with er.saving(min_nbytes=0) as saved:
        pool(x * 1).sum().backward()
    assert [row.consumer for row in saved.ledger.rows if row.action == "narrow"] == ["max_pool2d"]
