"""A refusal in a training whose graphs vary: it names what was measured, for all shapes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.refusals import add_room
from elbowroom.units import budget_argument

# Of nodes and edges: no graph has both the most nodes and the most edges.
_SIZES = ((125, 4000), (250, 1000), (125, 3086), (250, 2250), (125, 1000), (200, 4000))


class _Edges(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU())

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        a, b = x.index_select(0, edges[1]), x.index_select(0, edges[0])
        messages = self.net(torch.cat([a, b - a], -1))
        index = edges[1][:, None].expand_as(messages)
        return x.new_zeros(x.shape).scatter_reduce(0, index, messages, "amax", include_self=False)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(_Edges() for _ in range(3)), nn.Linear(64, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x, edges)) + x
        return self.head(x)


def _trained(budget: int, steps: int) -> int:
    """Returns the highest peak of the last steps, one of each size."""
    torch.manual_seed(0)
    model = _Net()
    weights = sum(p.nbytes for p in model.parameters())
    er.fit(model, budget=budget, exact=True)
    taken = []
    for nth, (nodes, edges) in enumerate(itertools.islice(itertools.cycle(_SIZES), steps)):
        draw = torch.Generator().manual_seed(nth)
        x = torch.randn(nodes, 64, generator=draw)
        index = torch.randint(0, nodes, (2, edges), generator=draw)
        labels = torch.randint(0, 5, (nodes,), generator=draw)

        def step(x=x, index=index, labels=labels):
            model.zero_grad()
            F.cross_entropy(model(x, index), labels).backward()

        if nth < steps - len(_SIZES):  # which fit measures
            step()
        else:
            taken.append(er.peak(step) + weights)
    er.release(model)
    return max(taken)


def test_what_a_refusal_names_in_mid_training_is_measured_and_holds():
    with pytest.raises(BudgetTooSmall, match=r"\(measured\)") as refused:
        _trained(int(6.2 * 2**20), 60)
    least = refused.value.least_nbytes
    assert least < 10 * 2**20  # by the largest tensor alone it was guessed at five times that
    assert _trained(least, 48) <= 1.03 * least


def test_a_refusal_counts_what_steps_of_other_shapes_were_measured_to_take():
    own, others = 1 << 20, 2 << 20
    error = BudgetTooSmall(f"give {budget_argument(own)}.", least_nbytes=own, parts={"x": own})
    add_room(error, other_kinds_nbytes=others)
    assert others < error.least_nbytes < 1.02 * others
    assert str(error) == (
        f"give {budget_argument(error.least_nbytes)}. Steps of other shapes need 2.00 MiB."
    )
    assert sum(error.parts.values()) == error.least_nbytes


def _net_of_one_shape(budget: int) -> int:
    torch.manual_seed(0)
    blocks = ((nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128)) for _ in range(6))
    net, x = nn.Sequential(*(layer for block in blocks for layer in block)), torch.randn(1024, 128)

    def step():
        net.zero_grad()
        net(x).square().mean().backward()

    if budget:
        er.fit(net, budget=budget, noise=1e-12)
        for _ in range(6):
            step()
    return er.peak(step) + sum(p.nbytes for p in net.parameters())


def test_a_refusal_of_steps_of_one_shape_tells_of_no_others():
    """The first plan is an estimate's, and takes more than the least by the profile of its step."""
    with pytest.raises(BudgetTooSmall) as refused:
        _net_of_one_shape(int(0.4 * _net_of_one_shape(0)))
    assert "other shapes" not in str(refused.value)
    assert "The least that was measured is" in str(refused.value)
    least = refused.value.least_nbytes
    assert _net_of_one_shape(least) <= least
