"""Profiles with corrected prices, and what plans pay of each class."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.corrected import choice_of, corrected, seconds_by_class
from elbowroom.plan.factors import CLASSES, CODES, LINKS, MODULES, REBUILDS, STEP, TENSORS
from elbowroom.plan.problem import levels
from elbowroom.plan.profile import Profile
from elbowroom.plan.registered import chosen_settings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(1024, 64)
    return er.measure(lambda: net(x).square().mean().backward())


def within(profile: Profile, share: float) -> int:
    return profile.static + int(share * (profile.peak - profile.static))


WAYS: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "exact, without modules": {"exact": True, "recompute": False},
    "codes": {"exact": False, "recompute": False},
    "all": {"exact": False},
    "one codec": {"exact": False, "codecs": ["dither"]},
}


def planned(profile: Profile, share: float, **ways: Any) -> er.Plan:
    try:
        return er.plan(profile, budget=within(profile, share), **ways)
    except er.errors.BudgetTooSmall as error:
        return er.plan(profile, budget=error.least_nbytes, **ways)


@pytest.mark.parametrize("share", [0.8, 0.5])
@pytest.mark.parametrize("way", WAYS)
def test_classes_make_up_the_seconds_of_a_plan(profile: Profile, way: str, share: float) -> None:
    plan = planned(profile, share, **WAYS[way])
    codecs = chosen_settings(WAYS[way].get("codecs"))
    paid = seconds_by_class(profile, plan, codecs=codecs)
    assert paid is not None
    assert sum(paid.values()) == pytest.approx(plan.seconds, rel=1e-6)
    assert set(paid) == set(CLASSES)
    assert paid[STEP] == profile.seconds
    assert paid[LINKS] == 0
    assert (paid[MODULES] > 0) is bool(plan.recompute)
    if way in ("codes", "one codec") and plan.is_lossy:
        assert min(paid[CODES], paid[TENSORS]) > 0


def test_prices_of_a_class_scale_what_is_paid_of_it(profile: Profile) -> None:
    plan = planned(profile, 0.5, exact=False)
    paid = seconds_by_class(profile, plan)
    factors = {CODES: 1.5, TENSORS: 0.5, REBUILDS: 2.0, MODULES: 3.0, STEP: 1.1}
    again = seconds_by_class(corrected(profile, factors), plan)
    assert paid is not None
    assert again is not None
    assert again == pytest.approx({name: factors.get(name, 1) * s for name, s in paid.items()})


def test_memory_is_as_it_was_measured(profile: Profile) -> None:
    dear = corrected(profile, dict.fromkeys(CLASSES, 2.0))
    plan = planned(profile, 0.5, exact=False)
    for priced in (profile, dear):
        built = build_problem(priced, exact=False)
        choice = choice_of(priced, built, plan)
        assert choice is not None
        assert levels(built.problem, choice).max() == plan.peak


def test_a_plan_avoids_what_was_found_to_be_dear(profile: Profile) -> None:
    modules, codes = (
        planned(corrected(profile, {dear: 50.0, other: 0.02}), 0.6, exact=False)
        for dear, other in ((CODES, MODULES), (MODULES, CODES))
    )
    assert modules.recompute
    assert not codes.recompute
    assert codes.is_lossy


def test_a_plan_of_another_step_is_not_priced(profile: Profile) -> None:
    plan = planned(profile, 0.5, exact=False)
    strange = replace(plan, recompute=frozenset({"nowhere"}))
    assert seconds_by_class(profile, strange) is None
    assert seconds_by_class(profile, replace(plan, sites={}, recompute=frozenset())) is None


def test_rates_that_are_measured_later_are_corrected_too(profile: Profile) -> None:
    dear = corrected(profile, {CODES: 2.0, TENSORS: 3.0})
    name = "encode group, bits=3"
    assert dear.rates[name] == pytest.approx(profile.rates[name] / 2)
    assert dear.fixed_s.get("encode group") == pytest.approx(3 * profile.fixed_s["encode group"])
    assert dear.rates.get("no such rate", 7.0) == 7.0
