"""Released gradients are counted as they are, few at a time, in what is measured and planned."""

import gc

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.fitting.model_state import ModelState, storage_nbytes
from elbowroom.optim.release import TOGETHER_NBYTES
from elbowroom.runtime.attach import attached

WIDTH, BLOCKS = 128, 8
NEAR = 0.05  # of the measured peak


@pytest.fixture(autouse=True)
def collected(one_thread: None) -> None:
    gc.collect()  # a model of another test may have died in a cycle


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Step:
    """A training step of a stack of perceptrons; `held_nbytes` stand between two of them."""

    def __init__(self, *, released: bool, rows: int) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(block() for _ in range(BLOCKS)))
        self.optimizer = er.optim.AdamW(self.net.parameters(), lr=1e-3, state="int8")
        if released:
            self.optimizer.release_gradients()
        self.x = torch.randn(rows, WIDTH)

    def __call__(self) -> Tensor:
        loss = self.net(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def held_nbytes(self) -> int:
        return storage_nbytes(ModelState(self.net, self.optimizer).tensors())


def test_all_gradients_but_two_are_never_there():
    peaks = []
    for released in (False, True):
        step = Step(released=released, rows=2)
        step()
        step()
        peaks.append(er.peak(step))
    gradients = sum(p.nbytes for p in step.net.parameters())
    largest = max(p.nbytes for p in step.net.parameters())
    assert peaks[0] >= gradients
    assert peaks[0] - peaks[1] >= gradients - 2 * largest


def test_a_profile_and_its_plans_say_the_peak():
    step = Step(released=True, rows=512)
    profile = er.measure(step)
    others = profile.static - step.held_nbytes  # what other tests have left behind
    measured = profile.static + er.peak(step)
    plain = er.plan(profile, budget="1 GiB").plain_peak
    assert abs(plain - measured) <= NEAR * measured
    for share in (0.9, 0.7):
        budget = int(profile.static + share * (measured - profile.static))
        plan = er.plan(profile, budget=budget, exact=True)

        def following(plan=plan) -> None:
            with er.following(plan):
                loss = step.net(step.x).square().mean()
            loss.backward()
            step.optimizer.step()
            step.optimizer.zero_grad()

        following()
        peak = others + step.held_nbytes + er.peak(following)
        assert peak <= 1.01 * budget
        assert abs(plan.peak - peak) <= NEAR * peak


def test_a_budget_counts_few_released_gradients_before_they_are_born():
    step = Step(released=True, rows=2)
    model_state = ModelState(step.net, step.optimizer)
    assert model_state.unallocated_gradient_nbytes() == 4 * WIDTH * WIDTH * 4 + TOGETHER_NBYTES
    step.optimizer.released.remove()
    assert model_state.unallocated_gradient_nbytes() == sum(p.nbytes for p in step.net.parameters())


def test_fit_keeps_a_budget_in_which_all_gradients_would_not_fit():
    plain = Step(released=True, rows=256)
    losses = [plain() for _ in range(8)]
    peak = plain.held_nbytes + er.peak(plain)
    step = Step(released=True, rows=256)
    budget = int(plain.held_nbytes + 0.8 * (peak - plain.held_nbytes))
    er.fit(step.net, budget=budget, optimizer=step.optimizer, exact=True, min_nbytes=4096)
    assert [step() for _ in range(8)] == losses
    measured = step.held_nbytes + er.peak(step)
    assert measured <= budget
    (fitting,) = [one for model, one in attached() if model is step.net]
    assert abs(fitting.planner.plan.peak - measured) <= NEAR * measured
    er.release(step.net)
