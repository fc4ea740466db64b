"""Models whose calls are seen by their class: every way to call them is, and no other module."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from elbowroom.runtime import attach, calls


class Around:
    """Counts the forwards of a model."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, model: nn.Module, forward: Any, given: Any) -> Any:
        self.runs += 1
        return forward()

    def passes(self) -> None:
        """Nothing is to be done."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    for model, _ in attach.attached():
        attach.detach(model)
    assert nn.Module.__call__ is calls._plain_call
    assert not calls._ours
    assert "__init_subclass__" not in nn.Module.__dict__


def attached(model: nn.Module) -> Around:
    around = Around()
    attach.attach(model, around)
    return around


def test_a_model_inside_of_another_of_its_class_is_seen_alone() -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    outer = nn.Sequential(inner, nn.Sequential(nn.ReLU()))
    around = attached(inner)
    outer(torch.randn(2, 4))
    assert around.runs == 1
    assert nn.Linear.__call__ is nn.Module.__call__


class Loud(nn.Linear):
    """Has a `__call__` of its own."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x + 1)


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Child(Bare):
    pass


@pytest.mark.parametrize("cls", [Loud, nn.LazyLinear])
def test_unusual_classes_are_seen(cls: Any) -> None:
    model = cls(4) if cls is nn.LazyLinear else cls(4, 4)
    around = attached(model)
    model(torch.randn(2, 4))
    model(torch.randn(2, 4))
    assert around.runs == 2


def test_a_class_and_one_below_it() -> None:
    one, other, third = Bare(), Child(), Child()
    around, below = attached(one), attached(other)
    x = torch.randn(2, requires_grad=True)
    for model in (one, other, third):
        model(x)
    assert (around.runs, below.runs) == (1, 1)
    attach.detach(one)
    other(x)
    one(x)
    assert (around.runs, below.runs) == (1, 2)


def test_what_traces_modules_sees_those_of_the_class() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    attached(nn.Linear(4, 4))
    graph = fx.symbolic_trace(model).graph
    assert [node.op for node in graph.nodes].count("call_module") == 2


def test_who_wants_to_see_calls_sees_the_model_too() -> None:
    model, seen = nn.Linear(4, 4), []

    class Intercepting(Around):
        def run(self, model: nn.Module, forward: Any, given: Any) -> Any:
            def around(module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
                seen.append(module)
                return call(*args, **kwargs)

            with calls.intercepted(around):
                return forward()

    attach.attach(model, Intercepting())
    model(torch.randn(2, 4))
    assert seen == [model]


def test_a_model_that_is_compiled_after_it_was_attached_is_seen() -> None:
    """In a process that has not imported torch.compile yet."""
    script = """
import sys, torch
from torch import nn
from elbowroom.runtime import attach, calls
from test_known_calls import Around
assert "torch._dynamo" not in sys.modules
model, around = nn.Sequential(nn.Linear(4, 4)), Around()
attach.attach(model, around)
compiled = torch.compile(model, backend="eager")
compiled(torch.randn(2, 4))
assert around.runs == 1, around.runs
model(torch.randn(2, 4))
assert around.runs == 2, around.runs
attach.detach(model)
compiled(torch.randn(2, 4))
model(torch.randn(2, 4))
assert around.runs == 2, around.runs
assert "__init_subclass__" not in nn.Module.__dict__
assert calls._optimized is None
"""
    folder = __file__.rsplit("/", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Passing:
    """Intercepts calls, and counts them by module."""

    def __init__(self) -> None:
        self.seen: list[nn.Module] = []

    def __call__(self, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        self.seen.append(module)
        return call(*args, **kwargs)


class Between(nn.Module):
    """Another base class, which has a `__call__` of its own."""

    calls = 0

    def __call__(self, x: Tensor) -> Any:
        type(self).calls += 1
        return super().__call__(x)


def test_known_modules_are_seen_without_a_change_of_all_classes() -> None:
    one, other, x, passing = Bare(), Bare(), torch.randn(2), Passing()
    with calls.intercepted(passing, [one]):
        assert nn.Module.__call__ is calls._plain_call
        for module in (one, other, Child(), nn.ReLU()):
            module(x)
        with calls.undisturbed():
            one(x)
    one(x)
    assert passing.seen == [one]
    assert "__call__" not in Bare.__dict__


@pytest.mark.parametrize("cls", [Loud, Bare])
def test_what_is_seen_may_change(cls: Any) -> None:
    one, all_of_them = cls() if cls is Bare else cls(2, 2), Passing()
    other, x = nn.ReLU(), torch.randn(2)
    with calls.intercepted(all_of_them, [one]) as seen:
        other(x)
        one(x)
        seen.see(None)
        other(x)
        one(x)
        seen.see([other])
        other(x)
        one(x)
    assert all_of_them.seen == [one, other, one, other]


def test_a_class_made_later_that_inherits_from_two() -> None:
    one, x, passing = Bare(), torch.randn(2), Passing()
    with calls.intercepted(passing, [one]) as seen:

        class Both(Bare, Between):
            pass

        both = Both()
        assert torch.equal(both(x), 2 * x)
        assert Both.calls == 1
        seen.see([one, both])  # it has a `__call__` of its own, which may change
        both(x)
        one(x)
    assert Both.calls == 2
    assert passing.seen == [both, one]


def test_contexts_of_one_class_on_two_threads() -> None:
    one, x, mine, theirs = Bare(), torch.randn(2), Passing(), Passing()

    def run() -> None:
        with calls.intercepted(theirs, [one]):
            one(x)

    with calls.intercepted(mine, [one]):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        one(x)
    assert (mine.seen, theirs.seen) == ([one], [one])


def test_what_lasts_ends_with_the_models() -> None:
    model, other, block, x = nn.Linear(2, 2), nn.Linear(2, 2), Bare(), torch.randn(2)
    with calls.intercepted(Passing(), [block], lasts=True):
        pass
    assert not calls._ours  # as no model is attached
    attached(model)
    attached(other)
    for _ in range(2):
        with calls.intercepted(Passing(), [block], lasts=True):
            block(x)
        assert "__call__" in Bare.__dict__
    attach.detach(other)
    assert "__call__" not in Bare.__dict__
    with calls.intercepted(Passing(), [block], lasts=True):
        block(x)
    del model
    gc.collect()
    assert not calls._ours
