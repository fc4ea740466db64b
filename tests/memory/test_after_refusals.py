"""What is left of a refused model while its refusal is handled: nothing of its step."""

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.errors import BudgetTooSmall
from elbowroom.measure import peak

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(4, 128, 128)


class Attends(nn.Module):
    """Attention in plain functions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.layer_norm(self.qkv(x), (384,)).chunk(3, -1)
        heads = [one.unflatten(-1, (4, 32)).transpose(1, 2) for one in (q, k, v)]
        logits = (heads[0] @ heads[1].mT / 6).tril()
        y = logits.softmax(-1) @ heads[2]
        z: Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return z


def trained(model: nn.Module, budget: int | None = None, steps: int = 6) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if budget is not None:
        er.fit(model, budget=budget, optimizer=optimizer, exact=True)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attends(), Attends())


@pytest.fixture(scope="module")
def budgets() -> list[int]:
    plain = net()
    owned_nbytes = sum(p.nbytes for p in plain.parameters())
    room_nbytes = peak(lambda: trained(plain, steps=1)) - owned_nbytes
    return [2 * owned_nbytes + int(share * room_nbytes) for share in (0.3, 0.55, 0.6)]


@pytest.mark.parametrize("which", range(3))
def test_a_refusal_holds_no_result_of_its_step(budgets, which):
    model = net()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(BudgetTooSmall) as refused:
            trained(model, budgets[which])
        results = [x for x in gc.get_objects() if type(x) is Tensor and x.grad_fn is not None]
        assert not [x for x in results if x.numel() >= X.numel()]
        assert refused.value.__context__ is None
    finally:
        gc.enable()
        er.release(model)


@pytest.mark.parametrize("which", range(3))
def test_what_a_refusal_names_does_for_another_model_while_the_refused_one_exists(budgets, which):
    model = net()
    try:
        trained(model, budgets[which])
    except BudgetTooSmall as refused:
        other = net()
        trained(other, refused.least_nbytes)
        er.release(other)
    else:
        pytest.fail("the budget sufficed")
    er.release(model)


def test_a_refusal_says_what_stands_in_graphs_that_wait():
    first, second = net(), net()
    er.fit(first, budget="1 GiB", exact=True)
    out = first(X)
    er.fit(second, budget="9 MiB", exact=True)
    with pytest.raises(BudgetTooSmall, match=r"of it are graphs that wait .* er.release\(model\)"):
        trained(second)
    del out
    er.release(first)
    er.release(second)
