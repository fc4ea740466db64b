"""Rows that are gathered when they are read: torch's own bits, whoever reads them."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elbowroom as er
from elbowroom.errors import RestoreError
from elbowroom.measure import memory_curve
from elbowroom.runtime.gathered import Gathered
from elbowroom.runtime.replay.replay import Replay

EDGES, NODES, HEADS, WIDTH = 20001, 700, 4, 16  # rows of 4.9 MiB, in five parts


def expanded(at: Tensor, rows: Tensor) -> Tensor:
    return at.view(-1, 1, 1).expand_as(rows)


def zeros(rows: Tensor) -> Tensor:
    return rows.new_zeros((NODES, *rows.shape[1:]))


# (x, factor of the head, factor of no gradient, index, at) -> result
READERS = {
    "sum": lambda x, f, c, i, at: zeros(r := x[0].index_select(0, i)).scatter_add_(
        0, expanded(at, r), r
    ),
    "weighted": lambda x, f, c, i, at: zeros(r := f * x[0].index_select(0, i)).scatter_add_(
        0, expanded(at, r), r
    ),
    "weighted from the right": lambda x, f, c, i, at: torch.scatter_add(
        zeros(r := x[0].index_select(-3, i) * c), -3, expanded(at, r), r
    ),
    "index_add": lambda x, f, c, i, at: x[1].index_add(0, at, torch.index_select(x[0], 0, i)),
    "index_add_": lambda x, f, c, i, at: (x[1] * 2).index_add_(0, at, x[0].index_select(0, i) * f),
    "each element": lambda x, f, c, i, at: torch.scatter_add(
        x[1],
        0,
        torch.stack([at] * HEADS, 1)[..., None].repeat(1, 1, WIDTH),
        x[0].index_select(0, i),
    ),
    "two sums": lambda x, f, c, i, at: (
        zeros(r := x[0].index_select(0, i)).scatter_add_(0, expanded(at, r), r)
        * zeros(r).scatter_add_(0, expanded(i, r), r)
    ),
    "two factors": lambda x, f, c, i, at: (
        zeros(r := x[0].index_select(0, i)).scatter_add_(0, expanded(at, r), r * f)
        * zeros(r).index_add_(0, i, r * c)
    ),
    "a factor times a factor": lambda x, f, c, i, at: zeros(
        r := (x[0].index_select(0, i) * f) * c
    ).scatter_add_(0, expanded(at, r), r),
    "a sum, and others": lambda x, f, c, i, at: (
        zeros(r := x[0].index_select(0, i)).index_add_(0, at, r) + r.tanh()[:NODES] * r[-NODES:]
    ),
    "others, and a sum": lambda x, f, c, i, at: (
        (r := x[0].index_select(0, i)).relu()[:NODES] + zeros(r).index_add_(0, at, r)
    ),
    "weighted, and others": lambda x, f, c, i, at: (
        zeros(r := x[0].index_select(0, i) * f).index_add_(0, at, r) + r.exp()[:NODES]
    ),
    "extremes": lambda x, f, c, i, at: zeros(r := x[0].index_select(0, i)).scatter_reduce_(
        0, expanded(at, r), r, "amax", include_self=False
    ),
    "between other readers": lambda x, f, c, i, at: (
        x[0].sin() * (r := x[0].index_select(0, i))[:NODES] * x[0].cos() + x[0].tanh() + r[-NODES:]
    ),
    "changed in place": lambda x, f, c, i, at: zeros(
        r := x[0].index_select(0, i).mul_(2).add_(1)
    ).scatter_add_(0, expanded(at, r), r),
    "a factor for all": lambda x, f, c, i, at: zeros(
        r := x[0].index_select(0, i) * x[0].mean()
    ).scatter_add_(0, expanded(at, r), r),
    "without a gradient": lambda x, f, c, i, at: (
        x[0] * 2 + zeros(r := x[0].index_select(0, i).detach()).index_add_(0, at, r)
    ),
    "read without a gradient first": lambda x, f, c, i, at: (
        norm_of(r := x[0].index_select(0, i)) * zeros(r).index_add_(0, at, r)
    ),
    "below function modes": lambda x, f, c, i, at: unseen(x[0].index_select(0, i), f)[:NODES],
    "checkpointed": lambda x, f, c, i, at: checkpoint(
        READERS["weighted"], x, f, c, i, at, use_reentrant=False
    ),
    "a summed tensor that is a view": lambda x, f, c, i, at: (
        (x[1] * 2).view(1, NODES, HEADS, WIDTH)[0].index_add_(0, at, x[0].index_select(0, i))
    ),
}


def norm_of(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.norm()


def unseen(x: Tensor, factor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return (x * factor).tanh()


def run(reader, context, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The result and all gradients of a reader."""
    torch.manual_seed(0)
    shape = 2, NODES, HEADS, WIDTH
    leaves = [
        torch.randn(*shape, dtype=dtype, requires_grad=True),
        torch.randn(EDGES, HEADS, 1, dtype=dtype, requires_grad=True),
    ]
    constant = torch.rand(EDGES, 1, WIDTH, dtype=dtype)
    index, at = torch.randint(NODES, (2, EDGES)).unbind()
    with context:
        x = leaves[0] * 1
        out = reader(x, leaves[1] * 1, constant, index, at)
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum()
    loss.backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.filterwarnings("ignore:this saving context changed nothing")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_readers_of_gathered_rows_have_torchs_bits(reader, dtype):
    plain = run(READERS[reader], nullcontext(), dtype)
    for _ in range(3):  # then a script may be followed
        found = run(READERS[reader], er.saving(), dtype)
        assert len(found) == len(plain)
        assert all(type(x) is Tensor for x in found)
        assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))


@pytest.mark.filterwarnings("ignore:this saving context changed nothing")
@pytest.mark.parametrize("reader", ["sum", "weighted", "index_add_", "weighted from the right"])
def test_a_sum_over_rows_never_has_them_all(reader):
    rows_nbytes = EDGES * HEADS * WIDTH * 4

    def peak_of(make) -> int:
        run(READERS[reader], make())
        return memory_curve(lambda: run(READERS[reader], make())).peak_nbytes

    plain, ours = peak_of(nullcontext), peak_of(er.saving)
    assert ours <= plain - 0.75 * rows_nbytes


def test_sums_over_rows_have_a_second_derivative():
    torch.manual_seed(0)
    x = torch.randn(NODES, 64, dtype=torch.float64, requires_grad=True)
    index, at = torch.randint(NODES, (2, EDGES)).unbind()
    factor = torch.rand(EDGES, 1, dtype=torch.float64, requires_grad=True)

    def found(context) -> list[Tensor]:
        with context:
            rows = factor * (x * 1).index_select(0, index)
            out = rows.new_zeros(NODES, 64).index_add_(0, at, rows).pow(2).sum()
        of_x, of_factor = torch.autograd.grad(out, (x, factor), create_graph=True)
        return list(torch.autograd.grad((of_x * of_factor.mean()).sum(), (x, factor)))

    for one, other in zip(found(er.saving()), found(nullcontext()), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


def test_a_source_that_changes_before_its_rows_are_read_is_said():
    x = torch.randn(NODES, 64, requires_grad=True) * 1
    index = torch.randint(NODES, (EDGES,))
    with er.saving():
        rows = x.index_select(0, index)
        assert type(rows) is Gathered
        x.add_(1)
        with pytest.raises(RestoreError, match=r"changed in place before that.*x\.clone\(\)"):
            rows.sum()


def test_rows_that_a_model_gives_are_read_after_its_context():
    x = torch.randn(NODES, 64, requires_grad=True)
    index = torch.randint(NODES, (EDGES,))
    with er.saving():
        rows = (x * 2).index_select(0, index)
    assert rows.shape == (EDGES, 64)
    assert rows.requires_grad
    assert not rows.is_leaf
    assert torch.equal(rows.detach(), (x * 2)[index].detach())
    rows.square().sum().backward()
    ours, x.grad = x.grad, None
    (x * 2).index_select(0, index).square().sum().backward()
    assert torch.equal(ours, x.grad)


class Convolution(nn.Module):
    """Sums over neighbors, and a perceptron, as in a graph isomorphism network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        rows = x.index_select(-2, edges[0])
        at = edges[1].view(-1, 1).expand_as(rows)
        summed = rows.new_zeros(x.shape).scatter_add_(0, at, rows)
        out: Tensor = self.last(torch.relu(self.first(x + summed)))
        return torch.relu(out)


class Network(nn.Module):
    """Three graph convolutions."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Convolution(width) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = convolution(x, edges)
        return x


@pytest.mark.parametrize("way", [{}, {"policy": "dither", "levels": 16}])
def test_steps_with_rows_that_wait_are_replayed(way, monkeypatch):
    left = []
    monkeypatch.setattr(Replay, "_diverge", lambda self, *_: left.append(self))
    torch.manual_seed(0)
    model, x, edges = Network(), torch.randn(NODES, 64), torch.randint(NODES, (2, EDGES))
    begun = []
    enter = Replay.__enter__
    monkeypatch.setattr(Replay, "__enter__", lambda self: (begun.append(self), enter(self))[1])
    for _ in range(4):
        with er.saving(**way):
            loss = model(x, edges).square().mean()
        loss.backward()
    assert len(begun) >= 2
    assert not left
