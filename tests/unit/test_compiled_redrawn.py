"""What codes add to the gradients of a region is measured in one step, which is like any other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from elbowroom.compiled import Redraw, Rehearsal, redrawable
from elbowroom.compiled.redrawn import _Sketch

PLENTY = 1 << 30
_noise = torch.Generator().manual_seed(3)


class Noisy(torch.autograd.Function):
    """x @ w, with a tenth of noise in what is saved of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x + 0.1 * torch.randn(x.shape, generator=_noise), w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return given @ w.t(), x.t() @ given


def noisy(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():  # as AOTAutograd has it
        return (Noisy.apply(torch.tanh(Noisy.apply(x, w)), v),)


def given() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    w, v = torch.randn(64, 300) / 8, torch.randn(300, 32) / 17
    return torch.randn(512, 64), w.requires_grad_(), v.requires_grad_()


def test_the_error_is_that_of_the_gradients() -> None:
    x, w, v = given()
    exact = torch.autograd.grad((torch.tanh(x @ w) @ v).square().sum(), (w, v))
    square = sum(g.square().sum() for g in exact)
    region, measured, true = redrawable(noisy), [], []
    for _ in range(6):
        redraw = Redraw(PLENTY, PLENTY)
        with redraw:
            (out,) = region(x, w, v)
        found = torch.autograd.grad(out.square().sum(), (w, v))
        off = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))
        true.append(float(off / square))
        assert redraw.error is not None
        measured.append(redraw.error)
    assert sum(measured) == pytest.approx(sum(true), rel=0.1)
    assert sum(true) / 6 > 1e-4


def test_numbers_are_drawn_again_and_what_forward_changes_is_changed_once() -> None:
    x, w, _ = given()
    count = torch.zeros(1)

    def region(x: Tensor, w: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = F.dropout(x, 0.5) @ w
            count.add_(1)
            return out * count, out.argmax(-1)

    gradients, drawn = [], []
    for redraw in (None, Redraw(PLENTY, PLENTY)):
        torch.manual_seed(1)
        count.zero_()
        if redraw is None:
            out, index = region(x, w, count)
        else:
            with redraw:
                out, index = redrawable(region)(x, w, count)
        assert not index.requires_grad
        assert count == 1
        gradients.append(torch.autograd.grad(out.square().sum(), w)[0])
        drawn.append(torch.rand(3))
        assert count == 1
    assert torch.equal(*gradients)
    assert torch.equal(*drawn)
    assert redraw is not None
    assert redraw.error == 0


def test_no_code_is_held_between_forward_and_backward() -> None:
    x, w, v = given()
    held = []

    def region(*args: Tensor) -> tuple[Tensor, ...]:
        out = noisy(*args)
        out[0].grad_fn.register_prehook(lambda _: None)
        held.append(out[0].grad_fn)
        return out

    with Redraw(PLENTY, PLENTY):
        (out,) = redrawable(region)(x, w, v)
    assert out.grad_fn is not held[0]
    assert len(out.grad_fn.saved_tensors) == 3  # as they were given
    assert all(
        a.data_ptr() == b.data_ptr()
        for a, b in zip(out.grad_fn.saved_tensors, (x, w, v), strict=True)
    )


@pytest.mark.parametrize(
    "region",
    [
        lambda x, w, v: (x[:2], *noisy(x, w, v)),
        lambda x, w, v: (3, *noisy(x, w, v)),
        lambda x, w, v: (*(out := noisy(x, w, v)), out[0][:1]),
    ],
)
def test_results_that_are_views_or_numbers_are_left_alone(region: Callable[..., Any]) -> None:
    x, w, v = given()
    rehearsal, redraw = Rehearsal(), Redraw(PLENTY, PLENTY)
    for watcher in (rehearsal, redraw):
        with watcher:
            out = redrawable(region)(x, w, v)
        next(y for y in out if isinstance(y, Tensor) and y.requires_grad).sum().backward()
    assert rehearsal.is_steady is False
    assert redraw.error is None


def test_without_room_a_step_is_as_any_other() -> None:
    x, w, v = given()
    for redraw in (Redraw(100, PLENTY), Redraw(PLENTY, 100)):
        with redraw:
            (out,) = redrawable(noisy)(x, w, v)
        assert out.grad_fn.name() == "NoisyBackward"
        out.sum().backward()
        assert redraw.error is None


@pytest.mark.parametrize("how", ["kept", "changed", "dropped"])
def test_a_rehearsal_shows_whether_the_batch_is_there_in_backward(how: str) -> None:
    x, w, v = given()
    rehearsal = Rehearsal()
    with rehearsal:
        (out,) = redrawable(lambda x, w, v: noisy(x.clone(), w, v))(x, w, v)
    assert rehearsal.is_steady is None
    if how == "changed":
        x.zero_()
    elif how == "dropped":
        del x
    out.sum().backward()
    assert rehearsal.is_steady is (how == "kept")


def test_a_change_before_backward_is_an_error() -> None:
    x, w, v = given()
    with Redraw(PLENTY, PLENTY):
        (out,) = redrawable(noisy)(x, w, v)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_only_the_first_region_of_a_forward_is_measured() -> None:
    x, w, v = given()
    region = redrawable(noisy)
    with Redraw(PLENTY, PLENTY):
        first, second = region(x, w, v), region(x, w, v)
    third = region(x, w, v)
    names = [one[0].grad_fn.name() for one in (first, second, third)]
    assert names == ["_RedrawnBackward", "NoisyBackward", "NoisyBackward"]


@pytest.mark.parametrize("shape", [(700, 900), (3,), (), (0, 5), (1, 300_000), (40, 30, 9, 9)])
def test_products_of_sketches_are_those_of_tensors(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    one = torch.randn(shape)
    two, weight = one + 0.3 * torch.randn(shape), torch.randn(shape, requires_grad=True)
    a, b = (_Sketch([x], [weight]).sums for x in (one, two))
    assert a.numel() == max(one.numel() // 64, 4096)
    assert torch.equal(a, _Sketch([one.clone()], [weight]).sums)
    assert (a - b).square().sum() == pytest.approx(float((one - two).square().sum()), rel=0.1)
    assert (a * b).sum() == pytest.approx(float((one * two).sum()), rel=0.1)
