"""A settled step never makes the host wait for a GPU: with every codec, by hand and under `er.fit`.

There is no GPU here. Host memory plays the device's, and what would make the host wait raises
(`waiting.py`); what serves a GPU alone, Triton's kernels, is called in its interpreter.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext as nothing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.adaptive import Guard
from elbowroom.codecs import Comet, Dither, Facts, Sided, SparseLossless, codecs
from elbowroom.fitting.replayed import ReplayedForward
from elbowroom.fitting.session import Fitting
from elbowroom.measure import allocations
from elbowroom.optim import base
from elbowroom.plan.make import plain_peak
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.runtime.attach import opener_of
from elbowroom.runtime.capacities import Capacities
from elbowroom.runtime.context import PROCESS
from elbowroom.runtime.handles import encode
from waiting import Numbers, no_waiting, pretended

SETTLES = 14  # steps, of which some are measured, and some planned

pytestmark = pytest.mark.usefixtures("one_thread")


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 32)
        self.qkv, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 16)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.last = (
            nn.Embedding(50, 16),
            nn.GRUCell(16, 32),
            nn.Linear(32, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 32)
        for word in self.words(x).unbind(1):
            h = F.dropout(F.relu(self.cell(word, h)), 0.1)
        return self.last(h)


def convolutions() -> nn.Module:
    layers = []
    for i, o in ((3, 16), (16, 16)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU6(), nn.Dropout(0.1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(576, 32), nn.LeakyReLU(), nn.Linear(32, 10))


NETS = {
    "convolutions": (convolutions, lambda draw: torch.randn(16, 3, 16, 16, generator=draw)),
    "attention": (
        lambda: nn.Sequential(Attends(), Attends(), nn.Linear(32, 8)),
        lambda draw: torch.randn(16, 24, 32, generator=draw),
    ),
    "recurrent": (Recurs, lambda draw: torch.randint(0, 50, (64, 12), generator=draw)),
}
# It takes masks, which every policy encodes by it; of other tensors it refuses the first.
CODECS = [name for name in codecs() if name != "bitmask"]
OF_NO_FIXED_SIZE = ["comet", "sided", "sparse_lossless"]  # whatever they encode
POLICIES = ["exact", "keep", "lean", "coat", "offload", *CODECS]


def made(name: str) -> tuple[nn.Module, list[Tensor]]:
    """A network, and inputs for eight steps."""
    torch.manual_seed(0)
    make, draw = NETS[name]
    return make(), [draw(torch.Generator().manual_seed(step)) for step in range(8)]


def run(net: nn.Module, x: Tensor, policy: str) -> list[Tensor]:
    """The gradients of one step."""
    torch.manual_seed(1)
    net.zero_grad()
    with er.saving(policy, min_nbytes=0):
        loss = net(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.sampled
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_by_hand(policy, net):
    """And its gradients are those of codes that are as long as they must be."""
    model, inputs = made(net)
    inputs = [x[:4] for x in inputs[:5]]
    seeds = PROCESS.count
    with pretended(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "would_wait", lambda x: False)
        expected = [run(model, x, policy) for x in inputs]
    er.runtime.replay.saving_context.forget_all()
    PROCESS.count = seeds
    model, _ = made(net)
    with pretended():
        for step, x in enumerate(inputs):
            with no_waiting() if step > 1 else nothing():
                got = run(model, x, policy)
            assert all(map(torch.equal, got, expected[step]))
        is_used = policy != "sided" or net != "attention"  # no norm is followed by a ReLU there
        assert PROCESS.capacities._known or policy not in OF_NO_FIXED_SIZE or not is_used


@pytest.mark.sampled(2)
@pytest.mark.parametrize("net", ["convolutions", "attention"])
@pytest.mark.parametrize("policy", ["exact", "lean", "dither", "group", "division"])
def test_a_settled_step_gives_kernels_the_same_numbers(policy, net):
    """So a CUDA graph of one may be launched again: what changes lies in tensors, seeds too."""
    model, inputs = made(net)
    er.runtime.replay.saving_context.forget_all()
    with pretended():
        for x in inputs[:4]:
            run(model, x, policy)
        seen = []
        for x in inputs[4:6]:
            with Numbers() as numbers:
                run(model, x, policy)
            seen.append(numbers.found)
    for one, other in zip(*seen, strict=True):
        assert one == other


def lossy_plan(profile: Profile) -> Plan:
    """The mildest plan with codes, without modules that run again."""
    room = plain_peak(profile) - profile.static
    for percent in range(95, 20, -5):
        budget = profile.static + percent * room // 100
        plan = er.plan(profile, budget=budget, recompute=False)
        if not plan.exact:
            return plan
    raise AssertionError("no plan has codes")


BUDGETS = ["nothing to do", "exact", "lossy"]


def budget_of(model: nn.Module, x: Tensor, kind: str) -> dict[str, Any]:
    """A budget in which nothing, exact actions, or codes are needed, as `er.fit` takes it."""
    step = training(model, torch.optim.SGD(model.parameters(), lr=0.0))
    profile = er.measure(lambda: step(x), min_nbytes=0)
    if kind == "lossy":
        plan = lossy_plan(profile)
        return {"budget": plan.peak, "plan": plan, "min_nbytes": 0}
    share, exact = (2.0, None) if kind == "nothing to do" else (0.95, True)
    return {"budget": int(share * plain_peak(profile)), "exact": exact, "min_nbytes": 0}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("optimizer", ["ours", "torch's"])
def test_under_fit(net, budget, optimizer, monkeypatch):
    """The whole step: forward, backward, and the update of an optimizer of ours or of torch's."""
    monkeypatch.setattr(base, "is_read_later", lambda flag: True)
    model, inputs = made(net)
    options = budget_of(model, inputs[0], budget)
    kind = er.optim.AdamW if optimizer == "ours" else torch.optim.SGD
    made_by = {"state": "int8"} if optimizer == "ours" else {}
    update = kind(model.parameters(), lr=1e-3, **made_by)
    with pretended():
        er.fit(model, optimizer=update, **options)
        step, fitting = training(model, update), opener_of(model)
        assert isinstance(fitting, Fitting)
        for number in range(SETTLES + 20):
            step(inputs[number % 8], waits=number < SETTLES)
        assert isinstance(fitting._last, ReplayedForward)
        assert fitting.was_exact is (budget != "lossy")
        er.release(model)


@pytest.fixture
def profilers(monkeypatch):
    """The profilers that were started since."""
    started: list[object] = []
    for where in (allocations, torch.autograd.profiler):
        for name in ("_prepare_profiler", "_enable_profiler"):
            original = getattr(where, name)

            def told(*args: object, original: Callable[..., object] = original) -> object:
                started.append(args)
                return original(*args)

            monkeypatch.setattr(where, name, told)
    return started


@pytest.mark.sampled(2)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_settled_fit_starts_no_profiler(net, budget, profilers):
    """On a CPU its first steps are measured by one; from then on it looks at its ledger alone."""
    model, inputs = made(net)
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    er.fit(model, optimizer=update, **budget_of(model, inputs[0], budget))
    step = training(model, update)
    del profilers[:]
    for number in range(SETTLES):
        step(inputs[number % 8])
    assert profilers
    del profilers[:]
    for number in range(40):
        step(inputs[number % 8])
        if number % 7 == 0:
            model.eval()
            with torch.no_grad():
                model(inputs[0])
            model.train()
    er.release(model)
    assert not profilers


SETTINGS = {
    "exact": {},
    "a codec": {"policy": "dither"},
    "watched": {"policy": "dither", "watch": True},
    "a noise budget": {"policy": "dither", "noise": 0.1},
    "a controller": {"policy": Guard(Dither(levels=4), every=5)},
    "offload": {"policy": "offload"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_by_hand_no_profiler_is_ever_started(setting, profilers):
    model, inputs = made("convolutions")
    for x in inputs:
        with er.saving(**SETTINGS[setting], min_nbytes=0):
            loss = model(x).square().mean()
        loss.backward()
    assert not profilers


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., None]:
    def step(x: Tensor, *, waits: bool = True) -> None:
        with nothing() if waits else no_waiting():
            model(x).square().mean().backward()
        with nothing() if waits else no_waiting(asks=False):  # counters of steps are the host's
            optimizer.step()
            optimizer.zero_grad()

    return step


def thinned(density: float, n: int = 6000) -> Tensor:
    draw = torch.Generator().manual_seed(int(1000 * density))
    x = torch.randn(n, generator=draw)
    return x * (torch.rand(n, generator=draw) < density)


CODED = {
    "dither": (Dither(levels=5), Facts(has_zeros=True)),
    "sided": (Sided(upper=16, lower=2, fold=8), Facts()),
    "comet": (Comet(prediction="1d"), Facts()),
    "comet, aware": (Comet(), Facts(has_zeros=True)),
    "sparse_lossless": (SparseLossless(), Facts()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", CODED)
def test_no_bit_depends_on_how_much_was_expected(kind, dtype):
    """Tensors that need more and more, each held while others come: what does not fit spills."""
    codec, facts = CODED[kind]
    capacities, held = Capacities(), []
    xs = [thinned(d).to(dtype) for d in (0.1, 0.1, 0.9, 0.5, 0.95, 0.1, 0.9)]
    exact = [codec.encode(x, seed, facts) for seed, x in enumerate(xs)]
    room = capacities.room("here")
    with pretended():
        for step in range(3):
            for seed, x in enumerate(xs):
                with no_waiting() if step or seed else nothing():
                    held.append(codec.encode(x, seed, facts, room=room))
                    assert held[-1].nbytes <= codec.encoded_nbytes(x.shape, dtype, facts)
            held = held[-5:]
        for encoded, known in zip(held, exact[-5:], strict=True):
            with no_waiting():
                got, twice = encoded.decode(), encoded.decode()
            assert torch.equal(got, known.decode())
            assert torch.equal(got, twice)
    assert 0 < capacities.spills < 14
    assert capacities.spilled_nbytes > 0


def test_the_guard_hears_of_a_loss_later_and_of_each_in_turn():
    losses = [*([1.0] * 30), *([3.0] * 15), math.nan, *([1.0] * 40)]
    there, late = (Guard(Dither(levels=4), patience=7) for _ in range(2))
    for loss in losses:
        there.loss(torch.tensor(loss, requires_grad=True) * 1)
    with pretended(questions=2):
        for loss in losses:
            with no_waiting():
                late.loss(torch.tensor(loss, requires_grad=True) * 1)
        assert late._sent  # the last ones are on their way
        state = late.state_dict()
    assert repr(state["guard"]) == repr(there.state_dict()["guard"])
    assert there.alarms >= 2


def test_what_would_wait_raises():
    x = torch.randn(5)
    for look in (
        *(
            lambda: x.sum().item(),
            lambda: int(x.sum()),
            lambda: bool(x.sum()),
            lambda: x.tolist(),
            lambda: x.cpu(),
        ),
        *(x.nonzero, lambda: x[x > 0], lambda: x.masked_select(x > 0), lambda: torch.equal(x, x)),
        lambda: float(x.sum()),
    ):
        with pytest.raises(AssertionError), no_waiting():
            look()
