"""A step in which elbowroom's own node runs attention is a profile of torch's attention, too.

Torch's fused attention saves its result, and the node that runs again from codes does not. A plan
that keeps q, k and v holds the result, whatever the step did that it was made from.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.codecs import Dither
from elbowroom.measure.record import record
from elbowroom.plan.make import make_plan, plain_peak
from elbowroom.plan.policy import Exact, Lossy


class Attention(nn.Module):
    """Vectors [B, T, 64] -> the same, with a residual sum; its result is copied, as in most."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, tokens, 3, 4, width // 4)
        q, k, v = (part.contiguous() for part in heads.permute(2, 0, 3, 1, 4))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width).clone())


@pytest.fixture
def step(one_thread: None) -> Callable[[], None]:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Attention() for _ in range(4))), torch.randn(8, 64, 64)

    def run() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return run


@pytest.mark.parametrize("policy", [Exact(), Lossy(Dither(levels=16))], ids=["exact", "codes"])
def test_plain_training_is_known_from_a_step_with_codes(step, policy):
    profile = record(step, policy=policy, min_nbytes=4096)
    assert not profile.composes_attention
    assert plain_peak(profile) - profile.static == pytest.approx(er.peak(step), rel=0.03)


@pytest.mark.parametrize(("share", "recompute"), [(0.96, False), (0.7, True)])
def test_an_exact_plan_of_a_step_with_codes_takes_what_it_says(step, share, recompute):
    profile = record(step, policy=Lossy(Dither(levels=16)), min_nbytes=4096)
    free = plain_peak(profile) - profile.static
    plan = make_plan(profile, profile.static + int(share * free), exact=True, recompute=recompute)

    def followed() -> None:
        with er.following(plan, min_nbytes=4096):
            step()

    followed()
    assert plan.peak - profile.static == pytest.approx(er.peak(followed), rel=0.05)


def test_what_nobody_reads_adds_no_noise(step):
    coded = record(step, policy=Lossy(Dither(levels=16)), min_nbytes=4096)
    results = {one.saves[0].line for one in coded.storages if one.saves[0].site.nth < 0}
    assert len(results) == 1
    alone = replace(
        coded, storages=tuple(one for one in coded.storages if one.saves[0].site.nth < 0)
    )
    assert len(alone.storages) == 4
    plan = make_plan(alone, 1, exact=False, takes_least=True)
    assert sum(line.nbytes > line.held for line in plan.lines) == 4
    assert plan.noise == 0
