"""fit(plan=): a plan from elsewhere is followed from the first step, and dropped if it is wrong."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.demo.models import GPT, ResNet18
from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.fitting.session import Fitting
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.runtime.attach import opener_of

MIN_NBYTES = 4096
Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


OPTIMIZERS = pytest.mark.parametrize("make", [sgd, adamw])


pytestmark = pytest.mark.usefixtures("one_thread", "nothing_stays_attached")


class Training:
    """ResNet-18, in training."""

    def __init__(self, make: Make = sgd, batch: int = 16) -> None:
        torch.manual_seed(0)
        self.model = ResNet18(width=8)
        self.optimizer = make(self.model)
        self.x = torch.randn(batch, 1, 28, 28)
        self.y = torch.randint(0, 10, (batch,))

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @property
    def planner(self):
        return opener_of(self.model).planner

    def fit(self, plan: Plan | None, budget: int | None = None, **settings) -> None:
        budget = plan.peak if budget is None else budget
        settings = {"min_nbytes": MIN_NBYTES, "optimizer": self.optimizer, **settings}
        er.fit(self.model, budget=budget, plan=plan, **settings)


@cache
def plan_of(make: Make = sgd, share: float = 0.7, **settings) -> Plan:
    training = Training(make)
    training.step()
    return planned(er.measure(training.step, min_nbytes=MIN_NBYTES), share, **settings)


def planned(profile: Profile, share: float, **settings) -> Plan:
    """Within a share of what a plain step takes beside what stands before it, or the least."""
    plain = er.plan(profile, budget=1 << 40).plain_peak
    budget = profile.static + int(share * (plain - profile.static))
    try:
        return er.plan(profile, budget=budget, **settings)
    except BudgetTooSmall as error:
        return er.plan(profile, budget=error.least_nbytes, **settings)


@pytest.mark.sampled(2)
@OPTIMIZERS
@pytest.mark.parametrize("recompute", [True, False])
def test_it_is_followed_from_the_first_step_to_the_very_bits(make: Make, recompute: bool) -> None:
    plan = plan_of(make, 0.85, exact=True, recompute=recompute)
    plain, given = Training(make), Training(make)
    given.fit(plan, budget=int(1.02 * plan.peak))
    losses, settings = [], []
    for _ in range(4):
        losses.append(given.step())
        settings.append(given.planner.setting)
    assert set(settings) == {"plan"}
    assert given.planner.settled
    assert given.planner.plan is given.planner.given
    assert torch.equal(torch.stack(losses), torch.stack([plain.step() for _ in range(4)]))
    for mine, other in zip(given.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    er.release(given.model)


def test_a_step_of_it_is_run_once_and_stays_inside() -> None:
    plan = plan_of(sgd, 0.7, exact=True)
    training, forwards = Training(), []
    training.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    budget = int(1.02 * plan.peak)
    training.fit(plan, budget=budget)
    static = sum(t.nbytes for t in (*training.model.parameters(), *training.model.buffers()))
    assert static + er.peak(training.step) <= budget
    assert len(forwards) == 1
    er.release(training.model)


def test_a_plan_of_a_file_and_a_lossy_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lossy = plan_of(sgd, 0.5, exact=False)
    lossy.save(tmp_path / "plan.json")
    training = Training()
    training.fit(Plan.load(tmp_path / "plan.json"), budget=int(1.05 * lossy.peak))
    losses = [float(training.step()) for _ in range(3)]
    assert all(loss < 5 for loss in losses)
    er.release(training.model)
    (said,) = (one for one in caplog.messages if "lossy codes" in one)
    assert "by the plan that was given, some saved tensors are stored in lossy codes" in said


def test_a_plan_of_another_model_is_not_trusted() -> None:
    x = torch.randint(0, 256, (4, 64))
    gpt = GPT(width=32, depth=2, context=64)
    profile = er.measure(lambda: gpt(x).square().mean().backward(), min_nbytes=MIN_NBYTES)
    plain, other = Training(adamw), Training(adamw)
    stranger = planned(profile, 0.8)
    other.fit(stranger, budget=1 << 30)
    losses = [other.step() for _ in range(4)]
    assert torch.equal(torch.stack(losses), torch.stack([plain.step() for _ in range(4)]))
    assert other.planner.given is None
    er.release(other.model)


def test_a_plan_that_takes_more_than_it_says_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    plan, tighter = plan_of(sgd, 1.2, exact=True), plan_of(sgd, 0.7, exact=True)
    training = Training()
    static = sum(t.nbytes for t in (*training.model.parameters(), *training.model.buffers()))
    training.step()
    budget = int(0.8 * (static + er.peak(training.step)))
    assert tighter.peak < plan.peak
    with caplog.at_level(logging.WARNING, "elbowroom"):
        training.fit(replace(plan, peak=budget), budget=budget)
        for _ in range(5):
            training.step()
    assert "the plan that was given does" in caplog.text
    static = sum(t.nbytes for t in (*training.model.parameters(), *training.model.buffers()))
    assert static + er.peak(training.step) <= budget
    er.release(training.model)


def test_what_was_found_the_largest_can_be_trained_with() -> None:
    """Without a plan, fit knows less of its first step, and may refuse the last few."""
    probe = Training()
    made = {"budget": 6 << 20, "min_nbytes": MIN_NBYTES, "exact": True}
    found = er.largest_batch(
        probe.model,
        lambda n: (torch.randn(n, 1, 28, 28), torch.randint(0, 10, (n,))),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=probe.optimizer,
        **made,
    )
    training = Training(batch=found.batch)
    training.fit(found.plan, **made)
    static = sum(t.nbytes for t in (*training.model.parameters(), *training.model.buffers()))
    for _ in range(3):
        assert static + er.peak(training.step) <= 1.01 * (6 << 20)
    er.release(training.model)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"budget": 1 << 20}, "more than the budget of 1.00 MiB"),
        ({"exact": True}, "exact=True allows none"),
        ({"worst": torch.zeros(1)}, "give one of them"),
        ({"noise": 0.1}, "made without measuring its own"),
    ],
)
def test_impossible_ones_are_refused(settings: dict, says: str) -> None:
    plan = plan_of(sgd, 0.5, exact=False)
    assert not plan.exact
    with pytest.raises(PlanError, match=says):
        Training().fit(plan, **{"budget": 1 << 30, **settings})
    with pytest.raises(PlanError, match=r"it is a plan from er\.plan or"):
        Training().fit("plan.json", budget=1 << 30)  # type: ignore[arg-type]


def test_a_first_step_that_makes_states_is_measured_as_the_plan_runs(caplog):
    """Written down, its convolutions would take no turns, and more than the plan says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3))

    def batch_of(n: int) -> Tensor:
        return torch.randn(n, 3, 32, 32)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    budget, optimizer = 80 << 20, adamw(model)
    found = er.largest_batch(
        model, batch_of, budget=budget, loss=loss_of, optimizer=optimizer, exact=False
    )
    assert found.predicted_nbytes == found.plan.peak
    x = batch_of(found.batch)
    er.fit(model, budget=budget, plan=found.plan, optimizer=optimizer, exact=False)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, x).backward()
        optimizer.step()
    assert "does not fit" not in caplog.text
    assert opener_of(model).planner.plan.peak == found.plan.peak
    er.release(model)


def test_an_exact_plan_that_is_a_little_above_is_corrected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training()
    training.step()
    profile = er.measure(training.step, min_nbytes=MIN_NBYTES)
    plan = er.plan(profile, budget=profile.peak, exact=True, recompute=False)

    def trained(budget: int, plan: Plan, steps: int) -> Fitting:
        one = Training()
        settings = {"exact": True, "plan": plan, "min_nbytes": MIN_NBYTES}
        er.fit(one.model, budget=budget, optimizer=one.optimizer, **settings)  # type: ignore[arg-type]
        for _ in range(steps):
            one.step()
        fitting = opener_of(one.model)
        assert isinstance(fitting, Fitting)
        fitting.finish()
        er.release(one.model)
        return fitting

    peak = trained(2 * profile.peak, plan, 2).peak_nbytes
    assert peak is not None
    budget = int(0.985 * peak)
    with caplog.at_level(logging.WARNING, "elbowroom"):
        # Which plan is cheapest goes by measured seconds; of some, a profiled step takes far more.
        near = replace(plan, peak=min(plan.peak, budget), profiled_peak=budget)
        fitting = trained(budget, near, 7)
    assert "another one is made" not in caplog.text
    assert fitting.planner.profile is not None
    assert fitting.peak_nbytes is not None
    assert fitting.peak_nbytes <= budget


class Dropping(nn.Module):
    """Attention with dropout, which torch composes of smaller ops on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).view(8, 128, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def test_a_plan_that_keeps_all_is_followed_where_torch_composes_attention(tmp_path):
    """Torch's own takes more than the plan knows of, so hooks cannot be left out."""
    net, x = Dropping(), torch.randn(8, 128, 32)

    def step() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    profile = er.measure(step)
    path = tmp_path / "plan.json"
    er.plan(profile, budget=int(1.02 * profile.peak)).save(path)
    plan = er.Plan.load(path)
    assert all(line.action == "keep" for line in plan.lines)
    net.zero_grad()

    def followed() -> None:
        with er.following(plan):
            loss = net(x).square().mean()
        loss.backward()

    assert er.peak(followed) <= plan.peak - profile.static + 65536
    net.zero_grad()
    assert er.peak(step) > 1.1 * (plan.peak - profile.static)
