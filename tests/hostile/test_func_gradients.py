"""torch.func takes gradients inside of a forward: hooks of ours are off meanwhile."""

import copy
import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F

import elbowroom as er
from elbowroom.measure import peak
from elbowroom.runtime.own_hooks import OwnHooks

WIDTH = 64
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")  # by torch.func.hessian


def grad(of: nn.Module, x: Tensor) -> Tensor:
    return torch.func.grad(lambda z: (of(z).tanh() * F.gelu(z)).sum())(x)


def twice(of: nn.Module, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: grad(of, y).sin().sum())(x)


def vjp(of: nn.Module, x: Tensor) -> Tensor:
    out, backward = torch.func.vjp(lambda z: F.gelu(of(z)), x)
    given: Tensor = backward(out)[0]
    return given


def hessian(of: nn.Module, x: Tensor) -> Tensor:
    return torch.func.hessian(lambda row: (of(row)[:8] ** 3).sum())(x[0]).sum(0)


def per_row(of: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.grad(lambda row: (of(row).relu() * row).sum()))(x)


def changed(of: nn.Module, x: Tensor) -> Tensor:
    def value(z: Tensor) -> Tensor:
        return (of(z.clone().mul_(2).relu_()) * z).sum()

    return torch.func.grad(value)(x)


def raised(of: nn.Module, x: Tensor) -> Tensor:
    with pytest.raises(ZeroDivisionError):
        torch.func.grad(lambda z: z.sum() / 0 if 1 // 0 else z)(x)
    return grad(of, x)


class Moved(nn.Module):
    """Adds to its input a gradient that torch.func takes."""

    def __init__(self, take) -> None:
        super().__init__()
        self.of, self.take, self.up = nn.Linear(WIDTH, WIDTH), take, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.take(self.of, F.gelu(self.up(x)))
        return F.silu(self.up(y)).tanh()


def net(take) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), Moved(take), Moved(take))


def losses(model, around, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(step))
        with around():
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()


TAKEN = [grad, twice, vjp, hessian, per_row, changed, raised]


@pytest.mark.parametrize("take", TAKEN)
def test_a_context_gives_the_bits_of_plain_training(take):
    model = net(take)
    plain = copy.deepcopy(model)
    expected = [*losses(plain, _nothing, 3)]
    assert [*losses(model, er.saving, 3)] == expected


def _nothing():
    return torch.enable_grad()


@pytest.mark.parametrize("share", [0.95, 0.7, 0.5])
@pytest.mark.parametrize("take", TAKEN)
def test_a_fitted_model_gives_the_bits_of_plain_training(take, share):
    model = net(take)
    plain, owned_nbytes = copy.deepcopy(model), sum(p.nbytes for p in model.parameters())
    most = peak(lambda: [*losses(copy.deepcopy(plain), _nothing, 1)])
    budget = 2 * owned_nbytes + int(share * max(most - owned_nbytes, 0))
    fitted = er.fit(model, budget=budget, exact=True)
    try:
        found = [*losses(fitted, _nothing, 8)]
    except er.errors.BudgetTooSmall as refused:
        er.release(model)
        model = copy.deepcopy(plain)
        er.fit(model, budget=refused.least_nbytes, exact=True)
        found = [*losses(model, _nothing, 8)]
    assert found == [*losses(plain, _nothing, 8)]
    er.release(model)


@pytest.mark.parametrize("policy", [(), ("dither",), ("lean",)])
def test_gradients_of_each_row_may_be_taken_beside_a_forward_that_holds_codes(policy):
    torch.manual_seed(0)
    sizes = (WIDTH, 4 * WIDTH, WIDTH)
    up, down = (nn.Sequential(nn.Linear(*two), nn.LayerNorm(two[1])) for two in pairwise(sizes))
    model = nn.Sequential(up, nn.GELU(), down, nn.Linear(WIDTH, WIDTH))
    frozen = {name: p.detach() for name, p in model.named_parameters()}  # the memory of the weights
    x = torch.randn(256, WIDTH)

    def of_row(parameters, row):
        return torch.func.functional_call(model, parameters, (row[None],)).square().sum()

    rows = torch.vmap(torch.func.grad(of_row), (None, 0))
    for _ in range(3):
        with er.saving(*policy):
            loss = model(x).square().mean()
            found = rows(frozen, x[:4])
        expected = rows(frozen, x[:4])
        assert all(torch.equal(found[name], expected[name]) for name in frozen)
        loss.backward()


def test_hooks_of_others_still_end_in_an_error_of_torch():
    x = torch.randn(4, requires_grad=True)
    with (
        graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        OwnHooks(lambda x: x, lambda x: x),
        pytest.raises(RuntimeError, match="saved tensor hooks"),
    ):
        torch.func.grad(lambda z: z.sin().sum())(x)
    assert graph.disable_saved_tensors_hooks.__module__ == graph.__name__


def test_hooks_are_on_again_behind_it_and_torch_has_its_own_function_back():
    x, packed = torch.randn(4, requires_grad=True), []
    before = graph.disable_saved_tensors_hooks
    with OwnHooks(lambda x: packed.append(x) or x, lambda x: x):
        torch.func.grad(lambda z: z.sin().sum())(x)
        assert not packed
        x.sin()
        assert len(packed) == 1
    assert graph.disable_saved_tensors_hooks is before


def test_hooks_of_one_thread_do_not_matter_to_another():
    x, found = torch.randn(4), []

    def other():
        with graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            try:
                torch.func.grad(lambda z: z.sin().sum())(x)
            except RuntimeError as error:
                found.append(str(error))

    with OwnHooks(lambda x: x, lambda x: x):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "saved tensor hooks" in found[0]


class Random(nn.Module):
    """A block that cannot be rebuilt in smaller parts: it is run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(self.up(x).tanh(), 0.3) * torch.rand(4 * WIDTH))


def batched(out: Tensor, over: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out, over, torch.eye(len(out)), is_grads_batched=True))


def mapped(out: Tensor, over: list[Tensor]) -> list[Tensor]:
    def of_one(row: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(out, over, row, retain_graph=True))

    return list(torch.func.vmap(of_one)(torch.eye(len(out))))


@pytest.mark.parametrize("take", [batched, mapped])
def test_a_module_that_draws_runs_again_while_gradients_are_batched(take):
    """It ran inside of vmap, which forbids random numbers."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Random() for _ in range(4)))
    ours = copy.deepcopy(plain)

    def step(model: nn.Module, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        out = model(torch.randn(512, WIDTH)).mean(0)[:8]
        return take(out, list(model.parameters()))

    budget = int(0.45 * peak(lambda: plain(torch.randn(512, WIDTH)).mean().backward()))
    static = 2 * sum(p.nbytes for p in plain.parameters())
    plain.zero_grad(set_to_none=True)
    er.fit(ours, budget=budget + static, exact=True, min_nbytes=0)
    for _ in range(6):
        ours(torch.randn(512, WIDTH)).mean().backward()
        ours.zero_grad(set_to_none=True)
    for seed in range(2):
        assert all(map(torch.equal, step(plain, seed), step(ours, seed)))
    er.release(ours)
