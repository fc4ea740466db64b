"""A graph network within a budget that is smaller than the messages of one layer."""

import copy

import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.measure import peak

EDGES, NODES, WIDTH = 40_000, 1000, 64  # messages of 9.8 MiB


class Attends(nn.Module):
    """Messages with a weight of their own that sum over neighbors, as in graph attention."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.scores = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        weight = torch.sigmoid(self.scores(x).index_select(0, edges[0]))
        rows = weight * self.values(x).index_select(0, edges[0])
        at = edges[1].view(-1, 1).expand_as(rows)
        return torch.relu(rows.new_zeros(NODES, WIDTH).scatter_add_(0, at, rows) / 40 + x)


class Network(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attends() for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x


@pytest.mark.parametrize("exact", [True, None])
def test_a_budget_below_one_layers_messages_is_held(exact):
    torch.manual_seed(0)
    x, edges = torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES))
    plain = Network()
    model = copy.deepcopy(plain)
    budget = 8 << 20

    def steps_of(model: nn.Module, **given: int) -> tuple[list[int], list[float]]:
        """Peaks of the first step and the last of five, and the losses."""
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        if given:
            er.fit(model, optimizer=optimizer, exact=exact, **given)

        def step() -> None:
            loss = model(x, edges).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())

        first = peak(step)
        for _ in range(3):
            step()
        return [first, peak(step)], losses

    without, plainly = steps_of(plain)
    within, losses = steps_of(model, budget=budget)
    assert min(without) > 3 * budget
    assert max(within) <= budget
    if exact:
        assert losses == plainly
