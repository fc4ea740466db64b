"""Products by a node of ours: torch's bits and layouts, and less memory in backward."""

import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from elbowroom.measure import memory_curve
from elbowroom.plan.policy import Exact
from elbowroom.runtime.direct.product import fits_product
from elbowroom.runtime.saving import Saving

OURS = "_ProductBackward"
CONTEXTS = {
    "plain": nullcontext,
    "shared": lambda: er.saving(min_nbytes=0),
    "alone": lambda: Saving(Exact(), min_nbytes=0),  # what is rebuilt waits for nobody
}
SHAPES = {
    "alike": ((6, 40, 24), (6, 40, 24)),
    "rows": ((300, 4, 32), (300, 4, 1)),
    "rows first": ((300, 4, 1), (300, 4, 32)),
    "gate": ((3, 16, 9, 7), (3, 16, 1, 1)),
    "map of one channel": ((3, 16, 9, 7), (3, 1, 9, 7)),
    "scale": ((40, 5, 200), (200,)),
    "scale by channel": ((3, 16, 9, 7), (16, 1, 1)),
    "one number": ((40, 33), ()),
    "ones": ((5, 1, 70, 1), (5, 1, 1, 1)),
    "empty": ((0, 8), (0, 1)),
    "both spread": ((1, 40, 24), (6, 1, 24)),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": lambda x: x,
    "transposed": lambda x: (
        x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x
    ),
    "channels_last": lambda x: (
        x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    ),
    "every second": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[..., :1].expand(x.shape) if x.dim() else x,
}


@pytest.fixture(autouse=True)
def any_size(monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[fits_product.__module__], "_MIN_NBYTES", 0)


def leaves(shapes, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def made(a: Tensor, b: Tensor, layouts: tuple[str, str], *, multiply=torch.mul) -> Tensor:
    """A product of two factors that can be rebuilt from what SiLU and tanh read and give."""
    a, b = LAYOUTS[layouts[0]](a * 1.5), LAYOUTS[layouts[1]](b * 0.5)
    return multiply(F.silu(a), F.silu(b).sin())


def gradients(name: str, shapes, layouts, of_grad: str, dtype, multiply=torch.mul) -> list[Tensor]:
    """The product, gradients of two backwards, and what its node gave upstream."""
    a, b = leaves(shapes, dtype)
    with CONTEXTS[name]():
        out = made(a, b, layouts, multiply=multiply)
    assert out.grad_fn is not None
    grad = LAYOUTS[of_grad](leaves([out.shape], dtype)[0].detach())
    seen: list[Tensor] = []
    out.grad_fn.register_hook(lambda given, _: seen.extend(given))
    out.backward(grad, retain_graph=True)
    out.backward(grad)
    assert a.grad is not None
    assert b.grad is not None
    return [out.detach(), a.grad, b.grad, *seen]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("of_grad", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_it_has_the_bits_and_layouts_of_torch(shapes, layout, of_grad) -> None:
    dtype = torch.bfloat16 if layout == of_grad else torch.float32
    for layouts in ((layout, "in order"), ("in order", layout)):
        plain = gradients("plain", shapes, layouts, of_grad, dtype)
        for name in ("shared", "alone"):
            ours = gradients(name, shapes, layouts, of_grad, dtype)
            for one, other in zip(plain, ours, strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()


def node_of(multiply: Callable[[Tensor, Tensor], Tensor], shapes=((64, 64), (64, 1))) -> str:
    a, b = leaves(shapes, torch.float32)
    with er.saving(min_nbytes=0):
        out = multiply(a * 1.0, b * 1.0)
    assert out.grad_fn is not None
    return out.grad_fn.name()


@pytest.mark.parametrize("multiply", [torch.mul, torch.multiply, Tensor.mul, lambda a, b: a * b])
def test_it_stands_for_every_way_to_multiply(multiply) -> None:
    assert node_of(multiply) == OURS


@pytest.mark.parametrize(
    "multiply",
    [
        lambda a, b: a * a,
        lambda a, b: a * b.detach(),
        lambda a, b: a * 2,
        lambda a, b: a.double() * b,
        lambda a, b: (a + 0j) * (b + 0j),
        lambda a, b: a.t()[None] * b,  # neither has the size of the result
    ],
)
def test_other_products_are_torchs(multiply) -> None:
    assert node_of(multiply) == "MulBackward0"


def test_a_small_product_is_torchs(monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[fits_product.__module__], "_MIN_NBYTES", 64 * 64 * 4 + 1)
    assert node_of(torch.mul) == "MulBackward0"


@pytest.mark.parametrize("shapes", [SHAPES["gate"], SHAPES["alike"]], ids=["gate", "alike"])
def test_second_derivatives_are_torchs(shapes) -> None:
    def second(name: str) -> list[Tensor]:
        a, b = leaves(shapes, torch.float32)
        with CONTEXTS[name]():
            out = made(a, b, ("in order", "in order"))
        first = torch.autograd.grad(out.square().sum(), (a, b), create_graph=True)
        return list(torch.autograd.grad(sum(one.square().sum() for one in first), (a, b)))

    plain = second("plain")
    for name in ("shared", "alone"):
        assert all(map(torch.equal, plain, second(name)))


def test_a_factor_that_is_changed_in_place_is_an_error() -> None:
    a, b = leaves(SHAPES["gate"], torch.float32)
    with er.saving(min_nbytes=0):
        x = a * 1.0
        out = x * b
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Gated(nn.Module):
    """Maps of 1 MiB, each multiplied by a number for each of its rows."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(64, 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for to_map, to_gate in zip(self.maps, self.gates, strict=True):
            x = F.silu(to_map(x)) * to_gate(x).sigmoid()
        return x


@pytest.mark.parametrize("name", ["shared", "alone"])
def test_its_backward_holds_one_map_beside_the_gradient(name) -> None:
    """Torch's own, on what is rebuilt, has 3 maps: a factor, its product, the gradient of it."""
    net, x, grad = Gated(1), torch.randn(4096, 64), torch.randn(4096, 64)
    with CONTEXTS[name]():
        out = net(x)
    assert memory_curve(lambda: out.backward(grad)).peak_nbytes < 2.5 * x.nbytes


def test_a_plan_knows_of_it() -> None:
    """At a budget that torch's own products break, with or without anything to be rebuilt."""
    net, x = Gated(4), torch.randn(4096, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    static = sum(p.nbytes for p in net.parameters())
    plain = static + er.peak(step)
    for share in (0.95, 0.7):
        budget = int(share * plain)
        er.fit(net, budget=budget, optimizer=optimizer, exact=True)
        for _ in range(4):
            step()
        assert static + er.peak(step) <= budget
        er.release(net)
