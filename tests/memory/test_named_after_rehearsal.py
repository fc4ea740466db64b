"""A budget that a refused forward names by an estimate holds when it is given.

Such a forward follows the plan of the least estimated peak, to be measured, and holds more than the
budget before there is anything to measure.
"""

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.measure import peak


class Cells(nn.Module):
    """Cells of two kinds, step by step: no exact plan saves anything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRUCell(32, 128), nn.LSTMCell(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        h = a = c = x.new_zeros(len(x), 128)
        found = []
        for t in range(x.shape[1]):
            h = self.first(x[:, t], h)
            a, c = self.second(h, (a, c))
            found.append(a)
        return torch.stack(found, 1).mean(1)


def volumes() -> nn.Module:
    """Convolutions of one volume, whose windows torch writes out: they take most of the memory."""
    layers = [(2, 8, 1), (8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 16, 1)]
    blocks = [
        nn.Sequential(nn.Conv3d(a, b, 3, s, 1), nn.GroupNorm(4, b), nn.ReLU()) for a, b, s in layers
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16 * 8**3, 4))


@pytest.mark.parametrize("exact", [True, None])
def test_windows_of_volumes_are_part_of_what_is_named(exact):
    torch.manual_seed(0)
    model, x = volumes(), torch.randn(1, 2, 16, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    static = sum(p.nbytes for p in model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    plain = static + peak(step)
    er.fit(model, budget=2 * static + 1000, optimizer=optimizer, exact=exact)
    with pytest.raises(er.errors.BudgetTooSmall) as refused:
        step()
    named = refused.value.least_nbytes
    er.release(model)
    er.fit(model, budget=named, optimizer=optimizer, exact=exact)
    for _ in range(8):
        step()
    assert static + peak(step) <= named <= 1.1 * plain
    er.release(model)


@pytest.mark.parametrize("share", [0.72, 0.8])
def test_what_a_forward_is_refused_with_includes_its_transients(share):
    torch.manual_seed(0)
    x, model = torch.randn(64, 12, 32), Cells()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    weights = sum(p.nbytes for p in model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    static = 3 * weights
    plain = static + peak(step)
    er.fit(model, budget=int(share * plain), optimizer=optimizer, exact=True)

    def steps() -> None:
        for _ in range(4):
            step()

    with pytest.raises(er.errors.BudgetTooSmall) as refused:
        steps()
    named = refused.value.least_nbytes
    er.release(model)
    optimizer.zero_grad()
    er.fit(model, budget=named, optimizer=optimizer, exact=True)
    for _ in range(6):
        step()
    assert static + peak(step) <= named <= 1.15 * plain
