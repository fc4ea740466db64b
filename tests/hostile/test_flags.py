"""Ops whose flags decide what their backward reads."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import elbowroom as er

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
@pytest.mark.parametrize("divide", [torch.div, torch.divide, Tensor.div])
@pytest.mark.parametrize("by", ["tensor", "row", "number"])
def test_a_quotient_is_read_unless_it_is_rounded(mode, divide, by):
    """One node of autograd is that of all modes, of which None rounds nothing."""

    def grads(step: int, context: Any) -> list[Tensor]:
        torch.manual_seed(step)
        x, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        with context:
            h = torch.nn.functional.linear(x, weight)
            length = {"tensor": h.exp(), "row": h.exp().sum(-1, keepdim=True), "number": 1.7}[by]
            loss = (divide(h, length, rounding_mode=mode) * h).sum()
        return list(torch.autograd.grad(loss, [x, weight]))

    for step in range(3):  # examined, and replayed
        plain = grads(step, contextlib.nullcontext())
        got = grads(step, er.saving(min_nbytes=0))
        assert all(map(torch.equal, got, plain))
