"""What a recomputed module reads, and the program changes between its forward and its backward."""

import gc
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import RestoreError
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.recompute import recomputed

FACTOR = 1.0


class Config:
    """Settings that several modules share, as those of a model of transformers."""

    def __init__(self) -> None:
        self.factor, self.factors, self.named = 1.0, [1.0, 5.0], {"main": 1.0}


class Reads(nn.Module):
    """Multiplies by many numbers, each of which lies elsewhere."""

    of_class = 1.0

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(width, width), nn.ModuleList()
        self.config, self.space = Config(), SimpleNamespace(factor=1.0)
        self.factors, self.named, self.kinds = [1.0], {"main": 1.0}, {1.0}
        self.last, self.array, self.tensor = deque([1.0]), np.ones(1), torch.ones(())
        inside = 1.0

        def of_closure() -> float:
            return inside

        def set_closure(x: float) -> None:
            nonlocal inside
            inside = x

        self.of_closure, self.set_closure = of_closure, set_closure

    def forward(self, x: Tensor) -> Tensor:
        factor = self.config.factor * self.config.factors[0] * self.config.named["main"]
        factor *= self.space.factor * self.factors[0] * self.named["main"] * sum(self.kinds)
        factor *= self.last[-1] * float(self.array[0]) * self.of_class * FACTOR * self.of_closure()
        y = torch.tanh(self.linear(x) * factor * self.tensor)
        for layer in self.more:
            y = layer(y)
        return torch.sigmoid(y * 2).sin()


def set_global(x: float) -> None:
    global FACTOR
    FACTOR = x


SET_BACK: dict[str, Callable[[Reads], Any]] = {
    "attribute of a configuration": lambda it: setattr(it.config, "factor", 2.0),
    "list of a configuration": lambda it: it.config.factors.insert(0, 2.0),
    "dictionary of a configuration": lambda it: it.config.named.update(main=2.0),
    "namespace": lambda it: setattr(it.space, "factor", 2.0),
    "list": lambda it: it.factors.insert(0, 2.0),
    "dictionary": lambda it: it.named.update(main=2.0),
    "entry": lambda it: it.named.clear(),
    "set": lambda it: it.kinds.add(2.0),
    "deque": lambda it: it.last.append(2.0),
    "array": lambda it: it.array.fill(2.0),
    "tensor": lambda it: setattr(it, "tensor", torch.tensor(2.0)),
    "another child": lambda it: it.more.append(nn.Tanh()),
    "no child": lambda it: delattr(it, "linear"),
}
NOTICED: dict[str, Callable[[Reads], Any]] = {
    "class": lambda it: setattr(Reads, "of_class", 2.0),
    "global": lambda it: set_global(2.0),
    "closure": lambda it: it.set_closure(2.0),
    "data": lambda it: it.tensor.data.fill_(2.0),
}


@pytest.fixture(autouse=True)
def as_before():
    yield
    set_global(1.0)
    Reads.of_class = 1.0


def gradients(change: Callable[[Reads], Any] | None, *, again: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module, x = Reads(), torch.randn(8, 16, requires_grad=True)
    wanted = [x, *module.parameters()]
    y = recomputed(module, module, (x,), {}, Arguments((x,), {})) if again else module(x)
    before = dict(vars(module.config))
    if change is not None:
        change(module)
        before = dict(vars(module.config))
    found = list(torch.autograd.grad(y.sum(), wanted))
    assert vars(module.config) == before
    return found


@pytest.mark.parametrize("name", SET_BACK)
def test_a_second_run_reads_what_forward_has_read(name: str) -> None:
    plain = gradients(SET_BACK[name], again=False)
    assert all(map(torch.equal, gradients(SET_BACK[name], again=True), plain))


@pytest.mark.parametrize("name", NOTICED)
def test_what_is_not_set_back_is_an_error(name: str) -> None:
    with pytest.raises(RestoreError, match="has other values, so something has changed"):
        gradients(NOTICED[name], again=True)


class Keeps(nn.Module):
    """Refers to its last output in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.known = nn.Linear(64, 64), {"last": torch.zeros(())}
        self.config = Config()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)).sin()
        self.out, self.outs, self.pair = y, [y], (y, (y, 1))
        self.known["last"] = y
        self.config.last = y
        return y


def test_outputs_that_modules_refer_to_do_not_hold_all_graphs_before() -> None:
    """Each graph held the attributes of its module: the last output, its graph, and so on."""
    module, inputs = Keeps(), []
    for _ in range(6):
        x = torch.randn(4, 64, requires_grad=True)
        inputs.append(weakref.ref(x))
        recomputed(module, module, (x,), {}, Arguments((x,), {}))
    del x
    gc.collect()
    assert [x() is not None for x in inputs] == [False] * 5 + [True]


def test_forwards_of_a_fitted_model_that_no_backward_follows_do_not_pile_up() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Keeps() for _ in range(4)))
    er.fit(model, budget="0.5 MiB", exact=True, min_nbytes=0)
    for _ in range(10):
        model(torch.randn(128, 64)).sum().backward()
    inputs = []
    for _ in range(6):
        x = torch.randn(128, 64)
        inputs.append(weakref.ref(x))
        model(x)
    del x
    gc.collect()
    er.release(model)
    assert not any(x() is not None for x in inputs[:-1])


def test_a_module_that_runs_again_from_a_code_is_not_compared() -> None:
    module, x = Reads(), torch.randn(8, 16, requires_grad=True)
    context = torch.autograd.graph.saved_tensors_hooks(lambda y: y.detach(), lambda y: y + 0.01)
    with context:
        given = (x * 1,)
        y = recomputed(module, module, given, {}, Arguments(given, {}), is_exact=False)
    y.sum().backward()
    with context:
        given = (x * 1,)
        y = recomputed(module, module, given, {}, Arguments(given, {}))
    with pytest.raises(RestoreError, match="has other values"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("factor", "differs"), [(1.0, False), (1 + 1e-5, False), (1.1, True)])
def test_a_rounding_ends_no_training(dtype: torch.dtype, factor: float, differs: bool) -> None:
    """Kernels that add in any order differ by one from run to run, in plain training, too."""
    factors = [1.0, factor]

    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 64, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.tanh(torch.tanh(self.linear(x)) * factors.pop(0))
            return y.exp()

    module, x = Rounds(), torch.randn(8, 16, dtype=dtype, requires_grad=True)
    y = recomputed(module, module, (x,), {}, Arguments((x,), {}))
    if not differs:
        y.sum().backward()
        return
    with pytest.raises(RestoreError, match="has other values"):
        y.sum().backward()
