"""Pooling asks its input for a shape only: nothing is held, and no bit of a gradient changes."""

import pytest
import torch
from torch import nn

import elbowroom as er

KINDS = ("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool")


def gradients(model, x, context=None):
    model.zero_grad()
    if context is None:
        loss = model(x).square().sum()
    else:
        with context:
            loss = model(x).square().sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_gradients_are_bit_equal(dims, kind, channels_last):
    if channels_last and dims != 2:
        pytest.skip("channels_last is a layout of 4-D tensors")
    torch.manual_seed(0)
    conv, pool = getattr(nn, f"Conv{dims}d"), getattr(nn, f"{kind}{dims}d")
    model = nn.Sequential(conv(2, 8, 3, padding=1), nn.ReLU(), pool(2), conv(8, 4, 1), pool(2))
    x = torch.randn(3, 2, *[8] * dims)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    saved = er.saving(min_nbytes=0)
    for plain, ours in zip(gradients(model, x), gradients(model, x, saved), strict=True):
        assert torch.equal(plain, ours)
    assert saved.ledger.totals("action")["shape"][1] == 0
    assert saved.ledger.totals("action")["bits"][0] > 0


def test_a_pooled_tensor_that_another_op_needs_is_still_there():
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    y = torch.randn(2, 4, 8, 8, requires_grad=True)

    def loss(context=None):
        def forward():
            h = x * 2
            return (
                nn.functional.max_pool2d(h, 2).sum()
                + (h / y).sum()
                + nn.functional.avg_pool2d(h, 2).sum()
            )

        if context is None:
            return forward()
        with context:
            return forward()

    plain = torch.autograd.grad(loss(), (x, y))
    ours = torch.autograd.grad(loss(er.saving(min_nbytes=0)), (x, y))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_policy_keep_still_counts_it():
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    with er.saving("keep", min_nbytes=0) as saved:
        out = nn.functional.avg_pool2d(x * 2, 2).sum()
    assert saved.ledger.before_nbytes == saved.ledger.after_nbytes >= 2 * 4 * 8 * 8 * 4
    out.backward()
