"""Activations whose inputs are kept, beside ops that are rebuilt from their results."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import elbowroom as er

pytestmark = pytest.mark.usefixtures("one_thread")
ACTIVATIONS = [F.leaky_relu, F.relu6, F.relu, lambda x: F.hardtanh(x, 0.0, 6.0)]
READS = [torch.square, F.gelu]  # the input of the activation, too
NEXT = [
    *(lambda y: y * 1.5, torch.neg, F.gelu, lambda y: y + 1),
    lambda y: y.t().contiguous().t() * 2,
]
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "mish": lambda x: F.mish(x, True),
    "elu": lambda x: F.elu(x, 1.0, True),
    "selu": lambda x: F.selu(x, inplace=True),
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "sigmoid": lambda x: x.sigmoid_(),
    "mul": lambda x: x.mul_(1.5),
}


def grads(step: int, loss_of: Callable[..., Tensor], context: Any) -> list[Tensor]:
    torch.manual_seed(step)
    first, last = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    with context:
        loss = loss_of(F.linear(torch.randn(16, 8), first), last)
    return list(torch.autograd.grad(loss, [first, last]))


def check(loss_of: Callable[..., Tensor]) -> None:
    for step in range(3):  # examined, and replayed
        plain = grads(step, loss_of, contextlib.nullcontext())
        got = grads(step, loss_of, er.saving(min_nbytes=0))
        assert all(map(torch.equal, got, plain))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("then", NEXT)
def test_what_is_rebuilt_from_an_activation_does_not_start_from_its_input(activation, reads, then):
    """The slot of the input has the bits of the activation, and keeps the input for another op."""

    def loss_of(h: Tensor, last: Tensor) -> Tensor:
        y, read = activation(h), reads(h)
        return F.linear(then(y), last).sigmoid().sum() + read.sum()

    check(loss_of)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("before", [torch.tanh, F.leaky_relu, lambda x: x * 1.5])
def test_a_function_that_changes_its_input_is_run_again_on_a_copy(change, before):
    def loss_of(h: Tensor, last: Tensor) -> Tensor:
        square, y = h.square(), before(h)
        read = y.square().detach()
        y = CHANGES[change](y * 1 if before is torch.tanh else y)
        return (F.linear(y, last).sigmoid() * y).sum() + square.sum() + read.sum()

    check(loss_of)
