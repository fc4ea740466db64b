"""Steps that a GPU counts for itself have the bits of those that the host counts.

There is no GPU here. Tensors in host memory play those of a device.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.optim import base, batch, device_steps
from waiting import Numbers

pytestmark = pytest.mark.usefixtures("one_thread")
RULES = {
    "adamw": lambda p, **more: er.optim.AdamW(p, lr=1e-2, **more),
    "lion": lambda p, **more: er.optim.Lion(p, lr=1e-3, **more),
    "sgd": lambda p, **more: er.optim.SGD(p, lr=1e-2, momentum=0.9, **more),
}


@pytest.fixture
def there(monkeypatch):
    """Makes the steps of all parameters be counted where they lie, and verdicts be read late."""
    monkeypatch.setattr(batch, "counts_for_itself", lambda p: True)
    monkeypatch.setattr(base, "is_read_later", lambda flag: True)


def parameters(dtype):
    """Of two groups, one of which has another learning rate."""
    draw = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(n, 256, generator=draw).to(dtype)) for n in (3, 16, 1, 20)]
    return [{"params": made[:2]}, {"params": made[2:], "lr": 3e-3}], made


def trained(rule, dtype, state, steps=9, mode=nullcontext):
    """Parameters and states after some steps, of which one is refused and one has less gradients.

    mode: is opened around the last two steps; what it gives is returned, too
    """
    groups, made = parameters(dtype)
    optimizer = RULES[rule](groups, state=state)
    draw, seen = torch.Generator().manual_seed(1), []
    for step in range(steps):
        for i, p in enumerate(made):
            p.grad = torch.randn(p.shape, generator=draw).to(dtype)
            if step == 2 and i == 1:
                p.grad[0, 0] = float("inf")
            if step == 4 and i == 3:
                p.grad = None
        with mode() if step >= steps - 2 else nullcontext() as opened:
            optimizer.step()
        seen.append(opened)
    found = optimizer.state_dict()["state"]
    return [*made, *(x for one in found.values() for x in one.values())], seen[-2:]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("dtype", "state"),
    [(torch.float32, "int8"), (torch.float32, "fp32"), (torch.bfloat16, "coat")],
)
def test_the_bits_are_those_of_steps_that_the_host_counts(rule, dtype, state, request):
    expected, _ = trained(rule, dtype, state)
    request.getfixturevalue("there")
    got, _ = trained(rule, dtype, state)
    assert len(got) == len(expected) > 8
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(*(x.detach().reshape(-1).view(torch.uint8) for x in (one, other)))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("rule", RULES)
def test_a_settled_step_gives_kernels_the_same_numbers(rule):
    _, (one, other) = trained(rule, torch.float32, "int8", mode=Numbers)
    count = "elbowroom.advance.default"  # the host's own
    assert [x for x in one.found if x[0] != count] == [x for x in other.found if x[0] != count]
    assert any("optimizer_step" in x[0] for x in one.found)


def test_the_numbers_of_steps_that_the_host_counts_differ(monkeypatch):
    """What the last test looks for is there otherwise."""
    monkeypatch.setattr(base, "is_read_later", lambda flag: True)
    _, (one, other) = trained("adamw", torch.float32, "int8", mode=Numbers)
    assert one.found != other.found


@pytest.mark.usefixtures("there")
def test_a_learning_rate_in_a_tensor_is_read_where_it_lies():
    first = parameters(torch.float32)[1][0]
    rate = torch.tensor(1e-2)
    optimizer = er.optim.AdamW([first], lr=rate, weight_decay=0.0, state="fp32")
    before, seen = first.detach().clone(), []
    for value in (1e-2, 1e-2, 0.0):
        rate.fill_(value)
        first.grad = torch.ones_like(first)
        with Numbers() as numbers:
            optimizer.step()
        seen.append(numbers.found)
        moved = first.detach() - before
        before = first.detach().clone()
        assert torch.allclose(moved, torch.full_like(moved, -value), rtol=1e-3)
    count = "elbowroom.advance.default"
    assert [x for x in seen[1] if x[0] != count] == [x for x in seen[2] if x[0] != count]


@pytest.mark.usefixtures("there")
def test_the_host_hears_of_what_graphs_have_done(monkeypatch):
    """Three launches of a captured step: states of a checkpoint, and the next step, count them."""
    groups, made = parameters(torch.float32)
    optimizer = er.optim.AdamW(groups, state="fp32")

    def step():
        for p in made:
            p.grad = torch.ones_like(p)
        optimizer.step()

    step()
    step()
    with monkeypatch.context() as patch:
        for where in (base, device_steps):
            patch.setattr(where, "is_capturing", lambda device: True)
        step()  # which runs here: it is the first launch
    assert optimizer._running is None
    (known,) = optimizer._counts._known.values()
    known.there.add_(2)  # two more
    steps = {float(one["step"]) for one in optimizer.state_dict()["state"].values()}
    assert steps == {5.0}
    step()
    assert {float(optimizer.state[p]["step"]) for p in made} == {6.0}
    assert known.there.tolist() == [6] * 4
    optimizer.load_state_dict(optimizer.state_dict())
    step()
    assert {float(optimizer.state[p]["step"]) for p in made} == {7.0}
