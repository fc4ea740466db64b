"""Convolutions that take turns: less memory, and plans that say so."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er
from elbowroom.plan.profile import Profile
from elbowroom.plan.site import Reads
from elbowroom.runtime import direct as table
from elbowroom.runtime.replay.saving_context import forget_all

Context = Callable[[], AbstractContextManager[Any]]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
LAYOUTS = pytest.mark.parametrize("layout", list(FORMATS))
BATCH = 16


# What oneDNN takes for its work depends on how many threads there are.
pytestmark = pytest.mark.usefixtures("one_thread")


class Training:
    """Inputs of convolutions of 8 and 16 MiB, so that they take turns."""

    def __init__(self, layout: str) -> None:
        torch.manual_seed(0)

        def stage(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
            conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

        layers = [*stage(1, 16), *stage(16, 32), *stage(32, 16), *stage(16, 8), *stage(8, 16, 4)]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 32 * 32, 10))
        self.net = net.to(memory_format=FORMATS[layout])
        self.x, self.y = torch.randn(BATCH, 1, 128, 128), torch.randint(0, 10, (BATCH,))

    def step(self, context: Context = nullcontext) -> None:
        with context():
            loss = F.cross_entropy(self.net(self.x), self.y)
        loss.backward()
        self.net.zero_grad(set_to_none=True)

    def peak(self, context: Context = nullcontext) -> int:
        self.step(context)
        return er.peak(lambda: self.step(context))


@cache
def profiled(layout: str) -> Profile:
    return er.measure(Training(layout).step)


@LAYOUTS
def test_a_step_takes_less(layout, monkeypatch):
    training = Training(layout)
    turns = training.peak(lambda: er.saving("dither", levels=8))
    monkeypatch.delitem(table._OPS, F.conv2d)
    forget_all()
    at_once = training.peak(lambda: er.saving("dither", levels=8))
    assert turns < (0.75 if layout == "contiguous" else 0.9) * at_once
    assert turns < training.peak() / 2


@pytest.mark.sampled(2)
@LAYOUTS
@pytest.mark.parametrize("share", [0.85, 0.75, 0.65, 0.55, 0.5])
def test_plans_know_it(layout, share):
    profile = profiled(layout)
    assert any(s.site.reads is Reads.SAMPLES for storage in profile.storages for s in storage.saves)
    budget = profile.static + int(share * (profile.peak - profile.static))
    plan = er.plan(profile, budget=budget, exact=False, recompute=False)
    measured = profile.static + Training(layout).peak(lambda: er.following(plan))
    assert plan.peak == pytest.approx(measured, rel=0.05), str(plan)
