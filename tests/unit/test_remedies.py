"""Whether codes would help is told for a refusal without a measurement of any."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.plan.make import make_plan
from elbowroom.plan.profile import Profile


class Unasked(dict[str, float]):
    """Rates that would have to be measured, which compiles kernels on a GPU."""

    def __missing__(self, name: str) -> float:
        raise AssertionError(f"'{name}' was asked for")


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    x = torch.randn(512, 64)
    return er.measure(lambda: net(x).square().mean().backward())


def test_an_exact_refusal_names_codes_and_measures_none(profile: Profile) -> None:
    exactly = Unasked({k: v for k, v in profile.rates.items() if "dither" not in k})
    with pytest.raises(BudgetTooSmall, match="Allow lossy codes with exact=None"):
        make_plan(replace(profile, rates=exactly), budget_of(profile, 0.2), exact=True)


def budget_of(profile: Profile, share: float) -> int:
    """A budget: what stands before the step, which earlier tests add to, and a share of the rest.

    share: below 0, of what stands
    """
    of = profile.static if share < 0 else profile.peak - profile.static
    return profile.static + int(share * of)


@pytest.mark.parametrize("share", [-0.1, 0.1])
def test_what_stands_before_the_step_is_helped_by_no_smaller_batch(
    profile: Profile, share: float
) -> None:
    """A ViT with 43.1 MiB of weights and states was told to halve its batch for 42.9 MiB."""
    assert profile.static
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(profile, budget_of(profile, share), exact=True)
    for remedy in ("alve the batch", "exact=None"):
        assert (remedy in str(refused.value)) == (share > 0), str(refused.value)
    assert "ive budget=" in str(refused.value)
