"""Steps that differ in numbers of rows alone, as those of a mixture of experts do."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.fitting.replayed import ReplayedForward, ReplayedSaving
from elbowroom.runtime.attach import opener_of
from elbowroom.runtime.replay.generalize import generalized
from elbowroom.runtime.replay.saving_context import SavingContext, forget_all
from elbowroom.runtime.replay.script import Script
from elbowroom.runtime.replay.tracer import Tracer
from elbowroom.runtime.saving import Saving
from programs import looking, same

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 16


@pytest.fixture(autouse=True)
def nothing_known():
    forget_all()
    yield
    forget_all()


class Experts(nn.Module):
    """Each row goes to one of three experts; `counts` says how many each gets."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.gelu, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.act, self.last = nn.LayerNorm(width), act, nn.Linear(width, width)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(3))

    def forward(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        h, order = self.norm(x), torch.randperm(len(x))
        chosen = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))[order]
        out = torch.zeros_like(h)
        for n, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            (rows,) = torch.where(chosen == n)
            if len(rows):
                out = out.index_add(0, rows, down(self.act(up(h[rows]))) * 0.5)
        return self.last(F.silu(x + out)).square().mean()


def counts_of(step: int, rows: int = 96) -> tuple[int, ...]:
    first = 20 + 3 * step % 17
    second = 30 - 2 * step % 13
    return first, second, rows - first - second


def gradients(net: nn.Module, counts: tuple[int, ...], context: Any) -> list[Tensor]:
    torch.manual_seed(sum(counts) + counts[0])
    x = torch.randn(sum(counts), WIDTH)
    with context:
        loss = net(x, counts)
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)]


def plain() -> torch.enable_grad:
    return torch.enable_grad()


def is_followed(saved: SavingContext) -> bool:
    part = saved._parts[-1]
    return not isinstance(part, Saving) and part.saving is None


def error(got: list[Tensor], want: list[Tensor]) -> float:
    wrong = sum((a - b).square().sum() for a, b in zip(got, want, strict=True))
    return float(wrong / sum(b.square().sum() for b in want))


@pytest.mark.parametrize("act", [F.gelu, F.relu, torch.tanh, lambda x: F.silu(x) * x])
def test_experts_with_other_numbers_of_rows_are_followed_with_the_bits_of_plain(act):
    net, followed = Experts(act), 0
    for step in range(10):
        saved = er.saving(min_nbytes=0)
        got = gradients(net, counts_of(step), saved)
        assert same(got, gradients(net, counts_of(step), plain())), step
        followed += is_followed(saved)
    assert followed >= 5


def test_their_ledger_counts_the_rows_that_there_are():
    net = Experts()
    for step in range(8):
        gradients(net, counts_of(step), er.saving(min_nbytes=0))
    for counts in ((40, 20, 36), (20, 40, 36)):
        saved, looked = er.saving(min_nbytes=0), looking(min_nbytes=0)
        gradients(net, counts, saved)
        gradients(net, counts, looked)
        assert is_followed(saved)
        mine = [(r.module, r.consumer, r.before_nbytes) for r in saved.ledger.rows if r.action]
        seen = [(r.module, r.consumer, r.before_nbytes) for r in looked.ledger.rows if r.action]
        assert sorted(x for x in mine if "up.0" in x[0]) == sorted(
            x for x in seen if "up.0" in x[0]
        )


@pytest.mark.parametrize(
    "counts",
    [
        (0, 40, 56),
        (1, 40, 55),
        (40, 1, 55),
        (2, 2, 92),
        (30, 30, 36),
        (40, 40, 40),
        (96, 0, 0),
        (48, 48, 0),
        (32, 32, 32),
    ],
)
def test_experts_without_rows_or_with_as_many_as_another(counts):
    net = Experts()
    for step in range(6):
        gradients(net, counts_of(step), er.saving(min_nbytes=0))
    for now in (counts, counts_of(1), counts, counts_of(4)):
        got = gradients(net, now, er.saving(min_nbytes=0))
        assert same(got, gradients(net, now, plain()))


def test_codes_are_made_of_the_rows_that_there_are():
    net, followed = Experts(), 0
    for step in range(10):
        counts = tuple(8 * n for n in counts_of(step))
        saved = er.saving("dither", levels=16, min_nbytes=0)
        got = gradients(net, counts, saved)
        assert error(got, gradients(net, counts, plain())) < 0.02
        followed += is_followed(saved)
    assert followed >= 5


def written(forward: Callable[[], Tensor]) -> Script:
    saving = looking(min_nbytes=0)
    saving.tracer = Tracer()
    with saving:
        out = forward()
    del out
    assert saving.tracer.script is not None
    return saving.tracer.script


def both(forward: Callable[[Tensor], Tensor], *sizes: int) -> Script | None:
    one, other = (written(lambda n=n: forward(torch.randn(n, WIDTH))) for n in sizes)
    return generalized(one, other)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, w: F.gelu(x @ w) / len(x) * 3,
        lambda x, w: F.gelu((x @ w).view(len(x) // 2, 2 * WIDTH)),
        lambda x, w: F.gelu(F.layer_norm((x @ w).t(), (len(x),))),
        lambda x, w: F.dropout(F.gelu(x @ w), 1 / len(x)),
    ],
)
def test_what_is_told_a_number_of_rows_is_given_that_of_each_step(forward):
    w, v = (nn.Parameter(torch.randn(*shape)) for shape in ((WIDTH, WIDTH), (WIDTH,)))

    def grads(n: int, context: Any) -> list[Tensor]:
        torch.manual_seed(n)
        x = torch.randn(n, WIDTH)
        with context:
            y = forward(x, w)
            loss = (F.gelu(y) * torch.tanh(y)).sum() + v.sum()
        return list(torch.autograd.grad(loss, [w, v]))

    for n in (24, 40, 32, 16, 24, 56, 48):
        assert same(grads(n, er.saving(min_nbytes=0)), grads(n, plain()))


def test_steps_that_differ_in_nothing_or_in_what_they_do_are_not_made_one():
    w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def run(x: Tensor, act: Callable[[Tensor], Tensor] = F.gelu) -> Tensor:
        return (act(x @ w) * (x @ w)).sum()

    assert both(run, 24, 24) is None
    assert both(run, 24, 40).sizes
    one = written(lambda: run(torch.randn(24, WIDTH)))
    other = written(lambda: run(torch.randn(40, WIDTH), F.silu))
    assert generalized(one, other) is None


def test_a_fitted_model_of_experts_follows_its_script_with_the_bits_of_plain():
    net, followed = Experts(), 0
    twin = copy.deepcopy(net)
    er.fit(net, budget="1.5 MiB", exact=True)
    for step in range(13):
        first, second, _ = counts_of(step)
        torch.manual_seed(step)
        more = 640 if step == 11 else 512  # which is examined, as it saves more than was planned
        x, counts = torch.randn(more, WIDTH), (first, second, more - first - second)
        state = torch.get_rng_state()
        for model in (net, twin):
            torch.set_rng_state(state)
            model.zero_grad()
            model(x, counts).backward()
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), step
        is_replayed = isinstance(opener_of(net)._last, ReplayedForward)
        assert not (is_replayed and more > 512)
        followed += is_replayed
    assert followed >= 2
    er.release(net)


@pytest.mark.parametrize("codec", [None, "dither"])
def test_what_few_rows_leave_as_it_is_gets_its_action_in_many(codec: str | None) -> None:
    """40 rows have nothing that is large enough for one."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    for rows in (*range(40, 110, 10), 2000):
        x = torch.randn(rows, 64)
        with er.saving(*filter(None, [codec])) as saved:
            loss = net(x).square().mean()
        loss.backward()
    assert saved.ledger.after_nbytes < 0.7 * saved.ledger.before_nbytes


class Reader(nn.Module):
    """Layers of attention and of GELU over texts of any length, with a loss over many classes."""

    def __init__(self, depth: int = 4, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList((nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, 256)))
            for _ in range(depth)
        )
        self.down = nn.ModuleList(nn.Linear(256, width) for _ in range(depth))
        self.top = nn.Linear(width, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.embed(tokens)
        for (norm, qkv, up), down in zip(self.blocks, self.down, strict=True):
            heads = qkv(norm(x)).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + y.transpose(1, 2).reshape(batch, length, -1)
            x = x + down(F.gelu(up(norm(x)), approximate="tanh"))
        return F.cross_entropy(self.top(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Frozen(nn.Module):
    """Attention behind a frozen layer, which saves nothing: q, k and v are views of
    `batch * length` rows, a number that no tensor before them has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.qkv = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.qkv.requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.rows(tokens)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.last(x.transpose(1, 2).flatten(2)).sum()


@pytest.mark.parametrize("how", [(), ("dither", 16)])
def test_what_tensors_are_views_of_tells_its_rows_by_its_storage(how: tuple[Any, ...]) -> None:
    net, followed = Frozen(), 0
    for length in (24, 40, 33, 64, 17, 25, 50, 30, 41, 22, 63):
        tokens = torch.randint(32, (4, length))
        want = torch.autograd.grad(net(tokens), net.rows.weight)
        saved = er.saving(*how[:1], **({"levels": how[1]} if how else {}), min_nbytes=0)
        with saved:
            loss = net(tokens)
        got = torch.autograd.grad(loss, net.rows.weight)
        assert error([*got], [*want]) < (0.05 if how else 1e-30)
        followed += is_followed(saved)
    assert followed >= 4


@pytest.mark.parametrize("exact", [True, False])
def test_texts_of_other_lengths_replay_one_script(exact: bool) -> None:
    """As batches of texts that are padded to the longest of them: each length had its own script,
    and a step that was longer than a measured one, and shorter than the longest, was taken to be
    above the budget."""
    torch.manual_seed(0)
    net, lengths, replayed = Reader(), random.Random(0), []
    texts = [
        torch.randint(512, (8, length)) for length in (128, *lengths.choices(range(66, 128), k=40))
    ]

    def peak(tokens: Tensor) -> int:
        net.zero_grad()
        return er.peak(lambda: net(tokens).backward()) + weights

    def gradients(tokens: Tensor) -> list[Tensor]:
        net.zero_grad()
        net(tokens).backward()
        return [p.grad for p in net.parameters()]

    weights = sum(p.nbytes for p in net.parameters())
    share = 0.65 if exact else 0.5
    budget = int(2 * weights + share * (peak(texts[0]) - 2 * weights))
    expected = [gradients(tokens) for tokens in texts] if exact else []
    er.fit(net, budget=budget, exact=True if exact else None, min_nbytes=0)
    for at, tokens in enumerate(texts):
        found = gradients(tokens)
        replayed.append(isinstance(opener_of(net)._last, ReplayedForward))
        assert not exact or all(map(torch.equal, found, expected[at]))
        assert at < 20 or peak(tokens) <= budget
    assert sum(replayed[10:]) >= 28
    assert len([one for one in opener_of(net).planner.scripts.all if one.sizes]) == 1
    er.release(net)


class ManyExperts(nn.Module):
    """What some of these save is about as large as the least that is planned, 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(F.relu, 2 * WIDTH) for _ in range(5))
        self.router = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            first, second = torch.randint(90, 170, (2,), generator=self.router).tolist()
            total = total + block(x, (first, second, len(x) - first - second))
        return total


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_fit_follows_steps_whose_experts_get_more_or_fewer_rows_than_planned(share, monkeypatch):
    def train(steps: int, budget: int | None = None) -> tuple[list[Tensor], Any]:
        model = ManyExperts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if budget is not None:
            er.fit(model, budget=budget, optimizer=optimizer, exact=True)
        for step in range(steps):
            torch.manual_seed(step)
            model(torch.randn(450, 2 * WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], model

    train(1)
    peak = er.peak(lambda: train(1))
    seen: list[bool] = []
    end = ReplayedSaving.__exit__

    def leave(self: Any, *args: Any) -> None:
        end(self, *args)
        seen.append(self.diverged)

    monkeypatch.setattr(ReplayedSaving, "__exit__", leave)
    weights, model = train(40, int(share * peak))
    assert opener_of(model).planner.settled
    assert seen[-12:].count(True) <= 2
    assert len(seen) >= 24
    assert same(weights, train(40)[0])
