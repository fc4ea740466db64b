"""er.gradient_error measures what codes do to a gradient, and leaves the model as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er
from elbowroom.errors import PlanError, UnknownField
from elbowroom.runtime.attach import opener_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Task:
    """A model, and forward and backward of it on one batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)]
        self.model = nn.Sequential(*layers, nn.BatchNorm1d(64), nn.Linear(64, 8))
        self.x, self.y = torch.randn(512, 64), torch.randint(0, 8, (512,))

    def run(self) -> None:
        F.cross_entropy(self.model(self.x), self.y).backward()


class Added:
    """Adds the next of some numbers to each element of a weight's gradient."""

    def __init__(self, *numbers: float) -> None:
        self.weight = nn.Linear(3, 1, bias=False)
        self.numbers, self.now = iter(numbers), 0.0

    @contextmanager
    def coded(self) -> Iterator[None]:
        self.now = next(self.numbers)
        try:
            yield
        finally:
            self.now = 0.0

    def run(self) -> None:
        self.weight(torch.ones(1, 3)).sum().backward()
        assert self.weight.weight.grad is not None
        self.weight.weight.grad += self.now


class Again:
    """A context that is opened anew each time."""

    def __init__(self, opened) -> None:
        self.opened = opened

    def __enter__(self) -> None:
        self.now = self.opened()
        self.now.__enter__()

    def __exit__(self, *of) -> None:
        self.now.__exit__(*of)


def test_error_and_bias_are_what_they_are_said_to_be() -> None:
    added = Added(0.5, -0.1, 0.2)
    found = er.gradient_error(added.run, added.weight, Again(added.coded), draws=3)
    error2, mean2 = 3 * (0.25 + 0.01 + 0.04) / 3, 3 * 0.2**2  # |g|^2 is 3
    assert found.error == pytest.approx(error2 / 3)
    assert found.bias == pytest.approx((3 * mean2 - error2) / 2 / 3)
    assert [one.name for one in found.parameters] == ["weight"]
    assert not found.is_exact


def test_codes_without_bias_have_none_and_a_wrong_gradient_is_all_bias() -> None:
    task, wrong = Task(), Added(0.1, 0.1, 0.1)
    unbiased = er.gradient_error(task.run, task.model, er.saving("dither", levels=8), draws=8)
    assert 0 < unbiased.error < 0.05
    assert unbiased.bias < 0.1 * unbiased.error
    biased = er.gradient_error(wrong.run, wrong.weight, Again(wrong.coded), draws=3)
    assert biased.bias == pytest.approx(biased.error)


def test_exact_actions_give_the_same_bits() -> None:
    task = Task()
    found = er.gradient_error(task.run, task.model, er.saving())
    assert found.is_exact
    assert found.error == found.bias == 0
    assert str(found) == "each of 4 draws has the bits of the plain gradient"


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails: bool) -> None:
    task = Task()
    task.run()
    gradients = [p.grad for p in task.model.parameters()]
    bits = [x.clone() for x in [*task.model.buffers(), *gradients, torch.get_rng_state()]]

    def run() -> None:
        task.run()
        if fails:
            raise KeyError("of the run")

    if fails:
        with pytest.raises(KeyError):
            er.gradient_error(run, task.model, er.saving("dither"))
    else:
        er.gradient_error(run, task.model, er.saving("dither"))
    now = [*task.model.buffers(), *gradients, torch.get_rng_state()]
    assert all(map(torch.equal, now, bits))
    assert all(p.grad is g for p, g in zip(task.model.parameters(), gradients, strict=True))


def test_the_plan_of_a_fitted_model_is_measured_and_stays() -> None:
    task = Task()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            task.run()
            optimizer.step()

    room = er.peak(lambda: task.run())
    task.model.zero_grad()
    held = 2 * sum(p.nbytes for p in task.model.parameters())
    er.fit(task.model, budget=held + room // 2, optimizer=optimizer, min_nbytes=0)
    fitting = opener_of(task.model)
    with pytest.raises(PlanError, match="has not settled yet"):
        er.gradient_error(task.run, task.model)
    train(12)
    before = er.summary(task.model)
    found = er.gradient_error(task.run, task.model)
    assert 0 < found.error < 0.1
    assert opener_of(task.model) is fitting
    train(2)
    after = er.summary(task.model)
    assert (after.setting, after.exact) == (before.setting, before.exact) == ("plan", False)
    er.release(task.model)


def test_the_table_names_the_parameters_with_the_largest_errors() -> None:
    task = Task()
    found = er.gradient_error(task.run, task.model, er.saving("dither", levels=8))
    text = str(found)
    worst = max(found.parameters, key=lambda one: one.error2)
    assert text.startswith(f"gErr2 {found.error:.2g}, of which ")
    assert worst.name in text
    assert "and 2 parameters with less" in text


def no_gradient() -> None:
    pass


def test_what_is_not_possible_is_said() -> None:
    task = Task()
    with pytest.raises(PlanError, match="not fitted, or compiled"):
        er.gradient_error(task.run, task.model)
    with pytest.raises(PlanError, match="left no gradient"):
        er.gradient_error(no_gradient, task.model, er.saving())
    with pytest.raises(UnknownField, match="draws=1"):
        er.gradient_error(task.run, task.model, er.saving(), draws=1)

    def trains() -> None:
        task.run()
        torch.optim.SGD(task.model.parameters(), lr=0.1).step()

    with pytest.raises(PlanError, match=r"has changed the parameter .*\.weight"):
        er.gradient_error(trains, task.model, er.saving())


def test_gradients_that_are_released_in_backward_are_refused() -> None:
    task = Task()
    next(task.model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(PlanError, match="gradient_error runs backward"):
        er.gradient_error(task.run, task.model, er.saving())
