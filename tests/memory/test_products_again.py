"""Where nothing else fits, exact plans have every second linear layer of a chain run again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er
from elbowroom.errors import BudgetTooSmall

_WIDTH = 128


class _Chain(nn.Module):
    """A chain of layers that save nothing beside what the next one reads."""

    def __init__(self, act, layers=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers))
        self.head, self.act = nn.Linear(_WIDTH, 4), act

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return self.head(x)


def _trained(act, budget=None, steps=7, autocast=False):
    """Returns parameters after some steps, and the peak of the last one."""
    torch.manual_seed(0)
    model = _Chain(act)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    weights = sum(p.nbytes for p in model.parameters())
    if budget is not None:
        model = er.fit(model, budget=budget, optimizer=opt, exact=True)
    for nth in range(steps):
        torch.manual_seed(nth)
        x = torch.randn(1024, _WIDTH)

        def step(x=x):
            opt.zero_grad()
            with torch.autocast("cpu", enabled=autocast):
                loss = F.cross_entropy(model(x).float(), (x[:, 0] > 0).long())
            loss.backward()
            opt.step()

        if nth < steps - 1:  # which `er.fit` measures itself
            step()
    return [p.detach().clone() for p in model.parameters()], er.peak(step) + weights


@pytest.mark.parametrize(
    ("act", "autocast"),
    [(F.relu, False), (torch.tanh, False), (F.silu, False), (F.relu, True)],
    ids=["relu", "tanh", "silu", "autocast"],
)
def test_a_chain_of_linear_layers_fits_where_every_second_one_runs_again(act, autocast):
    plain, plain_nbytes = _trained(act, autocast=autocast)
    budget = int((0.6 if act is F.silu else 0.8) * plain_nbytes)
    parameters, taken = _trained(act, budget, autocast=autocast)
    assert taken <= budget
    assert all(map(torch.equal, parameters, plain))


def test_a_refusal_names_less_than_plain_training_takes():
    _, plain_nbytes = _trained(F.relu)
    with pytest.raises(BudgetTooSmall) as caught:
        _trained(F.relu, int(0.4 * plain_nbytes))
    assert caught.value.least_nbytes < 0.85 * plain_nbytes
