"""What is divided by has a code whose error is a share of each element: gradients of any scale."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.plan import Action, Encode, Keep, Need, Site

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH = 512, 96


class Net(nn.Module):
    """Two maps with a function between them, of values that span ten powers of ten."""

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.form, self.last = nn.Linear(32, WIDTH), form, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.logspace(-5, 5, WIDTH)
        return self.last(self.form(F.softplus(self.first(x)) * scales) / (1 + scales))


def gradient(net: nn.Module, around: Any) -> Tensor:
    net.zero_grad()
    x, target = torch.randn(2, ROWS, 32, generator=torch.Generator().manual_seed(1)).unbind()
    with around:
        loss = F.mse_loss(net(x), target[:, :4])
    loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


SEGMENTS = torch.randint(0, 40, (ROWS,), generator=torch.Generator().manual_seed(2))


def softmax_by_hand(x: Tensor) -> Tensor:
    """As over the edges of a graph, without a maximum that is subtracted."""
    y = x.log().exp()
    sums = torch.zeros(40, WIDTH).scatter_add(0, SEGMENTS[:, None].expand(-1, WIDTH), y)
    return y / (sums + 1e-16).index_select(0, SEGMENTS)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "quotient": lambda x: x.roll(1, 0) / x,
    "root": lambda x: x**0.3,
    "power": lambda x: (1 + x) ** -1.5,
    "softmax": softmax_by_hand,
}


@pytest.mark.parametrize("name", FORMS)
def test_errors_are_a_share_of_each_element(name: str) -> None:
    net = Net(FORMS[name])
    true = gradient(net, nullcontext())
    context = er.saving("dither", levels=256, min_nbytes=0, seed=0)
    error2 = float((gradient(net, context) - true).square().sum())
    assert error2 <= 0.01 * float(true.square().sum())
    assert any(row.action == "cast" for row in context.ledger.rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_stay_exact(dtype: torch.dtype) -> None:
    x = torch.rand(64, 64, dtype=dtype).add(1).requires_grad_()
    with er.saving("dither", levels=4, min_nbytes=0) as saved:
        (x * 1).log().sum().backward()
    assert torch.equal(x.grad, 1 / x.detach())
    assert {row.action for row in saved.ledger.rows if row.consumer == "log"} == {"keep"}


def test_exact_contexts_keep_what_is_divided_by() -> None:
    net = Net(torch.log)
    assert torch.equal(gradient(net, er.saving(min_nbytes=0)), gradient(net, nullcontext()))


def test_a_policy_that_knows_nothing_of_it_has_it_too() -> None:
    class Coarse:
        exact = False

        def __call__(self, site: Site) -> Action:
            return Encode(er.codec("dither", levels=4)) if site.need is Need.LOSSY else Keep("")

    net = Net(torch.log)
    true = gradient(net, nullcontext())
    context = er.saving(Coarse(), min_nbytes=0, seed=0)
    gradient(net, context)
    assert {r.action for r in context.ledger.rows if r.consumer == "log"} == {"cast"}
    assert bool(true.isfinite().all())


class Quotients(nn.Module):
    """Layers with quotients, roots and logarithms of a large map between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in self.layers:
            z = F.softplus(layer(y))
            y = (z + 0.1).log() + (1 + z.square()).sqrt() / (z + 0.5)
        return self.last(y)


def step(net: nn.Module) -> Tensor:
    x, target = torch.randn(2, 4096, 32, generator=torch.Generator().manual_seed(1)).unbind()
    net.zero_grad()
    F.mse_loss(net(x), target[:, :4]).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


@pytest.mark.parametrize("noise", [None, 0.1])
def test_plans_hold_what_is_divided_by_in_16_bits(noise: float | None) -> None:
    net = Quotients()
    true, peak = step(net), er.peak(lambda: step(net))
    net = er.fit(net, budget=round(0.5 * peak), noise=noise)
    for _ in range(12):
        made = step(net)
    summary = er.summary(net)
    assert "cast" in str(summary)
    assert summary.last_nbytes <= 0.5 * peak
    assert float((made - true).square().sum()) <= 1e-3 * float(true.square().sum())


def test_the_same_budget_is_held_exactly_where_nothing_is_divided() -> None:
    """An exact fit keeps them, and what it rebuilds has the bits of plain autograd."""
    net = Quotients()
    true, peak = step(net), er.peak(lambda: step(net))
    net = er.fit(net, budget=round(0.75 * peak), exact=True)
    assert all(torch.equal(step(net), true) for _ in range(8))


def test_a_plan_watches_what_is_divided_by_rows_that_are_kept() -> None:
    """What is made of exact tensors has no code whose noise could be measured."""
    torch.manual_seed(0)
    layers, x = nn.ModuleList(nn.Linear(64, 64) for _ in range(10)), torch.randn(1024, 64)
    net = nn.Module()
    net.layers = layers

    def forward(y: Tensor) -> Tensor:
        for layer in layers:
            h = layer(y)
            y = F.cosine_similarity(h.unsqueeze(1), h.roll(1, 0).unsqueeze(1), dim=-1) * h
        return y

    net.forward = forward

    def run() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    run()
    peak = er.peak(run)
    for share in (0.55, 0.5):
        er.fit(net, budget=round(share * peak) + 2 * sum(p.nbytes for p in net.parameters()))
        for _ in range(5):
            run()
        er.release(net)
