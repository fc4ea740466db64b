"""Steps of compiled models are measured: a plan that takes too much is made anew, or it is said."""

import gc
import shutil
import warnings
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.compiled import counted
from elbowroom.fitting.compiled_plans import Plans
from elbowroom.fitting.compiled_steps import MeasuredStep
from elbowroom.fitting.twin import _leaves_alone
from elbowroom.fitting.uncompiled import Examined
from elbowroom.fitting.why_eager import NothingCompiled
from elbowroom.measure.background import Background
from elbowroom.measure.peak import mark, memory_curve

needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler"
)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class FakeTwin:
    """Plans that were predicted to leave 10 bytes unused."""

    limit, stands = 100, False

    def unused_nbytes(self) -> int:
        return 10


def plans_of(monkeypatch, *peaks: tuple[int, bool]) -> tuple[Plans, Any, list[FakeTwin]]:
    """Plans for a budget of 1000 bytes, and what steps take; the last twin has run each."""
    state = SimpleNamespace()
    options = SimpleNamespace(budget_nbytes=1000)
    room = SimpleNamespace(model_state=state, options=options, unplanned_nbytes=0)
    plans, twins = Plans(room), [FakeTwin()]  # type: ignore[arg-type]
    plans.twins[:] = twins  # type: ignore[assignment]
    waiting = list(peaks)

    def end() -> MeasuredStep | None:
        peak, is_settled = waiting.pop(0)
        return MeasuredStep(peak, plans.twins[-1], 50, is_settled)

    monkeypatch.setattr(plans.measured, "end", end)
    return plans, room, twins


def test_a_settled_step_above_the_budget_makes_all_plans_anew_for_less(monkeypatch) -> None:
    plans, room, _ = plans_of(monkeypatch, (1030, True), (1000, True))
    plans.serve("kind")
    plans.judge()
    assert not plans.twins
    assert not plans.serves("kind")
    assert room.unplanned_nbytes == 40  # what was too much, and what was predicted to be left
    plans.twins.append(FakeTwin())  # type: ignore[arg-type]
    plans.judge()  # no word: the new plan is kept
    assert not plans.are_corrected
    assert not plans.measured.wants(plans.twins[0], 50)


def test_where_no_plan_takes_less_the_first_comes_back_and_a_warning_says_what_it_takes(
    monkeypatch,
) -> None:
    plans, room, twins = plans_of(monkeypatch, (1030, True))
    plans.serve("kind")
    plans.judge()
    with pytest.warns(UserWarning, match=r"takes 1\.0\d KiB \(measured\).* no plan takes less"):
        plans.take_back()
    assert plans.twins == twins
    assert plans.serves("kind")
    assert room.unplanned_nbytes == 0
    assert not plans.measured.wants(plans.twins[0], 50)
    assert plans.measured.wants(plans.twins[0], 51)


def test_where_a_correction_is_refused_the_least_is_planned_and_judged(monkeypatch) -> None:
    plans, room, _ = plans_of(monkeypatch, (1030, True), (1012, True))
    plans.judge()
    assert not plans.try_least(1030)  # no less than what was measured
    assert plans.try_least(1015)
    assert room.unplanned_nbytes == 25
    plans.twins.append(FakeTwin())  # type: ignore[arg-type]
    assert not plans.try_least(1010)  # once
    with pytest.warns(UserWarning, match=r"takes 1,?012 B \(measured\)"):
        plans.judge()
    assert not plans.are_corrected


def test_plans_for_the_least_that_take_no_less_give_way_to_those_before(monkeypatch) -> None:
    plans, room, twins = plans_of(monkeypatch, (1030, True), (1030, True))
    plans.judge()
    assert plans.try_least(1015)
    plans.twins.append(FakeTwin())  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"takes 1\.01 KiB \(measured\)"):
        plans.judge()
    assert plans.twins == twins
    assert room.unplanned_nbytes == 0


def test_a_first_step_may_take_a_twentieth_more_and_is_said_above(monkeypatch) -> None:
    plans, room, _ = plans_of(monkeypatch, (1050, False), (1051, False))
    plans.judge()
    with pytest.warns(UserWarning, match="a step in which a model was compiled has taken"):
        plans.judge()
    assert plans.twins
    assert room.unplanned_nbytes == 0


def test_what_a_region_saves_in_its_first_run_is_dropped_too() -> None:
    """It stayed, as the hooks that count it are its own: 1.93 of the budget with two of them."""
    w = torch.ones(1000, requires_grad=True)
    regions = [counted(lambda x: x * w), counted(lambda x: x * w)]
    examined = Examined(9000, [w])
    with examined:
        out = [regions[0](torch.ones(1000)), regions[1](torch.ones(1000))]
        assert not examined.is_over
        out.append(regions[0](torch.ones(1000)))  # known to save as much: dropped as it begins
    assert examined.is_over
    with pytest.raises(NothingCompiled):
        out[0].sum().backward()


@pytest.mark.parametrize("changes", [False, True])
def test_a_graph_that_changes_a_large_input_is_known(changes: bool) -> None:
    found = []

    def backend(gm, _):
        found.append(_leaves_alone(gm))
        return gm

    def step(x: Tensor, small: Tensor) -> Tensor:
        small.add_(1)
        return x[0].mul_(2) if changes else x[0].mul(2)

    torch._dynamo.reset()
    torch.compile(step, backend=backend)(torch.ones(2, 1 << 15), torch.ones(4))
    assert found == [not changes]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(f for _ in range(6) for f in (nn.Linear(32, 32), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def refused() -> tuple[nn.Module, Tensor, int]:
    """Returns a model, its input, and the least budget that a refusal has named for both."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = Layers(), torch.randn(2048, 32)
    with pytest.raises(er.errors.BudgetTooSmall) as least:
        er.fit(torch.compile(net), budget="400 KiB", exact=True)(x)
    er.release(net)
    torch._dynamo.reset()
    return net, x, least.value.least_nbytes


@needs_a_compiler
def test_a_loss_outside_of_the_graph_is_said_and_nothing_stays_of_the_refusal() -> None:
    net, x, least = refused()
    fitted = er.fit(torch.compile(net), budget=least, exact=True)
    peaks, gc_was_on = [], gc.isenabled()
    gc.disable()  # what a cycle holds stays then

    def steps() -> None:
        for n in range(5):
            mark(f"step {n}")
            fitted(x).square().mean().backward()
            net.zero_grad()
        mark("step 5")

    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            curve = memory_curve(steps)
    finally:
        if gc_was_on:
            gc.enable()
    said = [str(one.message) for one in seen if issubclass(one.category, UserWarning)]
    assert sum("(measured)" in one for one in said) == 1
    at = dict(curve.marks)
    for n in range(5):
        within = (at[f"step {n}"], at[f"step {n + 1}"])
        levels = zip(curve.times_s, curve.nbytes, strict=True)
        peaks.append(max(level for t, level in levels if within[0] <= t <= within[1]))
    assert max(peaks) <= 1.01 * peaks[1]  # the first, too: no copy of the input stands in it
    assert max(peaks) > least - sum(p.nbytes for p in net.parameters())


@needs_a_compiler
def test_a_refused_micro_batch_lets_other_models_be_measured() -> None:
    net, x, least = refused()
    fitted = er.fit(torch.compile(net), budget=least, exact=True)
    fitted(x).sum().backward()
    with pytest.raises(er.errors.BudgetTooSmall):  # beside gradients
        fitted(x)
    assert Background.running is None


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (f for _ in range(10) for f in (nn.Linear(64, 64), nn.GELU()))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@needs_a_compiler
def test_the_noise_of_codes_is_measured_in_a_settled_step(caplog) -> None:
    """It was estimated from sizes alone."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = Deep(), torch.randn(1024, 64)
    (exact,) = gradients_of(net, net, x, 1)
    with pytest.raises(er.errors.BudgetTooSmall) as least:
        er.fit(torch.compile(net), budget="400 KiB", exact=True)(x)
    er.release(net)
    torch._dynamo.reset()
    budget = int(0.7 * least.value.least_nbytes)
    fitted = er.fit(torch.compile(net), budget=budget)
    with caplog.at_level("INFO", logger="elbowroom"):
        gradients_of(fitted, net, x, 2)
        curve = memory_curve(lambda: gradients_of(fitted, net, x, 4, keep=False))
        after = gradients_of(fitted, net, x, 6)
    begins = [*(t for _, t in curve.marks), inf]
    levels = list(zip(curve.times_s, curve.nbytes, strict=True))
    peaks = [
        max(level for t, level in levels if begin <= t <= end) for begin, end in pairwise(begins)
    ]
    static = sum(p.nbytes for p in net.parameters())
    assert max(peaks) + static <= 1.02 * (min(peaks) + static)  # the one that measures, too
    said = [r.getMessage() for r in caplog.records if "measured in one step" in r.getMessage()]
    assert len(said) == 1
    true = [float((g - exact).square().sum() / exact.square().sum()) for g in after]
    assert er.summary(fitted).noise == pytest.approx(sum(true) / len(true), rel=0.3)


def gradients_of(
    fitted: nn.Module,
    net: nn.Module,
    x: Tensor,
    steps: int,
    *,
    keep: bool = True,
) -> list[Tensor]:
    found = []
    for n in range(steps):
        mark(f"step {n}")
        fitted(x).backward()
        if keep:
            found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        net.zero_grad()
    return found
