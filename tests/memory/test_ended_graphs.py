"""A followed step lets go of a graph that ends before its forward does, as an examined one does.

What a quantization cuts off the loss lives as long as a variable of the model's. Its saved tensors
are gone when the script is written, but a step that kept them would hold more than was measured.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.measure import peak
from elbowroom.runtime.replay.replay import Replay
from elbowroom.runtime.replay.saving_context import forget_all

pytestmark = pytest.mark.usefixtures("one_thread")


class Quantizes(nn.Module):
    """The encoder's graph lives until the end of forward, and has no backward."""

    def __init__(self, act: Callable[[], nn.Module], norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
        for _ in range(4):
            layers += [norm(), act(), nn.Conv2d(16, 16, 3, padding=1)]
        self.encoder = nn.Sequential(*layers)
        self.decoder = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        codes = h.sigmoid().mul(255).round().byte()
        return self.decoder(codes.div(255.0).sub(0.5))


class Looks(Quantizes):
    """Two graphs end in the middle of forward, and what follows has one of the same kind."""

    def forward(self, x: Tensor) -> Tensor:
        self.encoder(x)
        h = self.encoder(x)
        scale = h.detach().abs().mean()
        del h
        return self.decoder(self.encoder(x) / (1 + scale))


NETS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: Quantizes(nn.ReLU, nn.Identity),
    "gelu": lambda: Quantizes(nn.GELU, nn.Identity),
    "batch norm, relu": lambda: Quantizes(nn.ReLU, lambda: nn.BatchNorm2d(16)),
    "group norm, silu": lambda: Quantizes(nn.SiLU, lambda: nn.GroupNorm(4, 16)),
    "looks": lambda: Looks(nn.ReLU, nn.Identity),
    "looks, batch norm": lambda: Looks(nn.ReLU, lambda: nn.BatchNorm2d(16)),
}
HOW: dict[str, dict[str, int]] = {"exact": {}, "lean": {}, "dither": {"bits": 4}}


@pytest.fixture
def diverges(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each replayed forward has left its script."""
    seen: list[bool] = []
    leave = Replay.__exit__

    def leaves(self: Replay, *error: object) -> None:
        leave(self, *error)  # type: ignore[arg-type]
        seen.append(self.diverged)

    monkeypatch.setattr(Replay, "__exit__", leaves)
    return seen


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("net", NETS)
def test_a_followed_step_peaks_where_an_examined_one_did(
    net: str, how: str, diverges: list[bool]
) -> None:
    torch.manual_seed(0)
    model, x = NETS[net](), torch.rand(2, 3, 32, 32)
    held: list[int] = []

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with er.saving(how, **HOW[how]) as saved:
            loss = F.mse_loss(model(x), x)
        held.append(saved.ledger.held_nbytes)
        loss.backward()

    def measured() -> int:
        model.zero_grad(set_to_none=True)
        gc.collect()
        return peak(step)

    forget_all()
    examined, *followed = (measured() for _ in range(3))
    forget_all()
    assert diverges == [False, False]
    assert max(followed) <= 1.02 * examined
    assert len(set(held)) == 1


@pytest.mark.parametrize("net", NETS)
def test_gradients_of_followed_steps_stay_exact(net: str, diverges: list[bool]) -> None:
    torch.manual_seed(0)
    model, x = NETS[net](), torch.rand(2, 3, 32, 32)

    def gradients(*, plain: bool) -> list[Tensor | None]:
        model.zero_grad(set_to_none=True)
        if plain:
            F.mse_loss(model(x), x).backward()
        else:
            with er.saving("exact"):
                loss = F.mse_loss(model(x), x)
            loss.backward()
        return [p.grad for p in model.parameters()]

    forget_all()
    wanted = gradients(plain=True)
    for _ in range(3):
        for grad, want in zip(gradients(plain=False), wanted, strict=True):
            assert (grad is None) == (want is None)
            assert want is None or torch.equal(grad, want)
    forget_all()
    assert diverges == [False, False]


@pytest.mark.parametrize("share", [0.6, 0.7])
def test_a_settled_fit_stays_within_its_budget(share: float) -> None:
    """At 0.7, plain training is predicted to fit, and takes 1.4 of the budget."""
    torch.manual_seed(0)
    model, x = NETS["gelu"](), torch.rand(4, 3, 64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    static = sum(p.nbytes for p in model.parameters())
    budget = static + int(share * peak(step))
    er.fit(model, budget=budget, optimizer=optimizer)
    for _ in range(12):
        step()
    gc.collect()
    assert static + peak(step) <= budget
    er.release(model)
