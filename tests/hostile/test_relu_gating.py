"""Whether all of a norm's gradient comes through one ReLU: who is taken for it, and who is not.

A policy with another codec for each answer shows which was given, in the ledger.
"""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.codecs import Comet, Dither, Group, Sided
from elbowroom.errors import RestoreError
from elbowroom.plan import Encode, Exact, Keep, Need
from programs import looking

NONE, MASK, GATED, SUM = "dither", "sided", "group", "comet"


pytestmark = pytest.mark.usefixtures("one_thread")


def asking(site: Any) -> Any:
    exact = Exact()(site)
    if site.need is not Need.LOSSY or site.consumer != "batch_norm":
        return exact if not isinstance(exact, Keep) else Keep("not asked")
    fine = Sided(256, 256), Group(bits=8), Comet(bound=1e-3)
    return Encode(Dither(levels=256), site.facts, *fine)


class Block(nn.Module):
    """conv, norm, then what `after` makes of the norm's output, conv."""

    def __init__(self, after: Any, channels_last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.branch, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.other = nn.BatchNorm2d(4)
        self.after = after
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Nothing but `after` holds the norm's output."""
        made: Tensor = self.two(self.after(self, self.norm(self.one(x)), x)).square().mean()
        return made


def images() -> Tensor:
    """2,048 elements a channel: as many as codes that are shared by 16 need."""
    return torch.randn(32, 4, 8, 8, generator=torch.Generator().manual_seed(5))


def gradients(net: nn.Module, x: Tensor, context: Any) -> list[Tensor]:
    net.zero_grad()
    with context:
        loss = net(x)
    loss.backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def error(got: list[Tensor], exact: list[Tensor]) -> float:
    wrong = sum((a - b).double().square().sum() for a, b in zip(got, exact, strict=True))
    return float(wrong / sum(b.double().square().sum() for b in exact))


def kept(held: list[Tensor], h: Tensor) -> Tensor:
    held[:] = [h]
    return F.relu(h)


class Doubled(torch.autograd.Function):
    """Reads its input where Python does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def hooked(h: Tensor) -> Tensor:
    h.register_hook(lambda g: g + 1)
    return F.relu(h)


def into(x: Tensor, h: Tensor) -> Tensor:
    x = x * 1
    x += h
    return F.relu(x, inplace=True)


def drop_in_place(h: Tensor) -> Tensor:
    h.mul_(2)
    return F.relu(h)


HELD: list[Tensor] = []
AFTER: dict[str, tuple[Any, str]] = {
    "relu": (lambda net, h, x: F.relu(h), GATED),
    "relu in place": (lambda net, h, x: F.relu(h, inplace=True), GATED),
    "relu method": (lambda net, h, x: h.relu(), GATED),
    "relu_ method": (lambda net, h, x: h.relu_(), GATED),
    "its metadata are asked for": (lambda net, h, x: F.relu(h) if h.dim() == 4 else x, GATED),
    "what came of it is read twice": (lambda net, h, x: (lambda y: y + y.exp())(h.relu_()), GATED),
    "a branch between": (lambda net, h, x: (net.branch(x), h.relu_())[1], GATED),
    "the user keeps it": (lambda net, h, x: kept(HELD, h), MASK),
    "read again behind": (lambda net, h, x: F.relu(h) + h, MASK),
    "two relus": (lambda net, h, x: F.relu(h) + torch.relu(h), MASK),
    "read before, for nothing": (lambda net, h, x: (h + 1, F.relu(h))[1], MASK),
    "read before": (lambda net, h, x: (lambda y: F.relu(h) + y)(h + 1), MASK),
    "a hook on it": (lambda net, h, x: hooked(h), MASK),
    "detached from it": (lambda net, h, x: F.relu(h) + h.detach(), MASK),
    "a view of it": (lambda net, h, x: (h[0], F.relu(h))[1], MASK),
    "saved before": (lambda net, h, x: F.silu(h) + F.relu(h), NONE),
    "changed before": (lambda net, h, x: drop_in_place(h), NONE),
    "no relu": (lambda net, h, x: h, NONE),
    "leaky": (lambda net, h, x: F.leaky_relu(h), NONE),
    "sum": (lambda net, h, x: F.relu(h + x), SUM),
    "sum from the right": (lambda net, h, x: F.relu(x + h), SUM),
    "sum in place": (lambda net, h, x: F.relu(h.add_(x), inplace=True), SUM),
    "sum into the other": (lambda net, h, x: into(x, h), SUM),
    "difference": (lambda net, h, x: F.relu(x - h, inplace=True), SUM),
    "sum of three": (lambda net, h, x: F.relu(h + x + x * 2), SUM),
    "sum with a number": (lambda net, h, x: F.relu(h + 0.5), SUM),
    "sum with itself": (lambda net, h, x: F.relu(h + h), SUM),
    "sum with a branch": (lambda net, h, x: F.relu(h + net.branch(x)), SUM),
    "sum with another norm": (lambda net, h, x: F.relu(h + net.other(net.branch(x))), SUM),
    "sum read again": (lambda net, h, x: (lambda s: F.relu(s) + s)(h + x), NONE),
    "sum, then what it is of": (lambda net, h, x: F.relu(h + x) + h, NONE),
    "sum broadcast": (lambda net, h, x: F.relu(h + x[None].expand(2, -1, -1, -1, -1))[0], NONE),
    "sum of a part": (lambda net, h, x: F.relu(h[:, :2] + x[:, :2]).repeat(1, 2, 1, 1), NONE),
    "sum, then silu": (lambda net, h, x: F.silu(h + x), NONE),
    "sum times a gate": (lambda net, h, x: F.relu((h + x) * x.sigmoid()), NONE),
}


@pytest.mark.parametrize(("after", "expected"), AFTER.values(), ids=AFTER.keys())
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_who_is_taken_for_gated(after, expected, channels_last):
    net, x = Block(after, channels_last), images()
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    exact = gradients(net, x, contextlib.nullcontext())
    for _ in range(2):  # numba keeps what it compiles for alive
        saved = looking(asking, min_nbytes=0, seed=1)
        near = gradients(net, x, saved)
        HELD.clear()
    rows = [row for row in saved.ledger.rows if row.consumer == "batch_norm"]
    found = {row.action for row in rows if row.before_nbytes > 200 * row.count}
    assert found == {expected}
    assert error(near, exact) < 1e-3  # all of these codes are fine
    assert saved.ledger.held_nbytes == 0
    assert not saved._serving.waiting


def bias2_and_error(net: nn.Module, x: Tensor, seeds: int, **fields: Any) -> tuple[float, float]:
    """|mean error|^2 less what so many seeds leave of it, and the error of one."""
    exact = torch.cat([g.flatten() for g in gradients(net, x, contextlib.nullcontext())])
    total, each = torch.zeros_like(exact), 0.0
    for seed in range(seeds):
        got = gradients(net, x, er.saving("lean", min_nbytes=0, seed=seed, **fields))
        off = torch.cat([g.flatten() for g in got]) - exact
        total += off
        each += float(off.square().sum()) / seeds
    mean2 = float((total / seeds).square().sum())
    scale = float(exact.square().sum())
    return (mean2 - (each - mean2) / (seeds - 1)) / scale, each / scale


@pytest.mark.parametrize("name", ["relu in place", "sum in place", "sum with another norm"])
def test_what_is_gated_is_unbiased(name):
    net, x = Block(AFTER[name][0]), images()
    bias2, each = bias2_and_error(net, x, 60)
    assert each < 0.3
    assert abs(bias2) < 0.1 * each


def test_a_reader_that_python_does_not_see_makes_it_noisier_and_not_wrong():
    net, x = Block(lambda net, h, x: Doubled.apply(h) + F.relu(h, inplace=True)), images()
    rough, fine = bias2_and_error(net, x, 80), bias2_and_error(net, x, 80, fold=1)
    assert rough[1] > fine[1]
    assert abs(rough[0]) < 0.1 * rough[1]


def test_a_second_reader_of_the_norms_input_gets_a_code_of_its_own():
    """Its gradient is as near as if there were no rough code."""

    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x)
            y = F.relu(self.norm(h), inplace=True)
            made: Tensor = self.two(y).square().mean() + self.branch(h).square().mean()
            return made

    net, x, errors = Twice(None), images(), {}
    exact = gradients(net, x, contextlib.nullcontext())
    names = [name for name, _ in net.named_parameters() if not name.startswith("other")]
    at = names.index("branch.weight")
    for fold in (1, 16):
        saved = er.saving("lean", min_nbytes=0, seed=1, upper=256, lower=256, plain=256, fold=fold)
        got = gradients(net, x, saved)
        errors[fold] = error(got[at : at + 1], exact[at : at + 1])
    assert errors[16] < 1e-4
    assert errors[1] < 1e-4


@pytest.mark.parametrize("name", ["relu in place", "sum in place"])
def test_a_gradient_of_a_gradient_is_refused(name):
    """It would be off by several times its size."""
    net, x = Block(AFTER[name][0]), images().requires_grad_()
    with er.saving("lean", min_nbytes=0):
        loss = net(x)
    with pytest.raises(RestoreError, match=r"er\.saving\('lean', fold=1\) stores a finer one"):
        torch.autograd.grad(loss, x, create_graph=True)
    with er.saving("lean", min_nbytes=0, fold=1):
        loss = net(x)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    g.square().sum().backward()


def test_a_branch_that_saves_much_is_not_waited_for_longer_than_a_few_ops():
    def long_branch(net: Block, h: Tensor, x: Tensor) -> Tensor:
        y = x
        for _ in range(8):
            y = net.branch(y).exp()
        return F.relu(h + y * 1e-3)

    net, saved = Block(long_branch), er.saving(asking, min_nbytes=0, seed=1)
    gradients(net, images(), saved)
    assert "comet" not in {row.action for row in saved.ledger.rows}
