"""Checkpoints of the user's: their inputs are coded where the piece that runs again bears it."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.runtime.replay import saving_context

WIDTH = 32


class Block(nn.Module):
    """A residual block of a transformer's kind, with a mask beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, depth: int = 3, **how) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.how = {"use_reentrant": False, **how}

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill_(
            torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, float("-inf")
        )
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, mask, **self.how)
        return x


def gradients(net: nn.Module, context, x: Tensor | None = None) -> list[Tensor]:
    net.zero_grad()
    torch.manual_seed(4)
    x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(1)) if x is None else x
    leaf = x.clone().requires_grad_()
    with context:
        out = net(leaf)
    out.square().sum().backward()  # outside: a square is a product, and would be coded
    return [leaf.grad, *(p.grad.clone() for p in net.parameters())]


def coded(**how):
    return er.saving("dither", bits=2, min_nbytes=0, seed=3, **how)


def rows_of(saved) -> list:
    return [row for row in saved.ledger.rows if row.consumer == "checkpoint"]


def error2(found: list[Tensor], expected: list[Tensor]) -> float:
    off = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    return off / sum(float(b.square().sum()) for b in expected)


def test_inputs_of_blocks_are_coded_and_the_error_is_small():
    net, saved = Net(), coded()
    expected = gradients(net, nullcontext())
    assert 0 < error2(gradients(net, saved), expected) < 0.01
    dithered = [row for row in rows_of(saved) if row.action == "dither"]
    assert sum(row.count for row in dithered) == 3
    assert all(row.after_nbytes < row.before_nbytes / 4 for row in dithered)


def test_a_mask_stays_as_it_is():
    saved = coded()
    gradients(Net(), saved)
    kept = [row for row in rows_of(saved) if row.action == "keep"]
    assert [row.why for row in kept] == ["an input: its owner holds it"]


def test_exact_contexts_give_every_bit():
    net = Net()
    expected = gradients(net, nullcontext())
    for got, wanted in zip(gradients(net, er.saving(min_nbytes=0)), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("net", [Net(), Net(use_reentrant=True)], ids=["new", "old"])
def test_backward_inside_of_the_context(net):
    expected = gradients(net, nullcontext())
    net.zero_grad()
    torch.manual_seed(4)
    x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with coded():
        net(x).square().sum().backward()
    assert error2([x.grad, *(p.grad for p in net.parameters())], expected) < 0.01


def test_the_older_form_is_left_alone():
    net, saved = Net(use_reentrant=True), coded()
    expected = gradients(net, nullcontext())
    for got, wanted in zip(gradients(net, saved)[2:], expected[2:], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert not rows_of(saved)


ROUGH = {
    "log": lambda x: x.square().log(),
    "div": lambda x: 1 / x,
    "sqrt": lambda x: x.abs().sqrt(),
    "nonzero": lambda x: x.flatten()[(x.flatten() > 0).nonzero().squeeze(1)],
    "mask": lambda x: x[x > 0],
    "choice": lambda x: x * F.one_hot(x.argmax(-1), WIDTH),
    "whole": lambda x: x * x.to(torch.int64),
    "power": lambda x: x.pow(-1),
    "topk": lambda x: x.topk(4).values,
    "rsqrt": lambda x: x.square().rsqrt(),
    "a function of the user's": lambda x: Cube.apply(x),
    "a kernel of the user's": lambda x: Filled.apply(x),
    "a choice of what was detached": lambda x: x * F.one_hot(x.detach().argmax(-1), WIDTH),
    "a logarithm of data": lambda x: x * x.data.square().log(),
    "a logarithm of each sample": lambda x: torch.vmap(torch.log)(x.square() + 1),
    "without a gradient": lambda x: x * _logarithm(x),
    "in place, of what was detached": lambda x: (
        x * torch.zeros(WIDTH).copy_(x.detach()[0, 0]).exp()
    ),
}


@torch.no_grad()
def _logarithm(x: Tensor) -> Tensor:
    return x.square().log()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch._foreach_pow([x], 3)[0]

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


class Filled(torch.autograd.Function):
    """Its kernel fills memory that torch gives it, unseen."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        out.numpy()[:] = 1 / x.detach().numpy()
        return out

    @staticmethod
    def backward(ctx, grad):
        return -grad / ctx.saved_tensors[0] ** 2


class Rough(nn.Module):
    def __init__(self, piece) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.piece = nn.Linear(WIDTH, WIDTH), piece

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.piece, self.first(x), use_reentrant=False)


@pytest.mark.parametrize("piece", ROUGH)
def test_pieces_that_may_not_bear_an_error_are_given_their_inputs(piece):
    net, saved = Rough(ROUGH[piece]), coded()
    expected = gradients(net, nullcontext())
    found = gradients(net, saved)
    assert torch.equal(found[0], expected[0])
    assert all(row.action == "keep" for row in rows_of(saved))


SMOOTH = {
    "angles": lambda x: x * (1e4 ** (-torch.arange(WIDTH) / WIDTH)).cos(),
    "a mask": lambda x: x.masked_fill(torch.ones(WIDTH).cumsum(0) > 8, 0.0),
    "a scale": lambda x: x * SCALE.exp(),
}
SCALE = nn.Parameter(torch.zeros(WIDTH))


@pytest.mark.parametrize("piece", SMOOTH)
def test_what_a_piece_makes_of_constants_and_parameters_is_not_held_against_it(piece):
    net, saved = Rough(SMOOTH[piece]), coded()
    gradients(net, saved)
    assert [row.action for row in rows_of(saved)] == ["dither"]


@pytest.mark.parametrize("piece", {**ROUGH, **SMOOTH})
def test_a_profile_says_the_same_of_a_module(piece):
    net = Rough(None)
    net.piece = Piece({**ROUGH, **SMOOTH}[piece])
    net.forward = lambda x: net.piece(net.first(x))  # without a checkpoint
    x = torch.randn(4, 16, WIDTH)
    profile = er.measure(lambda: net(x).square().sum().backward(), min_nbytes=0, warm_up=0)
    assert bool(next(c for c in profile.modules if c.name == "piece").rough) is (piece in ROUGH)


class Piece(nn.Module):
    def __init__(self, func) -> None:
        super().__init__()
        self.forward = func


def test_what_follows_a_piece_is_not_held_against_it():
    """Two checkpoints without an op between them, and a logarithm behind the second."""
    net, saved = Net(depth=2), coded()
    net.zero_grad()
    x = torch.randn(4, 16, WIDTH).requires_grad_()
    with saved:
        loss = net(x).square().log().sum()
    loss.backward()
    assert sum(row.count for row in rows_of(saved) if row.action == "dither") == 2


def test_a_norm_written_in_python_bears_it():
    weight = torch.linspace(0, 2, WIDTH)

    def norm(x: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    net, saved = Rough(norm), coded()
    expected = gradients(net, nullcontext())
    assert error2(gradients(net, saved), expected) < 0.02
    assert [row.action for row in rows_of(saved)] == ["dither"]


def test_paths_that_are_dropped_bear_it():
    def dropped(x: Tensor) -> Tensor:
        kept = x.new_empty((len(x), 1, 1)).bernoulli_(0.5)
        return F.gelu(x) * kept.div_(0.5) + x

    net, saved = Rough(dropped), coded()
    expected = gradients(net, nullcontext())
    assert error2(gradients(net, saved), expected) < 0.02
    assert [row.action for row in rows_of(saved)] == ["dither"]


def test_an_error_inside_of_a_piece_is_the_users():
    def fails(x: Tensor) -> Tensor:
        x.mul(2)
        raise ValueError("mine")

    net = Rough(fails)
    with pytest.raises(ValueError, match="mine"), coded():
        net(torch.randn(4, WIDTH))
    gradients(Net(), coded())


def test_a_piece_inside_of_a_piece_and_backward_twice():
    def outer(x: Tensor) -> Tensor:
        return checkpoint(lambda y: F.gelu(y) * 2, F.gelu(x), use_reentrant=False)

    net = Rough(outer)
    expected = gradients(net, nullcontext())
    assert error2(gradients(net, coded()), expected) < 0.02
    x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with coded():
        loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)


def test_an_input_that_an_exact_op_reads_too_stays():
    def piece(x: Tensor) -> Tensor:
        return F.gelu(x)

    class Twice(Rough):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return checkpoint(piece, y, use_reentrant=False) + y.exp()

    net = Twice(None)
    expected = gradients(net, nullcontext())
    assert error2(gradients(net, coded()), expected) < 0.02


@pytest.mark.parametrize("watched", [{"watch": True}, {"noise": 0.1}])
def test_under_a_watch(watched):
    net = Net()
    for _ in range(3):
        gradients(net, coded(**watched))


def followed(net: nn.Module, steps: int, x: Tensor | None = None, **how) -> list:
    """Gradients of steps; the first is examined, and the others follow it."""
    with seen_following() as seen:
        found = [gradients(net, coded(**how), x) for _ in range(steps)]
    assert [diverged for _, diverged in seen] == [False] * (steps - 1)
    return found


@contextmanager
def seen_following():
    """The script and whether it was left, of all steps that begin to follow one."""
    seen, end = [], saving_context.Following.__exit__

    def leave(self, *error):
        script = self.script
        end(self, *error)
        seen.append((script, self.diverged))

    saving_context.Following.__exit__ = leave
    try:
        yield seen
    finally:
        saving_context.Following.__exit__ = end


@pytest.mark.parametrize("depth", [1, 3])
def test_steps_that_are_followed_code_the_same_with_the_same_noise(depth):
    net = Net(depth)
    one, other, *_ = followed(net, 3)
    assert error2(one, gradients(net, nullcontext())) > 0
    saving_context.forget_all()
    again = gradients(net, coded())
    assert all(map(torch.equal, one, again))
    assert all(map(torch.equal, one, other))  # the seed is the same, and so is its count


def test_a_followed_step_counts_what_one_that_is_looked_at_does():
    net, ledgers = Net(), []
    for _ in range(2):
        saved = coded()
        gradients(net, saved)
        ledgers.append([str(row) for row in rows_of(saved)])
    assert ledgers[0] == ledgers[1]
    assert len(ledgers[0]) >= 1


class Changing(nn.Module):
    """A piece that does another thing when it is told."""

    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.kind == "power":
            return x.square().add(1).pow(self.power)
        if self.kind == "log":
            return x.square().add(1).log()
        return torch.tanh(x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.piece = nn.Linear(WIDTH, WIDTH), Changing()
        self.checkpoints, self.twice, self.detaches = True, False, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.detach() if self.detaches else x
        for _ in range(1 + self.twice):
            x = (
                checkpoint(self.piece, x, use_reentrant=False)
                if self.checkpoints
                else self.piece(x)
            )
        return x


def power(of: float):
    def change(net: Around) -> None:
        net.piece.kind, net.piece.power = "power", of

    return change


def told(**fields):
    def change(net: Around) -> None:
        vars(net).update(fields)

    return change


def logarithm(net: Around) -> None:
    net.piece.kind = "log"


@pytest.mark.parametrize(
    ("before", "change", "codes"),
    [
        pytest.param(power(2), logarithm, 0, id="it calls another function"),
        pytest.param(power(2), power(-0.5), 0, id="with another exponent, which has a pole"),
        pytest.param(power(2), told(checkpoints=False), 0, id="it is no checkpoint any more"),
        pytest.param(told(checkpoints=False), told(checkpoints=True), 1, id="it becomes one"),
        pytest.param(power(2), told(twice=True), 2, id="there is another"),
        pytest.param(told(twice=True), told(twice=False), 1, id="there is one less"),
    ],
)
def test_another_piece_is_not_taken_for_the_one_that_was_learned(before, change, codes):
    net = Around()
    before(net)
    followed(net, 2)
    change(net)
    with seen_following() as seen:
        found = gradients(net, coded())
    assert [diverged for _, diverged in seen] == [True]
    expected, saved = gradients(net, nullcontext()), coded()
    saving_context.forget_all()
    looked = gradients(net, saved)
    assert error2(found, expected) <= 2 * error2(looked, expected)
    assert sum(row.count for row in rows_of(saved) if row.action == "dither") == codes


def test_an_input_that_wants_no_gradient_any_more_stays():
    net = Around()
    followed(net, 2)
    net.first.requires_grad_(requires_grad=False)
    x = torch.randn(4, 16, WIDTH)
    saved = coded()
    with seen_following() as seen, saved:
        out = net(x)
    out.square().sum().backward()
    assert [diverged for _, diverged in seen] == [True]
    assert "dither" not in {row.action for row in rows_of(saved)}


def test_a_piece_that_raises_leaves_the_next_step_as_it_was():
    net = Around()
    before, *_ = followed(net, 2)
    with pytest.raises(RuntimeError, match="shape"):
        gradients(net, coded(), torch.randn(4, 16, WIDTH + 1))
    assert all(map(torch.equal, gradients(net, coded()), before))


class DropsAttention(nn.Module):
    """Attention with dropout, which a node of ours replaces, and a checkpoint that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.is_checkpointed = False

    def body(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return x + out.transpose(1, 2).reshape(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


@pytest.mark.usefixtures("nothing_stays_attached")
def test_a_checkpoint_that_comes_later_has_no_node_of_ours_inside():
    def losses(budget):
        torch.manual_seed(0)
        net = nn.Sequential(*(DropsAttention() for _ in range(3)))
        x, found = torch.randn(16, 32, WIDTH), []
        if budget is not None:
            er.fit(net, budget=budget, exact=True, min_nbytes=0)
        for step in range(10):
            for block in net:
                block.is_checkpointed = step >= 5
            net.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad for p in net.parameters())]
        if budget is not None:
            er.release(net)
        return found

    assert all(map(torch.equal, losses("1 GiB"), losses(None)))
    assert all(map(torch.equal, losses("2 MiB"), losses(None)))
