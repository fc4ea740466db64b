"""The ledger equals the allocator: bytes of forward still held before backward, less the loss."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.demo.models import GPT, ResNet18, UNet
from elbowroom.measure import mark, memory_curve
from elbowroom.plan import Encode, Exact, Keep
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.producers import products
from elbowroom.units import show_nbytes
from programs import looking


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)


@dataclass(frozen=True)
class Job:
    """Data are made inside the step, and only autograd keeps them: the allocator sees all."""

    model: Callable[[], nn.Module]
    data: Callable[[], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    autocast: bool = False


def images() -> Tensor:
    return torch.randn(8, 1, 28, 28)


def tokens() -> Tensor:
    return torch.randint(0, 256, (8, 32))


def weighted(out: Tensor, x: Tensor) -> Tensor:
    """A loss that saves nothing of the output."""
    return out.float().mean()


def next_token(out: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), x.flatten())


def gated() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.GLU(dim=1)),
        *(nn.MaxPool2d(2), nn.Flatten(2), nn.LayerNorm(196), nn.GELU(), nn.Dropout(0.1)),
        *(nn.Linear(196, 64), nn.Softmax(dim=-1), nn.Linear(64, 8)),
    )


JOBS = {
    "resnet": Job(lambda: ResNet18(width=8), images, weighted),
    "resnet channels_last": Job(
        lambda: ResNet18(width=8).to(memory_format=torch.channels_last),
        lambda: images().to(memory_format=torch.channels_last),
        weighted,
    ),
    "gpt": Job(lambda: GPT(width=64, depth=2, context=32), tokens, next_token),
    "gpt without dropout": Job(
        lambda: GPT(width=64, depth=2, context=32, dropout=0.0), tokens, next_token
    ),
    "gpt bf16": Job(lambda: GPT(width=64, depth=2, context=32), tokens, next_token, autocast=True),
    "unet": Job(lambda: UNet(width=8), images, weighted),
    "gated": Job(gated, images, weighted),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "keep": {"policy": "keep"},
    "exact": {"policy": "exact"},
    "dither": {"policy": "dither", "bits": 2},
    "dither, no rebuild": {"policy": "dither", "bits": 3, "rebuild": False},
    "group": {"policy": "group", "bits": 2},
    "lean": {"policy": "lean"},
    "lean, no rebuild": {"policy": "lean", "rebuild": False},
    "sparse": {"policy": "sparse_lossless"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_the_ledger_equals_the_allocator(job, settings):
    model = job.model()
    seen: dict[str, Any] = {}

    def step() -> None:
        saved = er.saving(**settings, min_nbytes=0)
        x = job.data()
        with saved:
            with torch.autocast("cpu", torch.bfloat16, enabled=job.autocast):
                out = model(x)
            loss = job.loss(out, x) if job.loss is next_token else None
        if loss is None:
            loss = job.loss(out, x)
        del x, out  # which the loss may have saved
        mark("backward")
        seen.update(ledger=saved.ledger, loss=loss.nbytes, held=saved.ledger.held_nbytes)
        loss.backward()
        model.zero_grad()

    step()
    curve = memory_curve(step)
    ((_, at_s),) = curve.marks
    before = [n for t, n in zip(curve.times_s, curve.nbytes, strict=True) if t <= at_s][-1]
    truth, ledger = before - seen["loss"], seen["ledger"]
    assert ledger.after_nbytes == pytest.approx(truth, rel=0.01)
    assert seen["held"] == ledger.after_nbytes
    assert ledger.held_nbytes == 0
    assert curve.end_nbytes <= 64  # profiler and optimizer leave nothing; nor do we
    if settings["policy"] == "keep":
        assert ledger.before_nbytes == ledger.after_nbytes
    check_sums(ledger)


def check_sums(ledger: Ledger) -> None:
    assert sum(row.before_nbytes for row in ledger.rows) == ledger.before_nbytes
    assert sum(row.after_nbytes for row in ledger.rows) == ledger.after_nbytes
    for by in ("action", "module", "dtype", "consumer", "why"):
        totals = ledger.totals(by)
        assert sum(before for before, _ in totals.values()) == ledger.before_nbytes
        assert sum(after for _, after in totals.values()) == ledger.after_nbytes


def test_what_a_mode_holds_is_compared_with_the_same_before():
    """`before` is what plain autograd would hold, whatever the mode did."""
    model, x = ResNet18(width=4), images()
    befores = set()
    for settings in SETTINGS.values():
        torch.manual_seed(1)
        saved = er.saving(**settings, min_nbytes=0)
        with saved:
            loss = model(x).mean()
        befores.add(saved.ledger.before_nbytes)
        del loss
    assert len(befores) == 1


def test_it_counts_a_storage_once_and_a_parameter_never():
    layer = nn.Linear(64, 64)
    x = torch.randn(32, 64, requires_grad=True)
    with er.saving("keep", min_nbytes=0) as saved:
        h = x * 1
        y = layer(h) + layer(h.view(4, 8, 64)).view(32, 64) + h.t().mm(h).sum() + h[:20].exp().sum()
    # h: once through four views; the output of exp. The weight: never.
    assert saved.ledger.before_nbytes == 32 * 64 * 4 + 20 * 64 * 4
    del y
    assert saved.ledger.held_nbytes == 0


LOGARITHM = "'log1p': its backward divides by it, or by a root or logarithm of it"


class Logarithm(nn.Module):
    def forward(self, x):
        return torch.log1p(x.square())


def test_it_says_what_and_why():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), Logarithm())
    small = nn.Linear(64, 64)
    data = torch.randn(64, 64)
    with er.saving("dither", bits=2, min_nbytes=8192) as saved:
        y = F.linear(Roomy.apply(net(small(data))), small.weight)
    text = str(saved.ledger)
    rows = {row.why for row in saved.ledger.rows}
    assert {
        "an input: its owner holds it",
        LOGARITHM,
        "a window onto a larger storage",
    } <= rows
    actions = saved.ledger.totals("action")
    assert {"keep", "dither"} <= actions.keys()
    assert {"linear", "relu", "log1p"} <= saved.ledger.totals("consumer").keys()
    assert {"0", "1", "3"} <= saved.ledger.totals("module").keys()
    assert saved.ledger.totals("dtype").keys() == {"float32"}
    for word in ("left alone because", "dither", "log", "saved tensors:"):
        assert word in text
    assert repr(saved.ledger).startswith("Ledger(")
    del y


def test_small_tensors_share_a_row_of_the_table():
    """The table of a ResNet-18 had 24 rows of statistics, of 64 to 512 bytes."""
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(4)))
    with er.saving() as saved:
        y = net(torch.randn(64, 3, 32, 32)).sum()
    small = [row for row in saved.ledger.rows if row.why == "small"]
    (shown,) = (line for line in str(saved.ledger).splitlines() if "small" in line)
    assert len(small) > 3
    assert str(sum(row.count for row in small)) in shown.split()
    assert show_nbytes(sum(row.before_nbytes for row in small)) in shown
    del y


class Sub(Tensor):
    pass


DATA = torch.randn(64, 64)


class Roomy(torch.autograd.Function):
    """Gives a tensor that fills little of its storage."""

    @staticmethod
    def forward(ctx, x):
        return torch.zeros(50, 64, 64).resize_(x.shape).copy_(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda w: torch.randn(64, 64) @ w, "an input: its owner holds it"),
        (
            lambda w: (w @ DATA).sin() * DATA.cos(),
            "data that the gradient of an activation is multiplied with",
        ),
        (lambda w: (w @ torch.randn(64, 64)).log1p(), LOGARITHM),
        (lambda w: F.linear(Roomy.apply(w), w), "a window onto a larger storage"),
        (lambda w: F.linear((w * 2)[:4].clone(), w), "small"),
        (lambda w: F.linear(w.expand(2, 64, 64).sum(0), w), "made of parameters only"),
        (lambda w: (w * torch.randn(64, 64)).to_sparse().sum(), "layout sparse"),
        (
            lambda w: F.linear((w @ torch.randn(64, 64)).double(), w.double()),
            "codec 'dither' does not take float64",
        ),
        (lambda w: (w @ torch.randn(64, 64)).as_subclass(Sub) ** 2, "tensor subclass Sub"),
    ],
)  # fmt: skip
def test_each_reason_is_given(forward, why):
    w = nn.Parameter(torch.randn(64, 64))
    with er.saving("dither", bits=2, min_nbytes=4096) as saved:
        y = forward(w)
    reasons = {row.why for row in saved.ledger.rows}
    if why == "layout sparse":
        assert reasons  # what sparse ops save depends on the version: it is counted
    else:
        assert why in reasons
    del y


def test_the_fullest_moment_counts():
    """A context around several forwards: the figures are those of the moment when most was held."""
    w = torch.randn(64, 64, requires_grad=True)
    with er.saving("keep", min_nbytes=0) as saved:
        for rows in (8, 32, 4):
            y = (w[:rows] * 1).exp().sum()
            y.backward()
            del y
    assert saved.ledger.before_nbytes == 32 * 64 * 4
    assert saved.ledger.held_nbytes == 0
    check_sums(saved.ledger)


def test_a_context_around_a_training_does_not_grow():
    w = torch.randn(64, 64, requires_grad=True)
    with looking(min_nbytes=0) as saved:
        for _ in range(50):
            F.gelu(F.linear(w * 1, w)).sum().backward()
    assert len(saved.ledger._entries) < 20
    assert len(saved._sources._storages) == 0  # closed
    check_sums(saved.ledger)


def test_entries_close_once():
    ledger = Ledger()
    entry = ledger.open("m", "op", "float32", 100)
    entry.hold(40)
    assert (ledger.before_nbytes, ledger.after_nbytes, ledger.held_nbytes) == (100, 40, 40)
    entry.close()
    entry.close()
    entry.hold(77)  # too late
    assert ledger.held_nbytes == 0
    assert (ledger.before_nbytes, ledger.after_nbytes) == (100, 40)


def test_a_custom_policy_is_shown_as_it_decided():
    w = torch.randn(64, 64, requires_grad=True)

    def policy(site):
        if site.consumer == "exp":
            return Keep("I said so")
        return Encode(er.codec("cast")) if site.consumer == "linear" else Exact()(site)

    with er.saving(policy, min_nbytes=0) as saved:
        y = F.linear((w * 2).sum(0, keepdim=True) + torch.randn(64, 64), w).exp()
    assert "I said so" in {row.why for row in saved.ledger.rows}
    assert saved.ledger.totals("action")["cast"] == (64 * 64 * 4, 64 * 64 * 2)
    del y


class Attention(nn.Module):
    """As libraries write it out: scaled, capped, a mask added, a softmax in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.of_q, self.of_k, self.of_v = (nn.Linear(32, 128) for _ in range(3))
        self.places = nn.Parameter(torch.randn(100))

    def forward(self, x: Tensor) -> Tensor:
        parts = (each(x) for each in (self.of_q, self.of_k, self.of_v))
        q, k, v = (part.unflatten(-1, (4, 32)).transpose(1, 2) for part in parts)
        mask = torch.full((x.shape[1], x.shape[1]), -1e4).triu(1)
        logits = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.2 / 5) * 5 + mask
        logits = logits + self.places[mask.long().abs() % 100]
        mask.zero_()  # nobody but us has kept it
        weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(F.dropout(weights, 0.1), v).transpose(1, 2).flatten(2)


def test_a_tanh_is_held_where_that_is_faster_and_enough_is_saved_without():
    """On a CPU it takes as long, for each element, as 100 multiplications of a linear layer."""
    net, x = nn.Sequential(Attention(), nn.Linear(128, 32), Attention()), torch.randn(4, 64, 32)
    with er.saving(min_nbytes=4096) as saved:
        loss = net(x).square().mean()
    held = {(row.consumer, row.action): row for row in saved.ledger.rows}
    assert held["softmax", "rebuild"].after_nbytes == 0
    tanh = held["tanh", "keep"]
    assert tanh.after_nbytes == tanh.before_nbytes > 0
    loss.backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_attention_written_out_holds_no_weights(autocast, monkeypatch):
    """The tanh, the softmax and what it gives the next product are rebuilt from q and k."""
    monkeypatch.setattr(products, "_LONG", {})
    net, x = nn.Sequential(Attention(), nn.Linear(128, 32), Attention()), torch.randn(4, 64, 32)
    gradients = []
    for context in (nullcontext(), er.saving(min_nbytes=4096)):
        net.zero_grad()
        torch.manual_seed(1)
        with context as saved, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = net(x).float().square().mean()
        loss.backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    assert all(map(torch.equal, *gradients))
    held = {(row.consumer, row.action): row for row in saved.ledger.rows}
    assert held["softmax", "rebuild"].after_nbytes == 0
    assert held["tanh", "rebuild"].after_nbytes == 0
    copies = (row for row in saved.ledger.rows if "a constant" in row.why and row.module == "0")
    held = {row.action: (row.count, row.before_nbytes, row.after_nbytes) for row in copies}
    assert held == {"bitmask": (2, 0, 2 * 64 * 64 // 8)}  # and a bias that is learned


def test_codes_of_q_and_k_make_the_weights():
    """They are fine enough for it: an error in a logit is a factor in the weights."""
    net, x = Attention(), torch.randn(4, 64, 32)
    with er.saving("dither", levels=8, min_nbytes=4096) as saved:
        loss = net(x).square().mean()
    held = {(row.consumer, row.action): row for row in saved.ledger.rows}
    assert held["softmax", "rebuild"].after_nbytes == 0
    assert held["tanh", "rebuild"].after_nbytes == 0
    del loss


def test_where_no_code_of_q_and_k_is_fine_enough_the_weights_have_their_own():
    net, x = Attention(), torch.randn(4, 64, 32) * 100
    with er.saving("dither", levels=8, min_nbytes=4096) as saved:
        loss = net(x).square().mean()
    actions = {row.action for row in saved.ledger.rows if row.consumer == "softmax"}
    assert actions == {"cast"}
    del loss


@pytest.mark.parametrize(
    "take", [lambda x, at: x[at], lambda x, at: x[at - 64], lambda x, at: x.index_select(0, at)]
)
def test_rows_that_are_gathered_are_gathered_again(take):
    w = nn.Parameter(torch.randn(64, 64))
    x, index = torch.randn(64, 64), torch.randint(0, 64, (128,))

    def step() -> Tensor:
        hidden = F.gelu(x @ w)  # which its product saves
        return (F.linear(take(hidden, index * 1), w).sum() + (hidden @ w).square().sum()).sin()

    (plain,) = torch.autograd.grad(step(), w)
    with er.saving(min_nbytes=4096) as saved:
        loss = step()
    assert torch.equal(torch.autograd.grad(loss, w)[0], plain)
    gathered = [row for row in saved.ledger.rows if row.before_nbytes == 128 * 64 * 4]
    assert [row.action for row in gathered] == ["rebuild"]


def test_constants_do_not_gather_in_a_context_around_a_training():
    net, x = Attention(), torch.randn(4, 64, 32)
    with er.saving(min_nbytes=4096) as saved:
        for _ in range(20):
            net(x).square().mean().backward()
        assert saved.ledger.held_nbytes <= 8 * 64 * 64 * 4
    assert saved.ledger.held_nbytes == 0


def gathered_often(x: Tensor, index: Tensor) -> Tensor:
    """The squares of rows, added where they belong together, of rows that nobody saves."""
    rows = (x @ DATA[:32, :32] + 1).index_select(0, index)
    into = torch.zeros(64, 32)
    return into.index_add(0, index % 64, rows.square())


def test_of_rows_gathered_many_times_the_few_are_held():
    x, index = torch.randn(64, 32, requires_grad=True), torch.randint(0, 64, (1024,))
    plain = torch.autograd.grad(gathered_often(x, index).sum(), x)[0]
    with er.saving(min_nbytes=4096) as saved:
        out = gathered_often(x, index)
    rows = [row for row in saved.ledger.rows if row.before_nbytes == 1024 * 32 * 4]
    assert [row.action for row in rows if row.consumer == "square"] == ["rebuild"]
    assert all(row.after_nbytes == 0 for row in rows)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], plain)


def test_a_small_part_of_a_large_tensor_is_not_copied_for_it():
    """A copy would be of the storage: a mask's buffer is often much larger than what is used."""
    large, x = torch.randn(1, 4096), torch.randn(64, 64, requires_grad=True)
    with er.saving(min_nbytes=1024) as saved:
        out = (x.sin() + large[:, :64]).exp()
    assert all(row.consumer != "add" for row in saved.ledger.rows)
    del out


def test_a_recipe_that_needs_an_exact_source_keeps_no_code_away():
    """Group norm over channels in another order runs again on the exact input alone."""
    norm, conv = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)
    x = torch.randn(2, 64, 16, requires_grad=True)
    with er.saving("dither", levels=16, seed=0, min_nbytes=4096) as saved:
        h = (x @ torch.eye(16)).transpose(1, 2).unflatten(2, (8, 8))
        conv(F.silu(norm(h))).square().sum().backward()
    rows = {(row.consumer, row.action) for row in saved.ledger.rows if row.before_nbytes > 4096}
    assert {("group_norm", "dither"), ("silu", "dither")} <= rows
    assert ("group_norm", "keep") not in rows
