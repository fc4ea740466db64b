"""Calls that run again in backward: which tensors are given back, how often, and what they are."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.errors import RestoreError
from elbowroom.runtime import generators
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.modules import outermost
from elbowroom.runtime.recompute import recomputed

RUNS: Counter[int] = Counter()  # by `id`: what a module has itself is set back after a second run


class Runs(nn.Module):
    """Calls a function of a weight and its input, and counts."""

    def __init__(self, does: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.does = nn.Parameter(torch.randn(4)), does
        RUNS[id(self)] = 0

    def forward(self, x: Tensor) -> Tensor:
        RUNS[id(self)] += 1
        return self.does(self.weight, x)


def given() -> Tensor:
    return torch.linspace(-1, 1, 4).requires_grad_()


def again(module: nn.Module, *args: Any) -> Tensor:
    out: Tensor = recomputed(module, module, args, {}, Arguments(args, {}))
    return out


def product(weight: Tensor, x: Tensor) -> Tensor:
    return (weight * x).sin().exp()


def gradients(module: nn.Module, call: Callable[..., Tensor] = again) -> list[Tensor]:
    x = given()
    wanted = [x, *module.parameters()]
    return list(torch.autograd.grad(call(module, x).sum(), wanted))


def plainly(module: nn.Module, *args: Any) -> Tensor:
    out: Tensor = module(*args)
    return out


def assert_plain(does: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert all(map(torch.equal, gradients(Runs(does)), gradients(Runs(does), plainly)))


def test_it_runs_once_in_each_backward() -> None:
    module, x = Runs(product), given()
    y = again(module, x).sum()
    first = torch.autograd.grad(y, [x, module.weight], retain_graph=True)
    assert RUNS[id(module)] == 2
    second = torch.autograd.grad(y, [x, module.weight])
    assert RUNS[id(module)] == 3
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, gradients(Runs(product), plainly)))


def test_modules_of_a_run_that_ends_early_do_not_run_any_more() -> None:
    """Else the next forward in an open context would be named as if it were inside of them."""
    with er.saving():
        again(Runs(product), given()).sum().backward()
        assert outermost() is None


def test_what_an_earlier_backward_has_left_is_not_used() -> None:
    """A weight that has changed since would be read with its new values."""

    def branches(weight: Tensor, x: Tensor) -> Tensor:
        return torch.stack([weight * x, (weight * x).sin()])

    module, x = Runs(branches), given()
    one, two = again(module, x)
    torch.autograd.grad(one.sum(), x, retain_graph=True)
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RestoreError, match="modified by an inplace operation"):
        torch.autograd.grad(two.sum(), x)


def test_saved_tensors_that_are_looked_at_outside_of_backward() -> None:
    module, x = Runs(product), given()
    y = again(module, x)
    looked: Any = y.grad_fn
    assert torch.equal(looked._saved_result, y)
    assert torch.equal(looked._saved_result, y)
    assert RUNS[id(module)] == 3
    wanted = torch.autograd.grad(y.sum(), [x, module.weight])
    assert all(map(torch.equal, wanted, gradients(Runs(product), plainly)))


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,), (y,) = ctx.saved_tensors, ctx.saved_tensors
        return grad * (x + y)


def test_a_function_that_reads_what_it_has_saved_twice() -> None:
    """PyTorch's checkpoint refuses this."""
    assert_plain(lambda weight, x: ReadsTwice.apply(weight * x))  # type: ignore[no-any-return,no-untyped-call]


def guarded(weight: Tensor, x: Tensor) -> Tensor:
    try:
        return (weight * x).exp()
    except Exception:
        return (weight * x).cos().sin()


def swallows(weight: Tensor, x: Tensor) -> Tensor:
    y = weight * x
    for _ in range(3):
        try:
            y = y.exp()
        except BaseException:
            y = y.sin().cos()
    return y


def with_a_backward_inside(weight: Tensor, x: Tensor) -> Tensor:
    y = (weight * x).sin()
    (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (y.exp() + force.square()).tanh()


def with_a_finished_backward_inside(weight: Tensor, x: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    (force,) = torch.autograd.grad((z.sin() * z).sum(), z)
    return x.cos() * force * weight


def with_a_checkpoint(weight: Tensor, x: Tensor) -> Tensor:
    return checkpoint(product, weight, (x * x).exp(), use_reentrant=False).cos()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "does",
    [guarded, swallows, with_a_backward_inside, with_a_finished_backward_inside, with_a_checkpoint],
)
def test_gradients_are_those_of_plain_autograd(does: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_plain(does)


def test_one_inside_of_a_checkpoint_and_of_another_one() -> None:
    module = Runs(product)

    def outer(weight: Tensor, x: Tensor) -> Tensor:
        return again(module, (weight * x).exp()).sin()

    expected = gradients(Runs(lambda weight, x: product(module.weight, (weight * x).exp()).sin()))
    assert all(map(torch.equal, gradients(Runs(outer)), expected))
    around = lambda module, x: checkpoint(module, x, use_reentrant=False)  # noqa: E731
    assert all(map(torch.equal, gradients(Runs(outer), around), expected))


def differs(*, then: int, now: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Saves `then` tensors, and `now` when it runs again; of less than 0, another dtype."""
    runs = [now, then]

    def does(weight: Tensor, x: Tensor) -> Tensor:
        times = runs.pop()
        y = (weight * x) if times > 0 else (weight.double() * x.double())
        for _ in range(abs(times)):
            y = y.sin()
        return y

    return does


@pytest.mark.parametrize(
    ("now", "why"), [(1, "3 tensors, not 4 or more"), (-2, "is float64 .* not float32")]
)
def test_other_tensors_than_in_forward_are_an_error(now: int, why: str) -> None:
    y = again(Runs(differs(then=2, now=now)), given())
    with pytest.raises(RestoreError, match=f"'Runs' runs again in backward, .*{why}"):
        y.sum().backward()


def test_it_makes_tensors_on_the_default_device_of_forward() -> None:
    made = []

    def does(weight: Tensor, x: Tensor) -> Tensor:
        made.append(torch.empty(2).device.type)
        return product(weight, x)

    module, x = Runs(does), given()
    with torch.device("meta"):
        y = again(module, x)
    y.sum().backward()
    assert made == ["meta", "meta"]
    assert torch.empty(0).device.type == "cpu"


def test_autocast_is_as_in_forward() -> None:
    seen = []

    def does(weight: Tensor, x: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return (weight.outer(weight) @ x).exp()

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        module, x = Runs(does), given()
        with torch.autocast("cpu", torch.float16):
            y = call(module, x)
        with torch.autocast("cpu", torch.bfloat16):
            return list(torch.autograd.grad(y.float().sum(), [x, module.weight]))

    expected = run(plainly)
    assert all(map(torch.equal, run(again), expected))
    assert seen == 3 * [(True, torch.float16)]


@pytest.mark.parametrize(
    "change",
    [
        random.random,
        lambda: random.gauss(0, 1),  # a second one waits
        lambda: (random.gauss(0, 1), random.gauss(0, 1)),
        lambda: random.seed(0),
        lambda: random.setstate(random.Random(3).getstate()),
        lambda: [random.random() for _ in range(312)],  # its position is the same
        lambda: None,
    ],
)
def test_the_state_of_pythons_generator_is_read_anew_when_it_has_changed(
    change: Callable[[], Any],
) -> None:
    kept = random.getstate()
    try:
        for _ in range(3):
            generators.state_of(random)
            change()
            assert generators.state_of(random) == random.getstate()
    finally:
        random.setstate(kept)


def test_the_memory_of_pythons_generator_is_where_it_is_looked_for() -> None:
    """Otherwise it would be read number by number, which takes 35 us."""
    assert generators._place_of_python(random.getstate.__self__)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("one", "other"), [(True, 1), (1, 1.0), (0.0, -0.0), ((1, 2), (1, (2,))), ("1", 1)]
)
def test_arguments_that_are_not_the_same_are_told_apart(one: Any, other: Any) -> None:
    x = given()
    assert Arguments((x, one), {}).structure != Arguments((x, other), {}).structure
    assert Arguments((x, one), {}).structure == Arguments((x, one), {}).structure
    assert Arguments((x, float("nan")), {}).structure == Arguments((x, float("nan")), {}).structure


def test_arguments_are_given_again_in_their_places() -> None:
    x, y, z = given(), given(), nn.Parameter(given().detach())
    args: tuple[Any, ...] = (x, None, (y, (x, 2.5)))
    kwargs = {"scale": 3, "weight": z, "dtype": torch.float32}
    arguments = Arguments(args, kwargs)
    assert [id(one) for one in arguments.tensors] == [id(x), id(y), id(z)]
    assert arguments.direct == [0, 2]
    found, named = arguments.again(arguments.tensors)
    assert found[0] is x
    assert found[2][0] is y
    assert found[2][1][0] is x
    assert (found[1], found[2][1][1], named["scale"]) == (None, 2.5, 3)
    assert list(named) == list(kwargs)
    assert named["weight"] is z
