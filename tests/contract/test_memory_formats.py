"""Moments stay with their weights, whichever memory format the model and the file are in."""

import copy

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom import errors
from elbowroom.optim import SGD, AdamW, Lion
from elbowroom.optim.auto import hold

ROWS, LAST = torch.contiguous_format, torch.channels_last
STEPS = 6
every = pytest.mark.parametrize(
    ("cls", "state"),
    [
        *((AdamW, state) for state in ("fp32", "int8", "coat", "int4x2")),
        *((cls, "int8") for cls in (SGD, Lion)),
    ],
)


def model(held=ROWS, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Conv2d(32, 64, 3, bias=False).to(dtype).to(memory_format=held)


def make(cls, net, state):
    return cls(net.parameters(), lr=1e-2, state=state)


def train(net, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        # Magnitudes differ from weight to weight: a moment of another weight is seen at once.
        g = torch.randn(64, 32, 3, 3, generator=generator)
        net.weight.grad = (g * torch.linspace(0.01, 1, g.numel()).view_as(g)).to(net.weight.dtype)
        optimizer.step()


def moments(optimizer):
    (state,) = optimizer.portable_state_dict()["state"].values()
    return [state[name] for name in optimizer.moments]


def near(a, b, state):
    """Within what encoding once more may change."""
    limit = {"fp32": 1e-6, "int4x2": 0.5}.get(state, 0.05)
    return all(float((p - q).norm() / q.norm()) < limit for p, q in zip(a, b, strict=True))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("before", "after"), [(ROWS, LAST), (LAST, ROWS)])
def test_moments_follow_a_model_into_another_format(cls, state, dtype, before, after):
    net = model(before, dtype)
    optimizer = make(cls, net, state)
    train(net, optimizer, 0, 3)
    truth, twin = moments(optimizer), copy.deepcopy((net, optimizer))
    net.to(memory_format=after)
    assert near(moments(optimizer), truth, "fp32")  # read before a step has brought them over
    for one in ((net, optimizer), twin):
        train(*one, 3, STEPS)
    assert near(moments(optimizer), moments(twin[1]), state)
    held = sum(t.nbytes for t in optimizer.state[net.weight].values())
    assert held == optimizer.state_nbytes(net.weight)
    if dtype is torch.bfloat16:
        assert optimizer.state[net.weight]["residual"].stride() == net.weight.stride()


@every
@pytest.mark.parametrize(("of_file", "of_model"), [(ROWS, LAST), (LAST, ROWS), (LAST, LAST)])
def test_a_file_of_one_format_loads_into_a_model_of_another(cls, state, of_file, of_model):
    net = model(of_file, torch.bfloat16)
    optimizer = make(cls, net, state)
    train(net, optimizer, 0, 3)
    other = copy.deepcopy(net).to(memory_format=of_model)
    for held in {state, "int8", "fp32"}:
        resumed = make(cls, other, held)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert near(moments(resumed), moments(optimizer), state if held == "fp32" else held)
        residual = resumed.state[other.weight]["residual"]
        assert torch.equal(residual, optimizer.state[net.weight]["residual"])
        if held == state and of_file is of_model:  # bit for bit
            for key, x in optimizer.state[net.weight].items():
                assert torch.equal(resumed.state[other.weight][key], x)


def test_an_auto_optimizer_converts_what_lies_otherwise_by_now():
    net = model()
    optimizer = make(AdamW, net, "auto")
    train(net, optimizer, 0, 3)
    truth = moments(optimizer)
    net.to(memory_format=LAST)
    assert hold(optimizer, "int8") == 1
    assert near(moments(optimizer), truth, "int8")
    train(net, optimizer, 3, STEPS)
    assert net.weight.isfinite().all()


def test_a_file_that_does_not_say_its_order_is_taken_as_it_was():
    net = model(LAST)
    optimizer = make(AdamW, net, "int8")
    train(net, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["version"] = 1
    del saved["state"][0]["order"]
    resumed = make(AdamW, net, "int8")
    resumed.load_state_dict(saved)
    assert all(map(torch.equal, moments(resumed), moments(optimizer)))


def test_an_order_of_another_tensor_is_refused():
    net = model(LAST)
    optimizer = make(AdamW, net, "int8")
    train(net, optimizer, 0, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    for wrong in ([0, 2, 3, 3], [0, 2], [-1, 0, 1, 2]):
        saved["state"][0]["order"] = torch.tensor(wrong)
        with pytest.raises(errors.StateMismatch, match="'order'"):
            optimizer.load_state_dict(saved)


def test_what_is_row_after_row_says_nothing_of_its_order():
    odd = nn.Parameter(torch.randn(64, 80, 1, 1).to(memory_format=LAST))  # in both formats
    for p in (*model().parameters(), odd):
        optimizer = AdamW([p])
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert "order" not in optimizer.state[p]
    assert er.optim.state_nbytes(model(LAST).weight, "int8") == 4 + er.optim.state_nbytes(
        model().weight, "int8"
    )
