"""Products and casts are rebuilt from their factors, to the bit."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class Scan(nn.Module):
    """A selective scan over time: decay and input of all steps at once, then a loop over them."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.rate = nn.Parameter(-torch.rand(16, 8))

    def forward(self, x):
        h = self.into(x)
        step = nn.functional.softplus(h)
        decay = torch.exp(self.rate[None, None] * step[..., None])
        given = (step[..., None] * h[:, :, None, :8]) * h[..., None]
        state, outs = torch.zeros_like(decay[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + given[:, t]
            outs.append((state @ h[:, t, :8, None])[..., 0])
        return self.out(torch.stack(outs, 1) * h.sigmoid()).square().mean()


class Made(TorchDispatchMode):
    """Elements that each op makes."""

    def __init__(self):
        super().__init__()
        self.numel = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel[func.overloadpacket] += out.numel()
        return out


def test_a_loop_does_not_make_the_whole_sequence_again_for_each_of_its_steps():
    torch.manual_seed(1)
    net, x = Scan(), torch.randn(4, 48, 16)

    def run(policy):
        for _ in range(2):  # the second one follows the first
            with Made() as made:
                with er.saving(policy, min_nbytes=0) as saved:
                    loss = net(x)
                found = torch.autograd.grad(loss, list(net.parameters()))
        return found, made.numel, saved.ledger

    plain, plainly, before = run("keep")
    exact, again, after = run("exact")
    assert all(map(torch.equal, exact, plain))
    assert after.after_nbytes < 0.7 * before.after_nbytes
    aten = torch.ops.aten
    assert again[aten.exp] <= 3 * plainly[aten.exp]  # once for the states, once for the decay
    assert again[aten.mul] <= 2 * plainly[aten.mul]
