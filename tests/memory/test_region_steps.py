"""Steps of compiled regions that the program calls by itself are measured, and said if too high."""

import gc
import shutil
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elbowroom as er
from elbowroom.fitting.backend import elbowroom
from elbowroom.fitting.region_steps import RegionSteps
from elbowroom.measure.background import Background
from elbowroom.measure.peak import peak
from uncompiled import nothing_compiled as nothing_compiled

needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("nothing_compiled"),
]
N = 1 << 16


class Region(torch.autograd.Function):
    """Takes three times its input in forward, and twice in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        torch.empty(3 * x.numel())
        ctx.save_for_backward(w)
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (w,) = ctx.saved_tensors
        torch.empty(2 * gradient.numel())
        return gradient * 2, torch.zeros_like(w)


def said(step: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    return [str(one.message) for one in seen if issubclass(one.category, UserWarning)]


def steps_of(budget: int, count: int = 4, rows: int = N, **given) -> tuple[RegionSteps, list[str]]:
    steps, w = RegionSteps(budget, **given), torch.ones(4, requires_grad=True)
    region = steps.watch(Region.apply)

    def train() -> None:
        for _ in range(count):
            region(torch.ones(rows), w).sum().backward()
            w.grad = None
        region(torch.ones(rows), w)  # which ends the step before

    return steps, said(train)


def test_a_settled_step_is_measured_and_then_none_is() -> None:
    steps, warned = steps_of(10 * 4 * N)
    assert not warned
    assert steps.last_nbytes == pytest.approx(4 * 4 * N, rel=0.01)  # with its input
    assert steps._step is None


def test_a_step_above_the_budget_is_said_once() -> None:
    _, warned = steps_of(int(3.9 * 4 * N))
    assert len(warned) == 1
    assert "a compiled step takes 1.00 MiB (measured), which is 25." in warned[0]
    assert "Give " in warned[0]


def test_a_first_step_far_above_is_said_too() -> None:
    _, warned = steps_of(3 * 4 * N)
    assert ["region was compiled" in one for one in warned] == [True, False]


def test_what_comes_after_backward_counts_only_where_states_are_in_the_budget() -> None:
    x, w = torch.ones(N), torch.ones(4, requires_grad=True)
    for resident, most in ((None, 4), (list, 40)):
        steps = RegionSteps(100 * 4 * N, resident)
        region = steps.watch(Region.apply)
        for _ in range(3):
            region(x, w).sum().backward()
            torch.empty(39 * N)
        region(x, w)
        assert steps.last_nbytes == pytest.approx(most * 4 * N, rel=0.01)


def test_a_region_that_raises_ends_the_measurement() -> None:
    steps, x = RegionSteps(100), torch.ones(N)

    def refuses(_: Tensor) -> Tensor:
        raise er.errors.BudgetTooSmall("too small", least_nbytes=1, parts={})

    with pytest.raises(er.errors.BudgetTooSmall):
        steps.watch(refuses)(x)
    assert Background.running is None


def test_a_program_that_was_left_does_not_keep_another_from_being_measured() -> None:
    first, w = RegionSteps(100 * 4 * N), torch.ones(4, requires_grad=True)
    region = first.watch(Region.apply)
    region(torch.ones(N), w).sum().backward()
    assert first._step is not None
    _, warned = steps_of(int(3.9 * 4 * N))
    assert len(warned) == 1


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (f for _ in range(6) for f in (nn.Linear(32, 32), nn.Tanh()))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@needs_a_compiler
@pytest.mark.parametrize("way", ["backend", "a fitted model inside"])
def test_a_loss_outside_of_the_graph_is_said(way: str) -> None:
    """It was silent: the loss of a compiled function stands beside what its plan may hold."""
    net, x = Classifier(), torch.randn(2048, 32)
    weights = sum(p.nbytes for p in net.parameters())

    def called(budget: int) -> Callable[[Tensor], Tensor]:
        torch._dynamo.reset()
        if way == "backend":
            options = {"budget": budget, "exact": True}
            return torch.compile(lambda x: net(x), backend=elbowroom, options=options)
        er.fit(net, budget=budget, exact=True)
        return torch.compile(lambda x: net(x))

    with pytest.raises(er.errors.BudgetTooSmall) as least:
        called(weights + 400_000)(x)
    budget = least.value.least_nbytes
    step = called(budget)

    def one() -> None:
        out = step(x)
        (F.log_softmax(out, 1).square().mean() + out.exp().mean()).backward()
        net.zero_grad()

    gc.collect()
    warned = said(lambda: [one() for _ in range(4)])
    assert sum("(measured)" in line for line in warned) == 1
    assert peak(one) + weights + x.nbytes > budget
    er.release(net)
