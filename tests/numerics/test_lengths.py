"""What lengths, deviations and a single divisor read may be a code, row by row."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import elbowroom as er
from programs import looking


def responses(x: Tensor) -> Tensor:
    """Global response normalization (ConvNeXt V2), channels last."""
    length = x.norm(p=2, dim=(1, 2), keepdim=True)
    return x + x * (length / (length.mean(-1, keepdim=True) + 1e-6))


def standardized(x: Tensor) -> Tensor:
    """The layer norm of whole graphs (PyG)."""
    x = x - x.mean()
    return x / (x.std(unbiased=False) + 1e-5)


CHANNELS = torch.logspace(-3, 0, 32)
WAYS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], str]] = {
    "channels": ((4, 12, 12, 32), lambda x: responses(x * CHANNELS), "norm"),
    "rows": ((256, 64), lambda x: torch.linalg.vector_norm(x, dim=-1), "linalg_vector_norm"),
    "all": ((64, 64), lambda x: x.norm() * x.mean(), "norm"),
    "first": ((64, 256), lambda x: (x * 1).norm(dim=0), "norm"),
    "deviation": ((8, 32, 16, 16), lambda x: x.std((2, 3)), "std"),
    "divided": ((256, 64), standardized, "std"),
}


def gradient(context, way: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.eye(x.shape[-1], requires_grad=True)
    with context:
        out = way(torch.relu(x @ weight))
        loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).square().sum()
    loss.backward()
    assert weight.grad is not None
    return weight.grad, loss.detach()


@pytest.mark.parametrize("way", WAYS)
def test_what_a_length_reads_has_a_code(way):
    shape, run, op = WAYS[way]
    torch.manual_seed(0)
    x = torch.randn(shape)
    (true, loss), errors = gradient(nullcontext(), run, x), []
    for seed in range(4):
        saved = looking("dither", levels=16, min_nbytes=0, seed=seed)
        made, again = gradient(saved, run, x)
        assert torch.equal(again, loss)
        errors.append(float((made - true).square().sum() / true.square().sum()))
        large = [row for row in saved.ledger.rows if row.before_nbytes > 16384]
        assert ("keep", op) not in {(row.action, row.consumer) for row in large}
    assert sum(errors) / len(errors) < 0.05


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_small_rows_among_large_ones_keep_their_direction(scale):
    """Each row is divided by its own length, so that its error counts against it alone."""

    def run(x: Tensor) -> Tensor:
        length = x.norm(dim=-1, keepdim=True)
        return length.log() * torch.linspace(0, 1, len(x))[:, None]

    torch.manual_seed(0)
    x = torch.randn(256, 64)
    x[::2] *= scale
    true, _ = gradient(nullcontext(), run, x)
    made, _ = gradient(er.saving("dither", levels=16, min_nbytes=0), run, x)
    assert float((made - true).square().sum() / true.square().sum()) < 0.05


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.view(-1, 64, 3).norm(dim=-1),  # rows too short to be kept apart
        lambda x: x.norm(p=1, dim=-1),
        lambda x: x.norm(p=3, dim=-1),
        lambda x: x / x.sum(-1, keepdim=True),
    ],
)
def test_other_lengths_and_divisors_keep_theirs(run):
    x = torch.rand(256, 192) + 1
    true, _ = gradient(nullcontext(), run, x)
    made, _ = gradient(er.saving("dither", levels=16, min_nbytes=0), run, x)
    assert float((made - true).square().sum() / true.square().sum()) < 0.05


def test_laplacians_of_small_width_are_exact():
    """An exponential of a length reads the small part of its range that is near 0."""

    def run(x: Tensor) -> Tensor:
        return (-(x - 0.5).norm(dim=-1) / 0.01).exp()

    torch.manual_seed(0)
    x = torch.full((256, 64), 0.5) + 10 * torch.rand(256, 1) ** 6 * torch.randn(256, 64)
    true, _ = gradient(nullcontext(), run, x)
    made, _ = gradient(er.saving("dither", levels=16, min_nbytes=0), run, x)
    assert float((made - true).square().sum() / true.square().sum()) < 0.05


def test_leaky_relu_in_place_holds_bits():
    x = torch.randn(256, 64)
    true, _ = gradient(nullcontext(), lambda x: F.leaky_relu_(x - 0.1, 0.2), x)
    saved = looking("dither", levels=16, min_nbytes=0, seed=0)
    gradient(saved, lambda x: F.leaky_relu_(x - 0.1, 0.2), x)
    rows = {(row.consumer, row.action) for row in saved.ledger.rows if row.before_nbytes > 16384}
    assert ("leaky_relu_", "keep") not in rows
    made, _ = gradient(er.saving(min_nbytes=0), lambda x: F.leaky_relu_(x - 0.1, 0.2), x)
    assert torch.equal(made, true)


@pytest.mark.parametrize("op", ["sort", "topk", "take_along_dim", "max", "cummax"])
def test_indices_of_a_selection_take_the_bytes_of_their_range(op):
    x = torch.randn(64, 200, requires_grad=True)
    order = torch.argsort(torch.rand(64, 200), dim=1)
    with looking(min_nbytes=0) as saved:
        match op:
            case "topk":
                out = torch.topk(x * 1, 150, dim=1)[0]
            case "take_along_dim":
                out = torch.take_along_dim(x * 1, order.abs(), 1)
            case "max":
                out = (x * 1).max(0)[0]
            case "cummax":
                out = (x * 1).cummax(1)[0]
            case _:
                out = (x * 1).sort(1)[0]
        loss = out.square().sum()
    narrow = [row for row in saved.ledger.rows if (row.consumer, row.action) == (op, "narrow")]
    assert len(narrow) == 1
    assert narrow[0].after_nbytes * 4 <= narrow[0].before_nbytes
    loss.backward()


@pytest.mark.parametrize("width", [0.1, 0.003])
def test_a_width_that_divides_a_difference_has_its_gradient(width):
    """Of an exponential's argument only the small part near 0 counts: the dividend stays exact."""
    torch.manual_seed(0)
    x, start = torch.rand(256, 64), torch.full((1,), width)
    weight = torch.eye(64, requires_grad=True)

    def run(context) -> Tensor:
        middle = torch.full((64,), 0.5, requires_grad=True)
        one = start.clone().requires_grad_()
        with context:
            loss = (-(((x @ weight - middle) / one) ** 2) / 2).exp().mean()
        (made,) = torch.autograd.grad(loss, one)
        return made

    true = run(nullcontext())
    made = torch.cat([run(looking("dither", levels=16, min_nbytes=0, seed=n)) for n in range(8)])
    assert float(((made - true) / true).square().mean()) < 0.05
