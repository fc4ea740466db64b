"""What the step of PyTorch's optimizers takes beside weights, gradients and states."""

import pytest
import torch
from torch import nn, optim

import elbowroom as er
from elbowroom.fitting.update_room import update_nbytes
from elbowroom.measure import peak

WAYS = {
    "Adam": (optim.Adam, {}),
    "Adam, decay": (optim.Adam, {"weight_decay": 0.1}),
    "Adam, amsgrad": (optim.Adam, {"amsgrad": True}),
    "AdamW": (optim.AdamW, {}),
    "Adamax": (optim.Adamax, {}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "SGD": (optim.SGD, {"momentum": 0.9}),
    "SGD, decay": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}, {}])
@pytest.mark.parametrize("name", WAYS)
def test_what_a_step_of_an_optimizer_takes_is_known(name, how):
    kind, given = WAYS[name]
    if "fused" in how and name.startswith(("Adamax", "NAdam", "RAdam")):
        pytest.skip("there is no fused one")
    parameters = [nn.Parameter(torch.randn(n, 64)) for n in (1000, 500, 250)]
    optimizer = kind(parameters, lr=0.1, **given, **how)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    took = peak(optimizer.step)
    assert 0.95 * took - 4096 <= update_nbytes([optimizer]) <= 1.05 * took


def test_a_budget_that_is_named_before_the_first_step_has_room_for_the_update():
    """The embedding's gradient and two tensors of its size stand when nothing is saved any more."""
    torch.manual_seed(0)
    layers = (layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU()))
    model = nn.Sequential(nn.Embedding(16_000, 64), *layers)
    optimizer = optim.AdamW(model.parameters(), foreach=False)
    x = torch.arange(8000)
    weights = sum(p.nbytes for p in model.parameters())
    er.fit(model, budget=int(4.2 * weights), optimizer=optimizer)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(er.errors.BudgetTooSmall) as refused:
        step()
    named = refused.value.least_nbytes
    er.release(model)
    optimizer.zero_grad()
    er.fit(model, budget=named, optimizer=optimizer)
    for _ in range(6):
        step()
    assert 3 * weights + peak(step) <= named <= 1.1 * (3 * weights + peak(step))
