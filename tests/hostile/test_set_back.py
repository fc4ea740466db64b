"""What a module changes beside its result, by kind: a second run of it is seen by nobody.

Iterators and files cannot be set back; what can reach one is not run a second time.
"""

import array
import collections
import contextvars
import functools
import io
import itertools
import random
import threading
import types
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom as er
from elbowroom.runtime.reach import Reach, behind_calls

pytestmark = pytest.mark.usefixtures("nothing_stays_attached")
WIDTH = 96
LOCAL, VARIABLE = threading.local(), contextvars.ContextVar("count", default=0)
UNSET: contextvars.ContextVar[int] = contextvars.ContextVar("unset")
COUNT = 0


class Holder:
    count = 0


def by_closure(block):
    count = 0

    def next_one():
        nonlocal count
        count += 1
        return count

    block.state = next_one
    return lambda: count


def by_class(block):
    class Own(Holder):
        pass

    block.state = Own()
    return lambda: Own.count


def by_draws(source, draw, state):
    """A generator that is no attribute of a module."""

    def makes(block):
        one = source()
        block.state = lambda: draw(one)
        return lambda: state(one)

    return makes


NAMES = ["unt"]
OTHER = types.ModuleType("other_module")  # as if from a file of the program's own
exec(
    """
count = 0

def next_one():
    global count
    count += 1
    return count

def next_by_word():
    globals()["count"] += 1
    return globals()["count"]

class Counter:
    def next_one(self):
        return next_one()

    def __call__(self):
        return self.next_one()
""",
    vars(OTHER),
)


def set_by_word():
    vars(OTHER)["count"] += 1
    return OTHER.count


def set_by_attribute_word():
    setattr(OTHER, "count", getattr(OTHER, "count") + 1)  # noqa: B009, B010 (as programs have it)
    return OTHER.count


def set_in_all_modules():
    OTHER.__dict__["co" + NAMES[0]] += 1  # a name that no code has
    return OTHER.count


class CountsByFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + OTHER.next_one()

    @staticmethod
    def backward(ctx, grad):
        return grad


def in_other_module(next_one):
    def makes(block):
        OTHER.count = 0
        block.state = next_one
        return lambda: OTHER.count

    return makes


def set_from_outside():
    OTHER.count += 1
    return OTHER.count


def by_function(block):
    def next_one():
        next_one.count += 1
        return next_one.count

    next_one.count, block.state = 0, next_one
    return lambda: next_one.count


def by_wrapper_of_torch(block):
    counts = [0]

    @functools.wraps(F.relu)
    def next_one():
        counts[0] += 1
        return counts[0]

    block.state = next_one
    return lambda: next_one.__closure__[0].cell_contents[0]  # `counts` would lead to it


def by_parameter(block):
    weight = block.up.weight
    weight.count = 0

    def next_one():
        weight.count += 1
        return weight.count

    block.state = next_one
    return lambda: weight.count


def by_cache(block):
    """Its first call in a step draws, and later ones do not."""

    @functools.lru_cache
    def drawn(step):
        return torch.rand(()).item()

    block.state = lambda: drawn(0)
    return lambda: drawn.cache_info().currsize


def by_cache_with_results(limit):
    """Others have asked it before the forward did; a first call draws."""

    def makes(block):
        @functools.lru_cache(limit)
        def drawn(step):
            return {"value": torch.rand(()).item()}

        with torch.random.fork_rng():
            drawn("before")
        block.state = lambda: drawn(0)["value"]
        return lambda: (drawn.cache_info().currsize, drawn("before") is drawn("before"))

    return makes


def by_event(block):
    """A forward that does something once, and says so."""
    event = threading.Event()

    def next_one():
        if event.is_set():
            return 2
        event.set()
        return 1

    block.state = next_one
    return event.is_set


STATES = {  # what makes it, and returns a function that reads it
    "closure": by_closure,
    "class attribute": by_class,
    "bytearray": lambda block: setattr(block, "state", bytearray(1)) or (lambda: block.state[0]),
    "memoryview": lambda block: (
        setattr(block, "state", memoryview(bytearray(1))) or (lambda: block.state[0])
    ),
    "array": lambda block: (
        setattr(block, "state", array.array("i", [0])) or (lambda: block.state[0])
    ),
    "StringIO": lambda block: (
        setattr(block, "state", io.StringIO()) or (lambda: block.state.getvalue())
    ),
    "BytesIO": lambda block: setattr(block, "state", io.BytesIO()) or (lambda: block.state.tell()),
    "thread-local": lambda block: setattr(LOCAL, "count", 0) or (lambda: LOCAL.count),
    "ContextVar": lambda block: (VARIABLE.set(0) and None) or (lambda: VARIABLE.get()),
    "torch.Generator": by_draws(
        torch.Generator,
        lambda one: torch.rand((), generator=one).item(),
        lambda one: one.get_state().tolist(),
    ),
    "random.Random": by_draws(
        partial(random.Random, 1), lambda one: one.random(), lambda one: one.getstate()
    ),
    "numpy Generator": by_draws(
        partial(np.random.default_rng, 1),
        lambda one: one.random(),
        lambda one: str(one.bit_generator.state),
    ),
    "RandomState": by_draws(
        partial(np.random.RandomState, 1),
        lambda one: one.rand(),
        lambda one: str(one.get_state(legacy=False)),
    ),
    "other module": in_other_module(lambda: OTHER.next_one()),
    "attribute of another module": in_other_module(set_from_outside),
    "globals() of another module": in_other_module(lambda: OTHER.next_by_word()),
    "vars() of another module": in_other_module(set_by_word),
    "setattr of another module": in_other_module(set_by_attribute_word),
    "a name that is made": in_other_module(set_in_all_modules),
    "class of another module": in_other_module(lambda: OTHER.Counter().next_one()),
    "object": in_other_module(OTHER.Counter()),
    "autograd.Function": in_other_module(
        lambda: CountsByFunction.apply(torch.zeros((), requires_grad=True)).item()
    ),
    "attribute of a function": by_function,
    "wrapper of a function of torch": by_wrapper_of_torch,
    "attribute of a parameter": by_parameter,
    "cache": by_cache,
    "cache with results": by_cache_with_results(None),
    "cache with a limit": by_cache_with_results(8),
    "Event": by_event,
    "global": lambda block: globals().update(COUNT=0) or (lambda: COUNT),
    "counter": lambda block: (
        setattr(block, "state", itertools.count()) or (lambda: repr(block.state))
    ),
    "generator": lambda block: (
        setattr(block, "state", (i for i in range(10**6))) or (lambda: list(block.seen)[-1:])
    ),
}


def count_up(block, kind):
    global COUNT
    if callable(block.state):
        return block.state()
    if kind == "class attribute":
        type(block.state).count += 1
        return type(block.state).count
    if kind in ("bytearray", "memoryview", "array"):
        block.state[0] += 1
        return block.state[0]
    if kind in ("StringIO", "BytesIO"):
        block.state.write("x" if kind == "StringIO" else b"x")
        return block.state.tell()
    if kind == "thread-local":
        LOCAL.count += 1
        return LOCAL.count
    if kind == "ContextVar":
        VARIABLE.set(VARIABLE.get() + 1)
        return VARIABLE.get()
    if kind == "global":
        COUNT += 1
        return COUNT
    return next(block.state)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.kind, self.state, self.seen = kind, None, collections.deque(maxlen=100)
        self.read = STATES[kind](self)

    def forward(self, x):
        number = count_up(self, self.kind)
        self.seen.append(number)
        return x + self.down(F.gelu(self.up(x))) * (1 + 0.01 * number)


def trained(kind, budget=None):
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(kind) for _ in range(4)))
    if budget is not None:
        er.fit(net, budget=budget, exact=True, min_nbytes=1024)
    results, peak = [], 0

    def run(step):
        x = torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(step))
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        results.append(loss.detach())

    for step in range(4):
        if step == 0 and budget is None:
            peak = er.peak(partial(run, step))
        else:
            run(step)
        results += [p.grad.clone() for p in net.parameters()]
    if budget is not None:
        er.release(net)
    return peak, results, [(b.read(), list(b.seen)) for b in net]


@pytest.mark.parametrize("kind", STATES)
def test_a_fitted_model_counts_each_call_once(kind):
    """A trial of the block left the count further on."""
    peak, plain, counts = trained(kind)
    _, ours, ours_counts = trained(kind, int(0.85 * peak))
    assert all(map(torch.equal, plain, ours))
    assert str(ours_counts) == str(counts)


def test_a_buffer_that_a_forward_registers_is_registered_once():
    """It stayed from a forward that was undone, so the next one did not draw its values."""

    class Late(nn.Linear):
        def forward(self, x):
            if not hasattr(self, "scale"):
                self.register_buffer("scale", torch.rand(WIDTH))
            return super().forward(x) * self.scale

    def trained(budget=None):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(Late(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
        if budget is not None:
            er.fit(net, budget=budget, exact=True, min_nbytes=1024)
        x = torch.randn(2048, WIDTH)
        peak = er.peak(lambda: net(x).square().mean().backward())
        return peak, torch.get_rng_state(), [p.grad for p in net.parameters()]

    peak, state, plain = trained()
    _, ours_state, ours = trained(int(0.75 * peak))
    assert all(map(torch.equal, plain, ours))
    assert torch.equal(state, ours_state)


@pytest.mark.parametrize("kind", STATES)
def test_what_changed_is_set_back_or_named(kind):
    block = Block(kind)
    reach = Reach(behind_calls(block))
    if kind in ("counter", "generator"):
        assert reach.not_set_back == [type(block.state).__name__]
        return
    assert not reach.not_set_back
    before = block.read()
    block(torch.zeros(1, WIDTH))
    assert block.read() != before
    assert reach.changed()
    reach.restore()
    assert block.read() == before
    assert not reach.changed()


class Trainer:
    def __init__(self):
        self.batches = iter([1, 2])


class Trained(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class Asking(nn.Linear):
    def forward(self, x):
        return self.scaled(super().forward(x))

    def scaled(self, x):
        return x * next(self.trainer.batches)


def test_an_iterator_behind_a_name_that_no_forward_uses_does_not_count():
    """A module may refer to its trainer, which goes through batches."""
    for cls, found in (Trained, []), (Asking, ["list_iterator"]):
        net = cls(2, 2)
        net.trainer = Trainer()
        assert Reach(behind_calls(net)).not_set_back == found


def test_files_and_variables_without_a_value_cannot_be_set_back(tmp_path):
    class Writes(nn.Linear):
        def forward(self, x):
            UNSET.set(1)
            return super().forward(x)

    with (tmp_path / "log").open("w") as file:
        net = Writes(2, 2)
        net.file = file
        assert len(Reach(behind_calls(net)).not_set_back) == 2


def test_a_forward_that_a_class_gets_later_is_walked():
    class Patched(nn.Linear):
        pass

    def forward(self, x):
        global COUNT
        COUNT += 1
        return x

    net, before = Patched(2, 2), COUNT
    Reach(behind_calls(net))
    Patched.forward = forward
    reach = Reach(behind_calls(net))
    net(torch.zeros(2))
    assert before + 1 == COUNT
    reach.restore()
    assert before == COUNT


def test_a_constant_of_a_forward_is_set_back_to_its_sign():
    class Negates(nn.Linear):
        zero = 0.0

        def forward(self, x):
            self.zero = -self.zero
            return super().forward(x) * self.zero

    net = Negates(2, 2)
    net.zero = 0.0
    reach = Reach(behind_calls(net))
    net(torch.zeros(2))
    assert reach.changed()
    reach.restore()
    assert str(net.zero) == "0.0"


def test_an_event_that_another_thread_sets_stays_set():
    """What no code of the forward sets is a message to it."""

    class Asks(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if self.stop.is_set() else 1)

    net = Asks(2, 2)
    net.stop = threading.Event()
    reach = Reach(behind_calls(net))
    net.stop.set()
    reach.restore()
    assert net.stop.is_set()


def test_a_full_cache_works_on_after_its_results_were_dropped():
    @functools.lru_cache(3)
    def squared(x):
        return x * x

    class Asks(nn.Linear):
        def forward(self, x):
            return super().forward(x) * sum(map(squared, range(10, 12)))

    net = Asks(2, 2)
    squared(1)
    reach = Reach([*behind_calls(net), squared])
    net(torch.zeros(2))
    reach.restore()
    assert squared.cache_info().currsize == 1
    for _ in range(3):
        assert [squared(x) for x in (1, *range(20))] == [x * x for x in (1, *range(20))]
        assert squared.cache_info().currsize <= 3
