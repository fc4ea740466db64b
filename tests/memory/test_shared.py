"""Tensors that wait for their next readers: restored less often, the same bits, no higher peak."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import elbowroom as er
from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.make import plain_peak
from elbowroom.plan.plan import Plan
from elbowroom.plan.problem import Choice, levels
from elbowroom.plan.shared import share
from elbowroom.plan.site import Need
from elbowroom.runtime.context import Context
from elbowroom.runtime.handles import EncodeHandle
from elbowroom.runtime.ledger import NOT_COUNTED
from elbowroom.runtime.redrawn import Redrawn
from elbowroom.runtime.slot import Geometry, Slot, View

LAYERS = 3


class Attention(nn.Module):
    """Attention in plain Python, as models have it in eager mode: its softmax is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.tanh(q @ k.transpose(1, 2) / 8) * 8
        y: Tensor = x + self.out(torch.softmax(scores, -1) @ v)
        return y


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Attention() for _ in range(LAYERS)))
        self.optimizer = torch.optim.SGD(self.model.parameters())
        self.x = torch.randn(8, 128, 32)

    def step(self, context: Any = None) -> None:
        self.model.zero_grad()
        with nullcontext() if context is None else context:
            self.model(self.x).square().mean().backward()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def alone(plan: Plan) -> Plan:
    """The plan whose tensors do not wait."""
    return replace(plan, sites={n: replace(one, shared=False) for n, one in plan.sites.items()})


def softmaxes(training: Training, plan: Plan) -> int:
    with Counting() as counting:
        training.step(er.following(plan))
    return counting.calls["_softmax"]


@pytest.fixture(scope="module")
def profile() -> Any:
    return er.measure(Training().step)


@pytest.fixture(scope="module")
def plan(profile: Any) -> Plan:
    """An exact plan that rebuilds each softmax."""
    budget = profile.static + int(0.7 * (plain_peak(profile) - profile.static))
    return er.plan(profile, budget=budget, exact=True, recompute=False)


def test_what_is_read_twice_is_rebuilt_once(plan: Plan) -> None:
    training, plainly = Training(), Training()
    twice = sum(n.consumer == "softmax" and one.shared for n, one in plan.sites.items())
    assert twice > 0
    once = softmaxes(training, plan)  # others may be rebuilt by one reader: prices are measured
    assert once >= LAYERS + twice
    # The input of the last layer may be rebuilt of it, too: once more for each that does not wait.
    assert softmaxes(training, alone(plan)) >= once + twice
    plainly.step()
    for x, y in zip(training.gradients(), plainly.gradients(), strict=True):
        assert torch.equal(x, y)


def test_a_plan_counts_what_waits(plan: Plan) -> None:
    training = Training()
    training.step()
    for one in (plan, alone(plan)):
        training.model.zero_grad()
        assert er.peak(lambda one=one: training.step(er.following(one))) <= 1.02 * plan.peak
    assert plan.seconds > plan.plain_seconds


def test_nothing_waits_where_a_moment_has_no_room(profile: Any) -> None:
    built = build_problem(profile, exact=True, recompute=False)
    choice = Choice(tuple(len(item.options) - 1 for item in built.problem.items))
    level = levels(built.problem, choice)
    freely = share(profile, built, choice, int(10 * level.max()))
    assert freely.saved_s
    assert any(seconds > 0 for seconds in freely.saved_s.values())
    for allowed in (int(level.max()), int(level.max()) - 1, 0):
        found = share(profile, built, choice, allowed)
        assert found.peak <= max(allowed, int(level.max()))
        assert found.saved_s.keys() <= freely.saved_s.keys()
    assert not share(profile, built, choice, 0).saved_s


def test_a_fitted_model_shares_in_settled_steps() -> None:
    training, plainly = Training(), Training()
    training.step()
    static = sum(p.nbytes for p in training.model.parameters())
    training.model.zero_grad()
    peak = er.peak(training.step)
    budget = 2 * static + int(0.6 * (peak - static))
    model = er.fit(training.model, budget=budget, optimizer=training.optimizer, exact=True)
    training.model = model
    for _ in range(5):
        model.zero_grad()
        model(training.x).square().mean().backward()
    with Counting() as counting:
        model.zero_grad()
        model(training.x).square().mean().backward()
    assert LAYERS < counting.calls["_softmax"] <= 2 * LAYERS
    plainly.step()
    for x, y in zip(training.gradients(), plainly.gradients(), strict=True):
        assert torch.equal(x, y)


class Gated(nn.Module):
    """A norm that is written out, and a gated layer: their inputs have several readers each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.gate, self.up = (nn.Linear(32, 96, bias=False) for _ in range(2))
        self.down = nn.Linear(96, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
        y: Tensor = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return y


class GatedTraining(Training):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 32), *(Gated() for _ in range(LAYERS)))


@pytest.fixture(scope="module")
def coded() -> Plan:
    """A plan that has codes for much, and makes the rest of them, by prices that are given."""
    profile = er.measure(GatedTraining().step)
    storages = tuple(replace(one, producer_s=1e-6) for one in profile.storages)
    profile = replace(profile, storages=storages, rates={}, fixed_s={})
    budget = profile.static + int(0.4 * (plain_peak(profile) - profile.static))
    return er.plan(profile, budget=budget, exact=False, recompute=False, codecs=["dither"])


def decodings(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Tensor]]:
    """How often a step decodes that measures no code, and its gradients."""
    training, found = GatedTraining(), 0
    decoded: Any = EncodeHandle._decoded

    def counted(*args: Any) -> Any:
        nonlocal found
        found += 1
        return decoded(*args)

    with monkeypatch.context() as patched:
        patched.setattr(EncodeHandle, "_decoded", counted)
        patched.setattr(Redrawn, "reads", lambda *_: None)
        training.step(er.following(plan, seed=1))
    return found, training.gradients()


def test_a_code_with_several_readers_is_decoded_once(
    coded: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = sum("dither" in line.action for line in coded.lines)
    assert codes >= LAYERS
    (apart, expected), (once, gradients) = (
        decodings(plan, monkeypatch) for plan in (alone(coded), coded)
    )
    assert once <= codes + 1
    assert 2 * once <= apart
    for x, y in zip(gradients, expected, strict=True):
        assert torch.equal(x, y)


def test_such_a_plan_counts_what_waits(coded: Plan) -> None:
    training = GatedTraining()
    training.step()
    training.model.zero_grad()
    assert er.peak(lambda: training.step(er.following(coded))) <= 1.02 * coded.peak


def test_an_original_that_still_exists_waits_for_nobody() -> None:
    """It may be changed until the next reader asks."""
    x = torch.randn(64)
    slot = Slot(x, NOT_COUNTED)
    slot.hold(EncodeHandle(er.codec("dither", levels=16).encode(x, 1), x))
    slot.shared = Context().planned
    views = [View(slot, Geometry.of(x), Need.LOSSY) for _ in range(3)]
    assert views[0].restore().data_ptr() == x.data_ptr()
    assert slot.whole is None
    x.zero_()
    whole = views[1].restore()
    assert whole.any()
    assert slot.whole is whole
    assert views[2].restore().data_ptr() == whole.data_ptr()
    assert slot.whole is None
