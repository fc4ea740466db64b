"""Optimizers that do not wait for the verdict on their gradients, as on a GPU: the same bits.

There is no GPU here: the verdict lies in host memory, and is taken for one on a device.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from elbowroom.kernels import reference
from elbowroom.kernels import triton as gpu
from elbowroom.optim import SGD, STATES, AdamW, Lion, base
from elbowroom.optim import release as releases
from waiting import NoWaiting

every = pytest.mark.parametrize(
    ("cls", "state"), [*((AdamW, state) for state in STATES), (Lion, "int8"), (SGD, "int4x2")]
)


@pytest.fixture
def late(monkeypatch):
    verdicts_come_later(monkeypatch, is_late=True)


def verdicts_come_later(monkeypatch, *, is_late):
    for module in (base, releases):
        monkeypatch.setattr(module, "is_read_later", lambda flag: is_late)


def network(dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = nn.Linear(100, 150), nn.Tanh(), nn.Linear(150, 41), nn.Tanh(), nn.Linear(41, 3)
    return nn.Sequential(*layers).to(dtype)


def backward(net, step, bad=False):
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(step))
    net(x.to(net[0].weight.dtype)).float().square().mean().backward()
    if bad:
        net[2].bias.grad[1] = torch.nan


def train(net, optimizer, steps, bad=(), ask=lambda optimizer: None):
    for step in steps:
        optimizer.zero_grad()
        hook = net[2].bias.register_hook(lambda grad: grad * torch.nan) if step in bad else None
        backward(net, step)
        optimizer.step()
        if hook is not None:
            hook.remove()
        ask(optimizer)
    return [*net.parameters(), *(x for s in optimizer.state.values() for x in s.values())]


ASKS = {
    "nothing": lambda optimizer: None,
    "skipped": lambda optimizer: optimizer.skipped,
    "state_dict": lambda optimizer: optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    ),
}


@pytest.mark.sampled(2)
@every
@pytest.mark.parametrize("released", [False, True], ids=["ordinary", "released"])
@pytest.mark.parametrize("ask", ASKS)
def test_bits_and_skipped_steps_are_those_of_an_optimizer_that_waits(
    cls, state, released, ask, monkeypatch
):
    found = []
    for is_late in (False, True):
        verdicts_come_later(monkeypatch, is_late=is_late)
        net = network()
        optimizer = cls(net.parameters(), lr=1e-2, state=state)
        release = optimizer.release_gradients() if released else None
        train(net, optimizer, range(9), (2, 3, 7), ASKS[ask])
        held = train(net, optimizer, range(9, 10), (9,), ASKS[ask])
        assert optimizer.skipped == 4  # after it all counters of steps are right
        found.append([x.clone() for x in held])
        del release
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("late")
def test_what_is_saved_or_copied_before_the_verdict_is_known_is_right():
    net = network()
    optimizer = AdamW(net.parameters(), state="int8")
    train(net, optimizer, range(4), (3,))
    saved, (twin, other) = optimizer.state_dict(), copy.deepcopy((net, optimizer))
    again = pickle.loads(pickle.dumps(optimizer))
    assert {float(s["step"]) for s in saved["state"].values()} == {3}
    for one in (optimizer, other, again):
        assert {float(s["step"]) for s in one.state.values()} == {3}
        assert one.skipped == 1
    train(net, optimizer, range(4, 6))
    train(twin, other, range(4, 6))
    assert all(map(torch.equal, net.parameters(), twin.parameters()))


@pytest.mark.usefixtures("late")
def test_a_release_that_ends_in_mid_step_counts_what_it_left():
    net = network()
    optimizer = AdamW(net.parameters(), state="int8")
    release = optimizer.release_gradients()
    train(net, optimizer, range(2))
    net[2].bias.register_hook(lambda grad: grad * torch.nan)
    backward(net, 2)
    saved = optimizer.state_dict()["state"]
    assert {i: float(s["step"]) for i, s in saved.items()} == {0: 3, 1: 3, 2: 3, 3: 2, 4: 3, 5: 3}
    release.remove()
    assert optimizer.skipped == 1
    assert float(optimizer.state[net[2].bias]["step"]) == 2
    assert float(optimizer.state[net[2].weight]["step"]) == 3


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("late")
def test_a_settled_step_waits_for_nothing(cls, state, dtype):
    net = network(dtype)
    groups = [{"params": net[0].parameters()}, {"params": net[2:].parameters(), "lr": 1e-2}]
    optimizer = cls(groups, state=state)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(net, optimizer, range(2))
    for step in range(3):
        backward(net, step)
        with NoWaiting():
            optimizer.step()
        schedule.step()
    assert optimizer.skipped == 0
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaiting():
        torch.ones(()).item()


def test_what_serves_a_gpu_waits_for_nothing():
    x, y = torch.randn(3, 40), torch.randn(7).bfloat16()
    states = [torch.zeros(3, 40)], [], [torch.zeros(3, 40)], []
    numbers = "adamw", "nearest", "fp32", "fp32", [40], torch.zeros(1, 8), [5]
    with NoWaiting():
        flag = reference.beyond([x, y], 1e30)
        gpu.optimizer_step([x], [], [x.cos()], *states, *numbers, flag)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_gradient_in_half_precision_that_is_not_finite_is_refused(dtype, bad, state):
    p = nn.Parameter(torch.ones(64, 80, dtype=dtype))
    optimizer = AdamW([p], state=state, weights="nearest")
    p.grad = torch.ones_like(p)
    p.grad[3, 4] = bad
    optimizer.step()
    assert optimizer.skipped == 1
    assert torch.equal(p, torch.ones_like(p))
