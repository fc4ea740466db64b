"""Memory that a forward hands out, and that is changed then without a version."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elbowroom as er

pytestmark = pytest.mark.usefixtures("one_thread")
before: dict[str, Any] = {}


def twice_by_data(x: Tensor) -> None:
    x.data.mul_(1.5)
    x.data.mul_(2)


def by_array(x: Tensor) -> None:
    np.asarray(x)[...] *= 3


# What is done with x before an op reads it, and after that.
WAYS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "data": (lambda x: None, lambda x: x.data.mul_(3)),
    "data twice": (lambda x: None, twice_by_data),
    "data of before": (lambda x: before.update(x=x.data), lambda x: before["x"].mul_(3)),
    "item of data": (lambda x: None, lambda x: x.data.__setitem__(slice(None), 3 * x.data)),
    "view's data": (lambda x: None, lambda x: x.view(-1)[:64].data.mul_(3)),
    "array": (lambda x: None, by_array),
    "array of before": (
        lambda x: before.update(x=x.numpy()),
        lambda x: before["x"].__imul__(3),
    ),
    "dlpack": (lambda x: None, lambda x: torch.from_dlpack(x).mul_(3)),
}


def constant(x: Tensor, change: Callable[[int, Tensor], None]) -> Tensor:
    """A constant that two products read, the second with other values."""
    factor = torch.ones(16, 8)
    change(0, factor)
    y = x * factor
    change(1, factor)
    return (y + x * factor).square()


def changed_before(x: Tensor, change: Callable[[int, Tensor], None]) -> Tensor:
    """The same, at another version than that of its `data`."""
    factor = torch.zeros(16, 8).add_(1)
    change(0, factor)
    y = x * factor
    change(1, factor)
    return (y + x * factor).square()


def hidden(x: Tensor, change: Callable[[int, Tensor], None]) -> Tensor:
    """An activation, saved by an op without a gradient, and changed when others have read it."""
    h = F.linear(x, torch.linspace(-1, 1, 64).view(8, 8))
    scale = F.silu(h).detach()
    change(0, h.detach())
    y = torch.exp(h * -0.1)
    change(1, h.detach())
    return torch.sigmoid(y * 2) * y * scale


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [constant, changed_before, hidden])
def test_what_is_changed_without_a_version_gives_the_bits_of_plain_training(program, way):
    """In the first step, which is examined, and in those that replay it."""

    def grads(step: int, context: Any) -> Tensor:
        torch.manual_seed(step)
        weight, given = torch.randn(8, 8, requires_grad=True), torch.randn(16, 8)

        def change(at: int, x: Tensor) -> None:
            with torch.no_grad():
                WAYS[way][at](x)

        with context:
            loss = program(torch.tanh(given @ weight), change).sum()
        loss.backward()
        return weight.grad

    for step in range(3):
        plain = grads(step, contextlib.nullcontext())
        assert torch.equal(grads(step, er.saving(min_nbytes=0)), plain)
