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
        make_plan(replace(profile, rates=exactly), profile.peak // 4, exact=True)
