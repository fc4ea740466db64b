"""Ops whose flags decide what their backward reads."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
            h = F.linear(x, weight)
            length = {"tensor": h.exp(), "row": h.exp().sum(-1, keepdim=True), "number": 1.7}[by]
            loss = (divide(h, length, rounding_mode=mode) * h).sum()
        return list(torch.autograd.grad(loss, [x, weight]))

    for step in range(3):  # examined, and replayed
        plain = grads(step, contextlib.nullcontext())
        got = grads(step, er.saving(min_nbytes=0))
        assert all(map(torch.equal, got, plain))


@pytest.mark.parametrize("dim", [0, -1, None])
@pytest.mark.parametrize("policy", [None, "dither"])
def test_a_tensor_without_dimensions_has_a_length_over_one(dim, policy):
    """torch takes dimension 0 of a tensor that has none."""
    x = torch.randn((), requires_grad=True)
    with er.saving(policy, min_nbytes=0):
        y = x * 1.5
        loss = torch.linalg.vector_norm(y, dim=dim) + F.cosine_similarity(y, y.tanh(), dim=0)
        loss = loss + y.norm(dim=-1) + F.normalize(y, dim=0)
    loss.backward()
    y = (other := x.detach().clone().requires_grad_()) * 1.5
    loss = torch.linalg.vector_norm(y, dim=dim) + F.cosine_similarity(y, y.tanh(), dim=0)
    (loss + y.norm(dim=-1) + F.normalize(y, dim=0)).backward()
    assert torch.equal(x.grad, other.grad)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("include", [True, False])
def test_the_gradient_of_an_extreme_has_the_order_of_torchs(reduce, include):
    """Later ops may compute other bits from another order."""
    index = torch.arange(20).view(10, 2) % 5

    def grads(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        into = torch.randn(10, 2, requires_grad=True)
        src = torch.randn(2, 10, requires_grad=True)
        with context:
            rows = (src * 1.5).t()
            loss = into.scatter_reduce(0, index, rows, reduce, include_self=include).square().sum()
        return list(torch.autograd.grad(loss, [into, rows, src]))

    got, plain = grads(er.saving(min_nbytes=0)), grads(contextlib.nullcontext())
    for one, other in zip(got, plain, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
