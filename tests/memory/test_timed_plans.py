"""Settled steps are timed, another plan is tried, and the fastest stays, by a clock we turn."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.fitting import step_timer
from elbowroom.fitting.timings import WORTH_S
from elbowroom.measure import peak
from elbowroom.plan.plan import Plan
from elbowroom.runtime import attach
from elbowroom.runtime.attach import opener_of

_STEPS = 50


@pytest.fixture(autouse=True)
def nothing_stays_attached() -> Iterator[None]:
    yield
    for model in list(attach._attached):
        er.release(model)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Training:
    """A small network, and a clock by which a step takes what `cost_s` says of its plan."""

    def __init__(self, cost_s: Callable[[Plan], float] = lambda _: 0.0) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block() for _ in range(6)))
        self.x, self.now_s, self._cost_s = torch.randn(512, 64), 0.0, cost_s
        self.followed: list[Plan] = []

    def step(self) -> Tensor:
        self.net.zero_grad(set_to_none=True)
        loss = self.net(self.x).square().mean()
        loss.backward()
        with torch.no_grad():
            for weight in self.net.parameters():
                weight -= 0.01 * weight.grad
        fitting = opener_of(self.net)
        plan = None if fitting is None else fitting.planning.plan
        if plan is not None:
            self.now_s += self._cost_s(plan)
            if not self.followed or self.followed[-1] is not plan:
                self.followed.append(plan)
        return loss.detach()

    def train(self, steps: int = _STEPS) -> list[Tensor]:
        return [self.step() for _ in range(steps)]


class Clock:
    def __init__(self, training: Training) -> None:
        self._training = training

    def now_s(self) -> float:
        return self._training.now_s


def budget_of(share: float) -> int:
    plain = Training()
    plain.step()
    standing = sum(p.nbytes for p in plain.net.parameters())
    plain.net.zero_grad(set_to_none=True)
    return standing + int(share * peak(plain.step))


def fitted(
    monkeypatch: pytest.MonkeyPatch,
    cost_s: Callable[[Plan], float],
    share: float = 0.6,
    exact: bool | None = False,
) -> Training:
    training = Training(cost_s)
    monkeypatch.setattr(step_timer, "Undisturbed", lambda: Clock(training))
    er.fit(training.net, budget=budget_of(share), exact=exact)
    return training


def actions(plan: Plan) -> object:
    return plan.recompute, {name: one.preset for name, one in plan.sites.items()}


def settle(training: Training) -> Plan:
    """Trains until a plan is settled, and returns it."""
    for _ in range(12):
        training.step()
        planning = opener_of(training.net).planning
        if planning.timer is not None:
            assert planning.plan is not None
            return planning.plan
    raise AssertionError("nothing was settled, so nothing is tested")


def costs(monkeypatch, first_s: float, other_s: float) -> tuple[Training, Plan]:
    """Train until the first plan is settled: steps under it, and under others, take so long."""
    settled: list[object] = []
    training = fitted(monkeypatch, lambda plan: first_s if [actions(plan)] == settled else other_s)
    before = settle(training)
    settled.append(actions(before))
    training.followed.clear()
    return training, before


def test_a_faster_plan_stays(monkeypatch, caplog) -> None:
    training, before = costs(monkeypatch, 1.0, 0.8)
    caplog.set_level(logging.INFO, "elbowroom")
    training.train()
    planning = opener_of(training.net).planning
    assert planning.settled
    assert planning.state.is_timed
    assert actions(planning.plan) != actions(before)
    assert "by another plan, which stays" in caplog.text
    assert opener_of(training.net).highest_nbytes <= planning.options.budget_nbytes


def test_a_slower_plan_is_left_again(monkeypatch, caplog) -> None:
    training, before = costs(monkeypatch, 0.5, 0.6)
    caplog.set_level(logging.INFO, "elbowroom")
    training.train()
    planning = opener_of(training.net).planning
    assert planning.settled
    assert planning.state.is_timed
    assert actions(planning.plan) == actions(before)
    assert len(training.followed) > 1, "no other plan was tried, so nothing is tested"
    assert len(training.followed) <= 5  # two others, and back
    assert "by another plan" not in caplog.text


def test_short_steps_are_not_worth_another_plan(monkeypatch) -> None:
    training = fitted(monkeypatch, lambda plan: WORTH_S / 2)
    before = settle(training)
    training.followed.clear()
    training.train(20)
    assert training.followed == [before]


def test_no_bit_changes_while_exact_plans_are_tried(monkeypatch) -> None:
    plain = Training()
    expected = plain.train()
    slower = iter(range(1, 10**6))
    training = fitted(monkeypatch, lambda plan: 0.1 * next(slower), share=0.8, exact=True)
    losses = training.train()
    assert all(map(torch.equal, losses, expected))
    weights = zip(training.net.parameters(), plain.net.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_a_solver_that_was_named_is_obeyed(monkeypatch) -> None:
    training = Training(lambda plan: 1.0)
    monkeypatch.setattr(step_timer, "Undisturbed", lambda: Clock(training))
    er.fit(training.net, budget=budget_of(0.7), exact=True, solver="delta")
    training.train(16)
    planning = opener_of(training.net).planning
    assert planning.settled
    assert planning.timer is None
    assert not planning.state.timings
