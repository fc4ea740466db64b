"""`er.fit` with the rules of a paper in place of the search."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.demo.models import GPT, ResNet18, UNet
from elbowroom.errors import BudgetTooSmall
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


def test_a_refusal_of_a_paper_s_rules_names_them() -> None:
    make, loss_of = NETWORKS["unet"]
    model = make()
    profile = er.measure(lambda: loss_of(model).backward(), min_nbytes=1024)
    for solver in ("delta", "dtr"):
        with pytest.raises(BudgetTooSmall, match=f"[Ll]eave out solver='{solver}'"):
            er.plan(profile, budget=1 << 20, exact=True, solver=solver)
    with pytest.raises(BudgetTooSmall) as refused:
        er.plan(profile, budget=1 << 20, exact=True)
    assert "solver" not in str(refused.value)
