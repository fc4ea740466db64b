"""Extremes over indices, and PReLU, on a bit an element: torch's own gradients."""

from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from programs import looking

EDGES, NODES, WIDTH = 400, 20, 16
ORDERS = {  # dimension, shape of the result, index
    "rows": (0, (NODES, WIDTH), lambda: torch.randint(NODES, (EDGES, 1)).expand(EDGES, WIDTH)),
    "each": (0, (NODES, WIDTH), lambda: torch.randint(NODES, (EDGES, WIDTH))),
    "last": (-1, (EDGES, 5), lambda: torch.randint(5, (1, WIDTH)).expand(EDGES, WIDTH)),
}


def drawn(*shape: int) -> Tensor:
    """Values of which many are equal, with a NaN and infinities."""
    x = torch.randn(shape).round(decimals=1)
    x.flatten()[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    return x


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("of_self", [False, True])
def test_extremes_have_torchs_gradient(order, reduce, include_self, in_place, of_self):
    torch.manual_seed(0)
    dim, shape, indices = ORDERS[order]
    start, index, grad = drawn(EDGES, WIDTH), indices(), torch.randn(shape)

    def run(context) -> list[Tensor | None]:
        leaf = start.clone().requires_grad_()
        before = torch.zeros(shape, requires_grad=of_self)
        with context:
            into = before * 1 if of_self else before
            scatter = into.scatter_reduce_ if in_place else into.scatter_reduce
            out = scatter(dim, index, leaf * 1, reduce, include_self=include_self)
        assert out.grad_fn is not None
        is_ours = out.grad_fn.name() == "_ExtremesBackward"
        assert is_ours is not isinstance(context, nullcontext)
        out.backward(grad)
        return [out.detach(), leaf.grad, before.grad if of_self else None]

    plain = run(nullcontext())
    for context in (er.saving("dither", bits=2, min_nbytes=0), er.saving(min_nbytes=0)):
        for one, other in zip(run(context), plain, strict=True):
            assert (one is None) is (other is None)
            if one is not None and other is not None:
                assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_what_extremes_compare_may_be_a_code():
    w, x = torch.randn(64, 64, requires_grad=True), torch.randn(2048, 64)
    given = torch.randint(256, (2048, 1))
    with looking("dither", levels=16, min_nbytes=0) as saved:
        index = given.abs()
        y = F.layer_norm(x @ w, (64,))
        most = torch.zeros(256, 64).scatter_reduce_(0, index.expand(-1, 64), y, "amax")
        loss = (most @ w).square().sum()
    held = {(row.consumer, row.action): row.after_nbytes for row in saved.ledger.rows}
    assert held["scatter_reduce_", "bitmask"] == y.numel() // 8 + most.numel() // 8
    assert held["scatter_reduce_", "narrow"] == index.numel()
    assert ("layer_norm", "dither") in held
    loss.backward()


def test_sums_and_products_are_torchs():
    x = torch.randn(64, 8, requires_grad=True)
    index = torch.randint(8, (64, 8))
    with er.saving("dither", bits=2, min_nbytes=0):
        for reduce in ("sum", "mean", "prod"):
            out = torch.ones(8, 8).scatter_reduce(0, index, x * 1, reduce)
            assert out.grad_fn is not None
            assert out.grad_fn.name() == "ScatterReduceBackward0"
        smaller = torch.zeros(8, 8).scatter_reduce(0, index[:32], x * 1, "amax")
    assert smaller.grad_fn is not None
    assert smaller.grad_fn.name() == "ScatterReduceBackward0"


@pytest.mark.parametrize("op", ["scatter_reduce", "prelu"])
def test_second_derivatives_and_second_backwards(op):
    x = torch.randn(64, 64, requires_grad=True)
    slope = torch.full((64,), 0.25, requires_grad=True)
    index = torch.randint(8, (64, 1)).expand(64, 64)
    with er.saving("dither", bits=2, min_nbytes=0):
        if op == "prelu":
            out = F.prelu(x * 1, slope)
        else:
            out = torch.zeros(8, 64).scatter_reduce(0, index, x * 1, "amax")
    total = out.square().sum()
    (first,) = torch.autograd.grad(total, x, create_graph=True)
    assert torch.equal(torch.autograd.grad(total, x, retain_graph=True)[0], first)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.isfinite().all()


@pytest.mark.parametrize("shape", [(64, 16, 6, 6), (256, 16), (32, 16, 5), (512,)])
@pytest.mark.parametrize("slopes", [1, 16])
def test_prelu_has_torchs_gradient(shape, slopes):
    if slopes > 1 and len(shape) < 2:
        pytest.skip("a vector has one slope")
    torch.manual_seed(0)
    start, grad, weight = torch.randn(shape), torch.rand(shape), torch.rand(slopes)
    start.flatten()[:2] = torch.tensor([0.0, -0.0])

    def run(context) -> list[Tensor]:
        x, slope = start.clone().requires_grad_(), weight.clone().requires_grad_()
        with context:
            out = F.prelu(x * 1, slope)
        out.backward(grad)
        assert x.grad is not None
        assert slope.grad is not None
        return [out.detach(), x.grad, slope.grad]

    plain = run(nullcontext())
    coded = run(er.saving("dither", levels=16, min_nbytes=0))
    for one, other in zip(coded[:2], plain[:2], strict=True):
        assert torch.equal(one, other)
    assert torch.allclose(coded[2], plain[2], rtol=0.1, atol=0.1 * float(plain[2].abs().max()))
    for one, other in zip(run(er.saving(min_nbytes=0)), plain, strict=True):
        assert torch.equal(one, other)


def test_a_norm_before_prelu_has_a_code():
    x, slope = torch.randn(8, 16, 16, 16), torch.full((16,), 0.25, requires_grad=True)
    w = torch.randn(16, 16, 3, 3, requires_grad=True)
    with looking("dither", levels=16, min_nbytes=0) as saved:
        y = F.prelu(F.instance_norm(F.conv2d(x, w, padding=1)), slope)
        loss = F.conv2d(y, w, padding=1).square().mean()
    rows = {(row.consumer, row.action) for row in saved.ledger.rows if row.before_nbytes > 32768}
    assert ("instance_norm", "dither") in rows
    assert ("prelu", "keep") not in rows
    loss.backward()


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(64, 64), nn.Linear(64, 64)
        self.act = nn.PReLU()
        self.register_buffer("index", torch.randint(512, (4096, 1)).expand(-1, 64))

    def forward(self, x: Tensor) -> Tensor:
        messages = self.act(self.below(x))
        most = x.new_zeros(512, 64).scatter_reduce_(
            0, self.index, messages, "amax", include_self=False
        )
        return self.above(most)


@pytest.mark.parametrize("exact", [True, None])
def test_inside_a_budget(exact):
    """A fitted model takes extremes, and learns as plain does under exact actions."""
    x = torch.randn(4096, 64)

    def trained(budget: int | None) -> tuple[list[Tensor], nn.Module]:
        torch.manual_seed(0)
        net, losses = Graph(), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if budget is not None:
            er.fit(net, budget=budget, exact=exact, optimizer=optimizer)
        for _ in range(4):
            loss = net(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses, net

    plain, net = trained(None)
    held = sum(p.nbytes for p in net.parameters())
    peak = held + er.peak(lambda: net(x).square().mean().backward())
    with suppress(er.errors.BudgetTooSmall):
        losses, net = trained(int(0.7 * peak))
        assert exact is None or all(map(torch.equal, losses, plain))
        er.release(net)
