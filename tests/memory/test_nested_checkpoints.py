"""What a piece inside of another one's checkpoint begins with is put back by the outer one."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.measure import peak

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(1024, 128)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


def inner(block: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(block, x, use_reentrant=False)
    return y


class Net(nn.Module):
    """The checkpoint inside is the last of the outer one, the first, or in the middle."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.blocks, self.where = nn.ModuleList(Block() for _ in range(4)), where

    def _outer(self, x: Tensor) -> Tensor:
        first, second, third, _ = self.blocks
        match self.where:
            case "last":
                return inner(second, first(x))
            case "first":
                return second(inner(first, x))
            case _:
                return third(inner(second, first(x)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks[3](checkpoint(self._outer, x, use_reentrant=False))
        return y


def net(where: str) -> Net:
    torch.manual_seed(0)
    return Net(where)


def trained(model: nn.Module, steps: int = 8) -> list[Tensor]:
    for _ in range(steps):
        model.zero_grad()
        model(X).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("where", ["last", "first", "middle"])
def test_a_budget_that_is_named_for_nested_checkpoints_holds(where):
    plain = net(where)
    needs = sum(p.nbytes for p in plain.parameters()) + peak(lambda: trained(plain, steps=1))
    model = net(where)
    er.fit(model, budget=needs // 2, exact=True)
    with pytest.raises(BudgetTooSmall) as refused:
        trained(model)
    er.release(model)
    least_nbytes = refused.value.least_nbytes
    assert least_nbytes <= 1.1 * needs
    model = net(where)
    er.fit(model, budget=least_nbytes, exact=True)
    assert all(map(torch.equal, trained(model), trained(plain)))
    er.release(model)
