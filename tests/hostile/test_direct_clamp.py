"""Clamp on a bit an element: torch's own gradient, and no code is kept away from what it reads."""

from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.runtime.direct.clamp import _comparisons
from programs import looking

WAYS = {
    "both": lambda x: x.clamp(-0.5, 0.5),
    "least": lambda x: torch.clamp(x, min=-0.5),
    "most": lambda x: torch.clip(x, max=0.5),
    "clamp_min": lambda x: x.clamp_min(0.25),
    "clamp_max": lambda x: torch.clamp_max(x, max=0.25),
    "whole numbers": lambda x: x.clamp(0, 1),
    "crossed": lambda x: x.clamp(0.5, -0.5),
    "keyword": lambda x: torch.clamp(input=x, min=0, max=1),
}


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-1, 1) * torch.sigmoid(x)


def drawn(dtype: torch.dtype) -> Tensor:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, :8] = torch.tensor([0.5, -0.5, 0.25, 0.0, -0.0, float("nan"), float("inf"), 1.0])
    return x


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_that_of_torch(way, dtype, strided):
    start, grad = drawn(dtype), drawn(dtype).t()

    def gradient(context) -> tuple[Tensor, Tensor]:
        leaf = start.clone().requires_grad_()
        with context:
            x = leaf[:, ::2] if strided else leaf * 1
            out = WAYS[way](x)
        out.backward(grad[:, ::2] if strided else grad)
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    plain = gradient(nullcontext())
    for context in (er.saving("dither", bits=2, min_nbytes=0), er.saving(min_nbytes=0)):
        for one, other in zip(gradient(context), plain, strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
            assert one.stride() == other.stride()


def test_what_it_reads_may_be_a_code():
    w, x = torch.randn(64, 64, requires_grad=True), torch.randn(256, 64)
    with looking("dither", levels=16, min_nbytes=0) as saved:
        y = torch.nn.functional.layer_norm(x @ w, (64,)).clamp(-1, 1)
        loss = (y @ w).square().sum()
    rows = {(row.consumer, row.action) for row in saved.ledger.rows if row.before_nbytes > 8192}
    assert ("clamp", "bitmask") in rows
    assert ("layer_norm", "dither") in rows
    assert ("layer_norm", "keep") not in rows
    loss.backward()


def test_a_limit_that_is_a_tensor_is_torchs():
    x = torch.randn(64, 64, requires_grad=True)
    limit = torch.zeros(64, requires_grad=True)
    with er.saving("dither", bits=2, min_nbytes=0):
        out = (x * 1).clamp(min=limit)
    assert out.grad_fn is not None
    assert out.grad_fn.name().startswith("ClampBackward")
    out.sum().backward()
    assert limit.grad is not None


def test_second_derivatives_and_second_backwards():
    x = torch.randn(64, 64, requires_grad=True)
    with er.saving("dither", bits=2, min_nbytes=0):
        out = (x * 1).clamp(-1, 1).sum()
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    assert torch.equal(torch.autograd.grad(out, x)[0], first)


@pytest.mark.parametrize("exact", [True, None])
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_inside_a_budget(exact, share):
    """A fitted model clamps, learns and follows its plan."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 512), Clamped(), nn.Linear(512, 128), Clamped())
    x = torch.randn(1024, 128)

    def step() -> None:
        net(x).square().mean().backward()
        net.zero_grad()

    held = sum(p.nbytes for p in net.parameters())
    peak = held + er.peak(step)
    er.fit(net, budget=int(share * peak), exact=exact)
    with suppress(er.errors.BudgetTooSmall):
        for _ in range(4):
            step()
    er.release(net)


def test_the_first_clamp_of_a_process_may_stand_in_a_checkpoint():
    """What a trial of torch's gradient saves is not the checkpoint's."""
    _comparisons.cache_clear()
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 64), torch.randn(512, 64, requires_grad=True)

    def step(context):
        layer.zero_grad()
        with context:
            made = checkpoint(lambda x: layer(x).clamp(-0.5, 0.5), x, use_reentrant=False)
            loss = made.square().mean()
        loss.backward()
        return layer.weight.grad

    assert torch.equal(step(er.saving()), step(nullcontext()))
