"""Copies of what is gathered from are made when something is made of them, not before."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import elbowroom as er
from elbowroom.plan.action import Keep
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.sources import LateCopy
from elbowroom.runtime.storage import WeakStorage

NODES, EDGES, WIDTH = 500, 8000, 64
LEDGER = Ledger()


def late_copy(x: Tensor, out: Tensor) -> LateCopy:
    return LateCopy(x, x, LEDGER.open("", "index_select", "float32", 0), out)


def test_the_value_is_a_copy_and_the_tensor_is_not_held_before():
    x, out = torch.randn(4, 3), torch.randn(8, 3)
    slot, weak = late_copy(x, out), WeakStorage(x)
    assert weak.holders() == 1
    assert slot.entry.after_nbytes == 0
    assert slot.value is not None
    restored = slot.value.restore()
    assert torch.equal(restored, x)
    assert restored.data_ptr() != x.data_ptr()
    assert slot.entry.after_nbytes == x.nbytes
    assert slot.value.restore().data_ptr() == restored.data_ptr()


def test_a_tensor_that_was_changed_gives_no_copy():
    x, out = torch.randn(4, 3), torch.randn(8, 3)
    slot = late_copy(x, out)
    x.add_(1)
    assert slot.value is None


@pytest.mark.parametrize("change", [False, True])
def test_a_tensor_that_dies_is_copied_for_what_was_made_of_it(change):
    x, out = torch.randn(4, 3), torch.randn(8, 3)
    slot, before = late_copy(x, out), x.clone()
    if change:
        x.mul_(2)
    del x
    if change:
        assert slot.value is None
    else:
        assert slot.value is not None
        assert torch.equal(slot.value.restore(), before)


class Seen(TorchFunctionMode):
    """Notes every function that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", repr(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asks", [False, True])
def test_no_op_of_the_models_is_seen_where_a_tensor_dies(asks: bool) -> None:
    """Else it is written into a script that no later forward follows."""
    x, out = torch.randn(4, 3), torch.randn(8, 3)
    slot = late_copy(x, out)
    with Seen() as seen:
        if asks:
            assert slot.value is not None
        del x
    assert seen.names == []
    assert slot.value is not None


def test_a_tensor_that_dies_after_what_was_made_of_it_gives_no_copy():
    x, out = torch.randn(4, 3), torch.randn(8, 3)
    slot = late_copy(x, out)
    del out
    del x
    assert slot.value is None


def test_a_view_that_is_gone_at_once_is_copied_while_its_base_lives():
    x, out = torch.randn(12), torch.randn(8, 3)
    slot = late_copy(x.view(4, 3), out)
    assert slot.value is not None
    assert torch.equal(slot.value.restore(), x.view(4, 3))
    slot = late_copy(x.view(4, 3), out)
    x.zero_()
    assert slot.value is None


class Layer(nn.Module):
    """Graph convolution without weights of edges: what it gathers, no op saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h = self.linear(x)
        return h.new_zeros(h.shape).index_add(0, index[1], h.index_select(0, index[0]))


@pytest.mark.filterwarnings("ignore:this saving context changed nothing")
def test_gathering_takes_no_more_than_it_does_plainly():
    torch.manual_seed(0)
    model, x = nn.ModuleList(Layer() for _ in range(2)), torch.randn(NODES, WIDTH)
    index = torch.randint(0, NODES, (2, EDGES))

    def step(context: AbstractContextManager[object]) -> None:
        h = x
        with context:
            for layer in model:
                h = layer(h, index)
        h.sum().backward()
        model.zero_grad()

    def looked_at() -> AbstractContextManager[object]:
        return er.saving(lambda site: Keep("a test"))  # a function of one's own is never replayed

    step(looked_at())
    plain, ours = er.peak(lambda: step(nullcontext())), er.peak(lambda: step(looked_at()))
    assert ours <= plain + 8 * NODES  # a few numbers


class Weighted(nn.Module):
    """The same with weights of edges, which are data: no op saves what they are multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sums = nn.Linear(WIDTH, WIDTH), Sums()

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        h = self.linear(x)
        return self.sums(h, weight * h.index_select(0, index[0]), index[1])


class Sums(nn.Module):
    def forward(self, like: Tensor, messages: Tensor, index: Tensor) -> Tensor:
        to = index[:, None].expand_as(messages)
        return like.new_zeros(like.shape).scatter_add(0, to, messages)


def test_nothing_is_copied_to_find_out_that_it_could_be(monkeypatch):
    layers, h = nn.ModuleList(Weighted() for _ in range(2)), torch.randn(NODES, WIDTH)
    index, weight = torch.randint(0, NODES, (2, EDGES)), torch.rand(EDGES, 1)
    copies: list[object] = []
    monkeypatch.setattr(LateCopy, "hold", lambda slot, handle: copies.append(handle))

    def step() -> None:
        x = h
        for layer in layers:
            x = torch.tanh(layer(x, index, weight))
        x.sum().backward()

    er.measure(step, min_nbytes=0)
    assert not copies


@pytest.mark.usefixtures("one_thread")  # torch's sum over an index differs from run to run
@pytest.mark.parametrize("temporary", [False, True])
def test_what_is_gathered_is_made_again(temporary):
    torch.manual_seed(0)
    h = torch.randn(NODES, WIDTH, requires_grad=True)
    weight = torch.rand(EDGES, 1, requires_grad=True)
    index = torch.randint(0, NODES, (EDGES,))

    def loss() -> Tensor:
        if temporary:
            return ((h * 1.5)[index] * weight).sum()
        x = h * 1.5
        return (x[index] * weight).sum() + x.sum()

    plain = torch.autograd.grad(loss(), (h, weight))
    with er.saving(min_nbytes=0) as saved:
        made = loss()
    ours = torch.autograd.grad(made, (h, weight))
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))
    assert saved.ledger.before_nbytes > 8 * saved.ledger.after_nbytes


def test_queries_keys_and_values_of_edges_are_all_made_again():
    """They are gathered one after the other, before anything is made of the first."""
    x, index = torch.randn(NODES, WIDTH), torch.randint(0, NODES, (EDGES,))
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]

    def loss() -> Tensor:
        q, k, v = ((x @ w)[index] for w in weights)
        return (v * (q * k).sum(-1, keepdim=True)).square().sum()

    plain = torch.autograd.grad(loss(), weights)
    with er.saving(min_nbytes=0) as saved:
        ours = loss()
    of_edges = [row for row in saved.ledger.rows if row.consumer == "mul"]
    assert {row.action for row in of_edges if row.before_nbytes > x.nbytes} == {"rebuild"}
    assert all(map(torch.equal, plain, torch.autograd.grad(ours, weights)))
