"""Recipes that start from what is saved later, from a linear layer, from a user's own function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.producers import products

_STEPS = 4
_D = 64
Net = Callable[[Tensor, int], Tensor]  # input, number of the step


def steps(
    run: Net, wanted: list[Tensor], context: Callable[[], Any] | None = None
) -> tuple[list[list[Tensor]], list[Ledger]]:
    """The gradients of some steps, and their ledgers."""
    found, ledgers = [], []
    for step in range(_STEPS):
        torch.manual_seed(step)
        x = torch.randn(32, 16, _D)
        if context is None:
            out = run(x, step)
        else:
            with context() as saved:
                out = run(x, step)
            ledgers.append(saved.ledger)
        found.append(list(torch.autograd.grad(out, wanted)))
    return found, ledgers


def check(run: Net, net: nn.Module) -> list[Ledger]:
    """The ledgers of an exact context, which must have plain's bits in each step."""
    wanted = list(net.parameters())
    plain, _ = steps(run, wanted)
    ours, ledgers = steps(run, wanted, lambda: er.saving(min_nbytes=0))
    for one, other in zip(plain, ours, strict=True):
        assert all(map(torch.equal, one, other))
    return ledgers


def made_again(ledger: Ledger, consumer: str) -> int:
    """How many tensors an op has saved first that are rebuilt."""
    rows = [row for row in ledger.rows if row.action == "rebuild" and row.consumer == consumer]
    return sum(row.count for row in rows)


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_D, _D), nn.Linear(_D, _D))


def test_a_result_is_made_of_what_a_later_op_saves(net: nn.Sequential) -> None:
    def run(x: Tensor, step: int) -> Tensor:
        h = net[0](x)
        return net[1](h * torch.sigmoid(1.702 * h)).square().mean()

    for ledger in check(run, net):
        assert made_again(ledger, "sigmoid") == 1


def test_an_operand_that_comes_before_its_source_is_made_again(net: nn.Sequential) -> None:
    def run(x: Tensor, step: int) -> Tensor:
        h = net[0](x)
        return net[1](0.5 * h * (1 + torch.tanh(h + 0.04 * h.pow(3)))).square().mean()

    assert all(made_again(ledger, "mul") >= 1 for ledger in check(run, net))


class Passed(torch.autograd.Function):
    """A function that no script sees, so that nobody has noted what it makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@pytest.mark.parametrize("made", ["op", "function", "leaf"])
@pytest.mark.parametrize("changes", ["nothing", "source", "order", "in place"])
def test_a_later_step_may_make_it_of_something_else(
    net: nn.Sequential, made: str, changes: str
) -> None:
    def run(x: Tensor, step: int) -> Tensor:
        g, h = net[0](x), net[1](x)
        if made == "function":
            g, h = Passed.apply(g), Passed.apply(h)  # type: ignore[no-untyped-call]
        elif made == "leaf":
            g, h = (one.detach().requires_grad_() for one in (g, h))
        is_changed = step >= 2
        half = 0.5 * (g if changes == "source" and is_changed else h)
        if changes == "in place" and is_changed and made == "op":
            h = h.mul_(3)
        if changes == "order" and is_changed:
            g.pow(3)
        y = half * torch.tanh(h.pow(3)) + h + g
        return (y.mean(0) * net[0](x).mean() + net[1](x)).square().mean()

    check(run, net)


class ByHand(torch.autograd.Function):
    """The GELU of a library, as its forward is written; `spoilt`: memory is written to unseen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spoilt: bool) -> Tensor:
        ctx.save_for_backward(x)
        y = x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))
        if spoilt:
            y.detach().numpy()[...] += 1
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.tanh(x), None


@pytest.mark.parametrize("spoilt", [False, True])
def test_results_of_a_function_of_the_users(
    net: nn.Sequential, spoilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_LONG", {})  # a tanh would be held in so small a net

    def run(x: Tensor, step: int) -> Tensor:
        h = net[0](x)
        cube = h.pow(3)  # saves h, which no call does that Python sees if the function is first
        y = ByHand.apply(h, spoilt)  # type: ignore[no-untyped-call]
        return net[1](y * cube).square().mean()

    for ledger in check(run, net):
        assert made_again(ledger, "mul") == (1 if spoilt else 2)  # the cube, and y


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("amp", [True, False])
def test_log_probabilities_are_made_of_a_linear_layer(bias: bool, amp: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(_D), nn.Linear(_D, _D), nn.Tanh()) for _ in range(24)]
    net = nn.Sequential(*layers, nn.Linear(_D, 200, bias=bias))

    def run(x: Tensor, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits = net(x).float().view(-1, 200)
            return F.cross_entropy(logits, torch.arange(len(logits)) % 200)

    # Under the norm's inputs it is enough without: 24 of them take more than the logits.
    check(run, net)


def test_a_wide_head_over_what_cannot_be_made_again() -> None:
    torch.manual_seed(0)
    body = [nn.Linear(_D, 4 * _D), nn.ReLU(), nn.Linear(4 * _D, _D), nn.ReLU()]
    net = nn.Sequential(*body, nn.Linear(_D, 100))

    def run(x: Tensor, step: int) -> Tensor:
        logits = net(x).view(-1, 100)
        return F.cross_entropy(logits, torch.arange(len(logits)) % 100)

    for ledger in check(run, net):
        assert made_again(ledger, "cross_entropy") == 1


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("amp", [True, False])
def test_copies_in_order_of_one_tensor_are_held_once(changes: bool, amp: bool) -> None:
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Linear(_D, _D) for _ in range(4))

    def run(x: Tensor, step: int) -> Tensor:
        h, other = net[3](x).transpose(0, 1), net[3](x * 2).transpose(0, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            first = net[0](other if changes and step >= 2 else h)
            return (first.sin() * net[1](h).sin() * net[2](h)).float().square().mean()

    ledgers = check(run, net)
    if not changes and not amp:
        assert all(made_again(ledger, "linear") >= 2 for ledger in ledgers)


def test_joined_and_selected_results_are_made_again(net: nn.Sequential) -> None:
    mask = torch.ones(16, 16).tril().bool()

    def run(x: Tensor, step: int) -> Tensor:
        h = F.layer_norm(net[0](x), (_D,))
        turned = torch.cat([-h[..., _D // 2 :], h[..., : _D // 2]], -1)
        pairs = torch.stack([-h[..., 1::2], h[..., ::2]], -1).flatten(2)
        q, k = h * 0.5 + turned, h + pairs
        logits = torch.where(mask, q @ k.transpose(1, 2), torch.tensor(-1e9))
        filled = (q @ k.transpose(1, 2)).masked_fill(~mask, -1e9)
        mixed = (logits.softmax(-1) + filled.softmax(-1)) @ net[1](h)
        return (mixed.sin() * turned.sin() * pairs.cos()).square().mean()

    check(run, net)


@pytest.mark.parametrize("named", [True, False])
def test_logits_with_a_bias_of_positions(net: nn.Sequential, named: bool) -> None:
    slopes = torch.randn(32, 1, 16)

    def run(x: Tensor, step: int) -> Tensor:
        h = net[0](x)
        q, k = h.sin(), h.cos().transpose(1, 2)
        logits = (
            slopes.baddbmm(batch1=q, batch2=k, beta=0.5, alpha=0.1)
            if named
            else torch.baddbmm(slopes, q, k, alpha=0.1)
        )
        return (logits.softmax(-1) @ net[1](h)).square().mean()

    check(run, net)


@pytest.mark.parametrize("changes", ["item", "view", "relu", "silu"])
def test_a_source_that_changes_in_place_beside_the_loss(net: nn.Sequential, changes: str) -> None:
    """Plain autograd does not mind: who has saved it has no part in the loss."""

    def run(x: Tensor, step: int) -> Tensor:
        h = net[0](x)
        half = 0.5 * h
        h.pow(3).sum()
        y = torch.tanh(half)
        y = half * torch.sigmoid(y)
        if changes == "item":
            h[0] += 1
        elif changes == "view":
            h.view(-1)[0].add_(1)
        elif changes == "relu":
            F.relu(h, True)
        else:
            F.silu(h, inplace=True)
        return net[1](y).square().mean()

    check(run, net)


def test_an_op_that_changes_what_was_saved_before(net: nn.Sequential) -> None:
    def run(x: Tensor, step: int) -> Tensor:
        h = net[0](x)
        F.layer_norm(h, (_D,))  # saves it, and has no part in the loss
        F.silu(h, inplace=True)
        return net[1](h).square().mean()

    check(run, net)
