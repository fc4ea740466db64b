"""Products and casts are made again from their factors, to the bit."""

import pytest
import torch
from torch import nn

import elbowroom as er


class Product(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.w = nn.Parameter(torch.randn(64))
        self.linear = nn.Linear(64, 64)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


PRODUCTS = {
    "square": lambda m, x: m.linear((h := m.linear(x)) * h),
    "parameter first": lambda m, x: m.linear(m.w * m.linear(x)),
    "parameter last": lambda m, x: m.linear(m.linear(x) * m.w),
    "number": lambda m, x: m.linear(2.5 * m.linear(x).sigmoid()),
    "row factor": lambda m, x: m.linear((h := m.linear(x)) * h.mean(-1, keepdim=True).sigmoid()),
    "small times large": lambda m, x: m.linear((h := m.linear(x))[:1].exp() * h.sigmoid()),
    "views": lambda m, x: m.linear((h := m.linear(x)).t() * h.sin().t()),
    "window": lambda m, x: m.linear((h := m.linear(x)).view(64, 64)[:, ::2].repeat(1, 2) * h),
    "in place after": lambda m, x: m.linear((m.linear(x).sigmoid() * m.linear(x).tanh()).add_(1)),
    "cast up and down": lambda m, x: m.linear((m.linear(x).sigmoid().bfloat16() * 2).float()),
    "dtypes meet": lambda m, x: m.linear(m.linear(x).sigmoid().half().float() * m.linear(x)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_casts_are_rebuilt_to_the_bit(name):
    torch.manual_seed(1)
    net, x = Product(PRODUCTS[name]), torch.randn(64, 64)

    def run(policy):
        with er.saving(policy, min_nbytes=0) as saved:
            loss = net(x * 1.0).square().sum()
        return torch.autograd.grad(loss, list(net.parameters()), allow_unused=True), saved.ledger

    plain, _ = run("keep")
    exact, _ = run("exact")
    for a, b in zip(exact, plain, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_a_parameter_that_changed_before_backward_is_told():
    torch.manual_seed(1)
    net, x = Product(PRODUCTS["parameter first"]), torch.randn(64, 64)
    with er.saving(min_nbytes=0):
        loss = net(x * 1.0).square().sum()
    with torch.no_grad():
        net.w.add_(1)
    with pytest.raises(RuntimeError, match=r"changed|modified"):
        loss.backward()


@pytest.mark.parametrize("step", [lambda h, w: h * w, lambda h, w: torch.nn.functional.gelu(h)])
def test_a_long_chain_is_cut_into_short_ones(step):
    """Else each restore would run all that lies before it, and recursion would end somewhere."""
    torch.manual_seed(1)
    w, x = nn.Parameter(torch.ones(64, 64) + 0.01 * torch.randn(64, 64)), torch.randn(64, 64)

    def run(policy):
        with er.saving(policy, min_nbytes=0) as saved:
            h = x * w
            for _ in range(300):
                h = step(h, w)
        return torch.autograd.grad(h.sum(), w)[0], saved.ledger

    (plain, _), (exact, ledger) = run("keep"), run("exact")
    assert torch.equal(plain, exact)
    kept = sum(row.count for row in ledger.rows if row.action == "keep")
    assert 300 / 10 < kept < 300 / 5
