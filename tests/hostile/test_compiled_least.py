"""What a refused compiled model of several regions names, which holds when it is given back.

All run without Inductor's code generation (`uncompiled.py`).
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting import compiled as compiled_fitting
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import uncompiled as uncompiled

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # Dynamo asks its inputs for their gradients, and hides the warning but from who raises it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("nothing_compiled"),
]
WIDTH, ROWS, DEPTH = 64, 256, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Looped(nn.Module):
    """One graph runs for each block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x.square().mean()


class Pieces(Looped):
    """Each block ends a graph of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        torch._dynamo.graph_break()
        return self.blocks[3](self.blocks[2](x)).square().mean()


def state(net: nn.Module) -> list[Tensor]:
    return [*(p.detach().clone() for p in net.parameters()), *(b.clone() for b in net.buffers())]


@pytest.mark.parametrize("make", [Looped, Pieces])
def test_the_first_refusal_names_what_all_regions_need(make, uncompiled) -> None:
    """A loop of three blocks was told 2.97 MiB, then 4.75, then 5.48."""
    net, x = make(), torch.randn(ROWS, WIDTH)
    before, given = state(net), x.clone()
    fitted = er.fit(torch.compile(net), budget="100 KiB", exact=True)
    with pytest.raises(BudgetTooSmall, match=r"budget 100 KiB is below") as refused:
        fitted(x)
    assert all(map(torch.equal, state(net), before))  # trials leave nothing behind
    assert torch.equal(x, given)
    er.release(net)
    torch._dynamo.reset()
    fitted = er.fit(torch.compile(net), budget=refused.value.least_nbytes, exact=True)
    for _ in range(2):
        fitted(x).backward()
        net.zero_grad()
    error = refused.value
    if make is Looped:
        assert sum(error.parts.values()) == error.least_nbytes
    er.release(net)


def test_a_whole_graph_is_refused_without_a_trial(uncompiled, monkeypatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a trial")

    monkeypatch.setattr(compiled_fitting, "refusal_that_holds", never)
    block = Block()
    fitted = er.fit(torch.compile(block), budget="100 KiB", exact=True)
    with pytest.raises(BudgetTooSmall):
        fitted(torch.randn(ROWS, WIDTH))
    er.release(block)


def test_refusals_leave_no_versions_in_dynamos_cache(uncompiled) -> None:
    """It has room for eight of a function; what comes later ran in the eager engine."""
    net, x = Looped(), torch.randn(ROWS, WIDTH)
    for kib in range(100, 106):
        fitted = er.fit(torch.compile(net), budget=f"{kib} KiB", exact=True)
        with pytest.raises(BudgetTooSmall) as refused:
            fitted(x)
        er.release(net)
    fitted = er.fit(torch.compile(net), budget=refused.value.least_nbytes, exact=True)
    fitted(x).backward()
    assert er.summary(fitted).predicted_nbytes is not None
    er.release(net)
