"""What a program does after the optimizer's step is no part of the step, and is not silent."""

import logging
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.measure.peak import MemoryCurve
from elbowroom.units import parse_nbytes

STEPS = 6


class Training:
    """A perceptron whose budget is what a step takes, and a bit more."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = (layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU()))
        self.net = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.x = torch.randn(256, 128)
        self.step()
        self.held_nbytes = sum(p.nbytes for p in self.net.parameters())
        self.budget = self.held_nbytes + er.peak(self.step) + (64 << 10)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.x).square().mean().backward()
        self.optimizer.step()

    def run(self, afterwards: Callable[[], object]) -> None:
        er.fit(self.net, budget=self.budget, optimizer=self.optimizer, exact=True)
        for _ in range(STEPS):
            self.step()
            afterwards()
        er.release(self.net)


def metrics(nbytes: int) -> Callable[[], object]:
    """Something that takes so many bytes and is gone again."""
    return lambda: torch.ones(nbytes, dtype=torch.uint8)


def test_what_follows_the_step_of_the_optimizer_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training()
    training.run(metrics(training.budget))
    said = re.findall(r"after the optimizer.s step, the program took (\S+ \S+) ", caplog.text)
    assert len(said) == 1
    # Gradients may have gone or not; the tensor and the weights are there.
    least = training.budget + training.held_nbytes
    assert 0.99 * least <= parse_nbytes(said[0]) <= 1.01 * (least + training.held_nbytes)


def test_little_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "elbowroom")
    Training().run(metrics(32 << 10))
    assert "after the optimizer" not in caplog.text


def test_a_copy_that_is_held_is_said_as_it_is_made(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    held: list[Tensor] = []

    def average() -> None:
        if not held:
            held.append(torch.zeros(training.budget, dtype=torch.uint8))

    training.run(average)
    assert caplog.text.count("after the optimizer") == 1


def test_the_curve_after_a_mark() -> None:
    curve = MemoryCurve((0.0, 1.0, 2.0, 3.0), (5, 9, 4, 7), (("left", 1.5),))
    assert curve.after("left").nbytes == (4, 7)
    assert curve.until("left").nbytes == (5, 9)
    assert curve.after("nothing").nbytes == ()
