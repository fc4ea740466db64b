"""A watched step in every kind of training loop gives the very bits of one that is not watched."""

from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.measure import NoiseMeter
from elbowroom.plan import Lossy
from elbowroom.runtime.context import Context
from elbowroom.runtime.saving import Saving


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU()),
        *(nn.Flatten(), nn.Linear(16 * 64, 10)),
    )


X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def plainly(model, context):
    with context():
        loss = model(X).square().mean()
    loss.backward()


def under_autocast(model, context):
    with context(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(X).float().square().mean()
    loss.backward()


def with_checkpoint(model, context):
    with context():
        x = X * torch.ones(1, requires_grad=True)
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
    loss.backward()


def twice_differentiated(model, context):
    with context():
        loss = model(X).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(grad.square().sum() for grad in grads)).backward()


def backward_inside(model, context):
    with context():
        model(X).square().mean().backward()


def in_parts(model, context):
    with context():
        between = model[:4](X)
        out = model[4:](between)
    torch.autograd.grad(out.sum(), between, retain_graph=True)
    out.square().mean().backward()


def after_an_error(model, context):
    with suppress(KeyError), context():
        model(X)
        raise KeyError
    plainly(model, context)


def in_two_batches(model, context):
    for half in X.chunk(2):
        with context():
            loss = model(half).square().mean()
        loss.backward()


def with_a_hook_of_the_users(model, context):
    with context():
        between = model[0](X)
        between.register_hook(lambda grad: grad * 0.5)
        loss = model[1:](between).square().mean()
    loss.backward()


def with_a_checkpoint_below(model, context):
    """Which runs again when a probe sends errors down: its norm must not count that batch."""
    x = X * torch.ones(1, requires_grad=True)
    with context():
        below = checkpoint(model[:3], x, use_reentrant=False)
        loss = model[3:](below).square().mean()
    loss.backward()


def one_tensor_twice(model, context):
    """In one op, or in two of which one is probed: a copy kept by a probe would be taken for it."""
    with context():
        h = model[:6](X).flatten(2)
        gram = torch.bmm(h, h.transpose(1, 2))
        read = nn.functional.scaled_dot_product_attention(h * 1, h, h)
        loss = (gram.mean() + (torch.eye(16) @ read).square().mean()) * model[6:](h).square().mean()
    loss.backward()


LOOPS = (
    *(with_a_checkpoint_below, one_tensor_twice),
    *(plainly, under_autocast, with_checkpoint, twice_differentiated, backward_inside),
    *(in_parts, after_an_error, in_two_batches, with_a_hook_of_the_users),
)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_loop_is_not_disturbed(loop):
    results, policy = [], Lossy(er.codec("dither", levels=4))
    for meter in (None, NoiseMeter(run=100, probes=100)):
        model = net()
        context = partial(Saving, policy, min_nbytes=0, context=Context(3), observer=meter)
        for _ in range(3):
            model.zero_grad()
            loop(model, context)
        results.append([p.grad for p in model.parameters()] + list(model.buffers()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    meter.harvest()
    assert meter.table.steps > 0 or loop is with_checkpoint  # whose own hooks see what is saved
    assert not any(parameter._backward_hooks for parameter in model.parameters())


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_an_op_whose_sixth_argument_is_a_tensor(cell):
    """It was taken for batch norm's `training`, and asked whether it is True."""
    model, meter, h = cell(16, 32), NoiseMeter(probes=100), torch.randn(64, 32)
    x = torch.randn(64, 16, requires_grad=True)
    for _ in range(4):
        with Saving(Lossy(er.codec("dither")), min_nbytes=0, observer=meter):
            out = model(x * 1, (h, h) if cell is nn.LSTMCell else h)
            loss = (out[0] if cell is nn.LSTMCell else out).square().mean()
        loss.backward()
    meter.harvest()
    assert meter.table.steps > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_any_dtype(dtype):
    model, meter = nn.Linear(8, 8, dtype=dtype), NoiseMeter(probes=100)
    for _ in range(4):
        x = torch.randn(64, 8, dtype=dtype, requires_grad=True)
        with Saving(Lossy(er.codec("dither")), min_nbytes=0, observer=meter):
            loss = model(x * 1).abs().sum()
        loss.backward()
    meter.harvest()
    assert meter.table.gradient.draws > 0
