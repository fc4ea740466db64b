"""autocast's copies of parameters are cast again, not held: to the bit, or with an error."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import RestoreError


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 64), nn.GELU(), nn.Linear(64, 64)
    )


def gradients(model: nn.Module, context, times: int = 1) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with context, bf16():
        loss = torch.stack([model(x).float().square().mean() for _ in range(times)]).sum()
    loss.backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


def cast_rows(saved) -> dict[str, int]:
    """Bytes held for copies of parameters, by the op."""
    whys = "made of parameters only"
    return {
        row.consumer: row.after_nbytes
        for row in saved.ledger.rows
        if row.why == whys and row.action == "keep"
    }


@pytest.mark.parametrize("times", [1, 2])  # the second forward finds them in autocast's cache
def test_copies_of_weights_are_not_held_and_every_bit_is_the_same(times):
    model = net()
    expected = gradients(model, nullcontext(), times)
    held = er.saving(rebuild=False, min_nbytes=0)
    gradients(model, held, times)
    assert cast_rows(held).keys() == {"conv2d", "linear"}
    saved = er.saving(min_nbytes=0)
    for got, wanted in zip(gradients(model, saved, times), expected, strict=True):
        assert torch.equal(got, wanted)
    assert not cast_rows(saved)
    weights = sum(2 * model[i].weight.numel() for i in (0, 2, 4))
    assert saved.ledger.after_nbytes <= held.ledger.after_nbytes - weights


def test_lossy_contexts_do_so_too_and_keep_does_not():
    model = net()
    for policy, held in (("dither", False), ("keep", True)):
        with er.saving(policy, min_nbytes=0) as saved, bf16():
            loss = model(torch.randn(4, 3, 8, 8)).float().square().mean()
        loss.backward()
        assert bool(cast_rows(saved)) == held


def test_a_parameter_that_changed_before_backward_is_an_error():
    model = net()
    with er.saving(min_nbytes=0), bf16():
        loss = model(torch.randn(4, 3, 8, 8)).float().square().mean()
    with torch.no_grad():
        model[4].weight.mul_(2)
    with pytest.raises(RestoreError, match="inplace operation"):
        loss.backward()


def test_an_older_copy_from_the_cache_of_autocast_is_held():
    """The parameter has changed since it was cast: what is cast now would be something else."""
    layer = nn.Linear(32, 32, bias=False)
    x = torch.randn(8, 32)

    def gradient(context) -> Tensor:
        nn.init.eye_(layer.weight)
        with bf16():
            layer(x)  # the cache has a copy from here on
            with torch.no_grad():
                layer.weight.mul_(2)
            leaf = x.clone().requires_grad_()
            with context:
                loss = layer(leaf).float().square().sum()
            loss.backward()
        return leaf.grad

    assert torch.equal(gradient(er.saving(min_nbytes=0)), gradient(nullcontext()))


def test_the_same_where_the_copy_is_made_inside_the_context():
    layer = nn.Linear(32, 32, bias=False)
    x = torch.randn(8, 32)

    def gradient(context) -> Tensor:
        nn.init.eye_(layer.weight)
        leaf = x.clone().requires_grad_()
        with context, bf16():
            layer(x)  # which saves no weight: its input wants no gradient
            with torch.no_grad():
                layer.weight.mul_(2)
            loss = layer(leaf).float().square().sum()
        loss.backward()
        return leaf.grad

    assert torch.equal(gradient(er.saving(min_nbytes=0)), gradient(nullcontext()))


@pytest.mark.parametrize("turn", [lambda w: w, lambda w: w.t().contiguous().t()])
def test_a_parameter_in_another_order(turn):
    layer = nn.Linear(24, 16)
    layer.weight = nn.Parameter(turn(layer.weight.detach()))
    x = torch.randn(8, 24)

    def gradient(context) -> Tensor:
        leaf = x.clone().requires_grad_()
        with context, bf16():
            loss = layer(leaf).float().square().sum()
        loss.backward()
        return leaf.grad

    saved = er.saving(min_nbytes=0)
    assert torch.equal(gradient(saved), gradient(nullcontext()))
    assert not cast_rows(saved)


def test_of_shared_memory_that_was_freed_an_error():
    layer = nn.Linear(32, 32)
    leaf = torch.randn(8, 32, requires_grad=True)
    with er.saving(min_nbytes=0), bf16():
        loss = layer(leaf).float().square().sum()
    layer.weight.untyped_storage().resize_(0)
    with pytest.raises(RestoreError, match="freed after forward"):
        loss.backward()


def test_a_weight_of_the_shape_of_the_input_is_not_taken_for_the_cast_of_it():
    """A batch of as many rows as a square layer is wide: the layer saves its weight first."""

    def grads(context) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        first, second, third = (nn.Parameter(0.4 * torch.randn(8, 8)) for _ in range(3))
        x, fixed = torch.randn(8, 8), torch.randn(8, 8)
        with context, bf16():
            F.linear(x, first)  # so that enough is multiplied to make one of the others again
            h = F.layer_norm(second * 1, (8,))
            F.linear(h, fixed)
            y = F.linear(F.linear(h, third), third)
            loss = torch.addmm(y, y, second * 1).square().sum()
        return torch.autograd.grad(loss, (second, third))

    wanted = grads(nullcontext())
    assert all(map(torch.equal, grads(er.saving(min_nbytes=0)), wanted))
