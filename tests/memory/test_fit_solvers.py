"""`er.fit` with the rules of a paper in place of the search."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.demo.models import GPT, ResNet18, UNet
from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.measure import memory_curve

STEPS = 12

pytestmark = pytest.mark.usefixtures("one_thread")
Step = Callable[[nn.Module], Tensor]


def resnet_loss(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 16 * 784).view(16, 1, 28, 28)
    return F.cross_entropy(model(x), torch.arange(16) % 10)


def unet_loss(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 8 * 784).view(8, 1, 28, 28)
    return model(x).square().mean()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "gpt": (lambda: GPT(64, 4, 64, 0.0), lambda model: model(_tokens()).square().mean()),
    "resnet": (lambda: ResNet18(8), resnet_loss),
    "unet": (lambda: UNet(8), unet_loss),
}


def _tokens() -> Tensor:
    return torch.arange(8 * 64).view(8, 64) % 251


def trained(name: str, budget: int | None) -> tuple[nn.Module, list[float]]:
    make, loss_of = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if budget is not None:
        model = er.fit(
            model, budget=budget, optimizer=optimizer, exact=True, offload="file", solver="delta"
        )
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def plain_peak(name: str) -> int:
    make, loss_of = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    curve = memory_curve(lambda: loss_of(model).backward())
    return curve.peak_nbytes + sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_delta_trains_with_the_bits_of_plain(name: str) -> None:
    model, losses = trained(name, int(0.85 * plain_peak(name)))
    er.release(model)
    assert losses == trained(name, None)[1]


@pytest.mark.parametrize("name", NETWORKS)
def test_what_delta_plans_it_plans_with_more(name: str) -> None:
    """And what it names holds, of the same profile, at every eighth of plain's peak."""
    make, loss_of = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    profile = er.measure(lambda: loss_of(model).backward(), min_nbytes=1024)
    named, planned = set(), False
    for budget in range(profile.peak // 8, profile.peak, profile.peak // 8):
        try:
            er.plan(profile, budget=budget, exact=True, solver="delta")
            planned = True
        except BudgetTooSmall as refused:
            assert not planned
            named.add(refused.least_nbytes)
    (least,) = named
    assert er.plan(profile, budget=least, exact=True, solver="delta").peak == least
    with pytest.raises(BudgetTooSmall):
        er.plan(profile, budget=least - 1, exact=True, solver="delta")


def test_delta_fits_a_gpt_at_half_of_its_peak() -> None:
    budget = plain_peak("gpt") // 2
    model, losses = trained("gpt", budget)
    assert er.log_to()(model, 0)["memory/peak_mib"] <= budget / 2**20
    er.release(model)
    assert losses == trained("gpt", None)[1]


def test_rules_that_take_no_codes_say_so() -> None:
    model = nn.Linear(2, 2)
    for solver in ("dtr", "capuchin"):
        for asked in ({"exact": False}, {"codecs": ["dither"]}, {"noise": 0.1}):
            with pytest.raises(PlanError, match="takes no codes, so "):
                er.fit(model, budget="1 GiB", solver=solver, **asked)  # type: ignore[arg-type]
    make, loss_of = NETWORKS["unet"]
    torch.manual_seed(0)
    unet = make()
    profile = er.measure(lambda: loss_of(unet).backward(), min_nbytes=1024)
    with pytest.raises(BudgetTooSmall) as refused:
        er.plan(profile, budget=1 << 20, solver="dtr")
    assert "exact=None" not in str(refused.value)
    least = refused.value.least_nbytes
    assert er.plan(profile, budget=least, solver="dtr").exact


def test_a_refusal_of_a_paper_s_rules_names_them() -> None:
    make, loss_of = NETWORKS["unet"]
    model = make()
    profile = er.measure(lambda: loss_of(model).backward(), min_nbytes=1024)
    budget = profile.static + (1 << 18)  # earlier tests may have left something that is held
    for solver in ("delta", "dtr"):
        with pytest.raises(BudgetTooSmall, match=f"[Ll]eave out solver='{solver}'"):
            er.plan(profile, budget=budget, exact=True, solver=solver)
    with pytest.raises(BudgetTooSmall) as refused:
        er.plan(profile, budget=budget, exact=True)
    assert "solver" not in str(refused.value)
