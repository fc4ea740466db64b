"""Codes and exponentials of squares: a gradient that passes to a small part of the values.

A Gaussian of width s reaches the few x that are within s of its middle, and a code has a step that
follows the range of all x.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, KERNELS = 1024, 8


class Gaussians(nn.Module):
    """Points in three dimensions, and Gaussians of one width around learned middles."""

    def __init__(self, width: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(1))
        self.middles = nn.Parameter(torch.rand(KERNELS, 3))
        self.widths = nn.Parameter(torch.full((KERNELS,), width))
        shares = torch.tensor([1.0, 0.3, 0.1])
        self.narrow = nn.Parameter(self.widths.detach()[:, None] * shares)
        self.weights = nn.Parameter(torch.randn(KERNELS))

    def differences(self, x: Tensor) -> Tensor:
        return (x * self.scale)[:, None] - self.middles

    @property
    def rate(self) -> Tensor:
        return 1 / (2 * self.widths**2)


def graph(net: Gaussians, x: Tensor) -> Tensor:
    """A width for each dimension, some of which are close to 0: PyG's GMMConv as it begins."""
    exponent = -0.5 * net.differences(x).pow(2) / (1e-15 + net.narrow**2)
    return exponent.sum(-1).exp()


def multiplied_out(net: Gaussians, x: Tensor) -> Tensor:
    x = x * net.scale
    sizes = x.pow(2).sum(-1, keepdim=True) + net.middles.pow(2).sum(-1)
    return torch.exp(-(sizes - 2 * x @ net.middles.t()) * net.rate)


def by_itself(net: Gaussians, x: Tensor) -> Tensor:
    far = net.differences(x)
    return torch.exp((-far * far).sum(-1) * net.rate)


FORMS: dict[str, Callable[[Gaussians, Tensor], Tensor]] = {
    "graph": graph,
    "rate": lambda net, x: torch.exp(-net.differences(x).square().sum(-1) * net.rate),
    "width": lambda net, x: (-((net.differences(x) / net.widths[:, None]) ** 2).sum(-1) / 2).exp(),
    "by itself": by_itself,
    "multiplied out": multiplied_out,
    "softmax": lambda net, x: F.softmax(-net.differences(x).pow(2).sum(-1) * net.rate, -1),
}


def gradients(net: Gaussians, name: str, around: contextlib.AbstractContextManager) -> Tensor:
    net.zero_grad()
    x = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(1))
    target = torch.randn(ROWS, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    with around:
        loss = F.mse_loss(FORMS[name](net, x) @ net.weights, target)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("width", [0.3, 0.1, 0.03])
@pytest.mark.parametrize("name", FORMS)
def test_a_gaussian_of_any_width(name: str, width: float) -> None:
    net = Gaussians(width)
    true = gradients(net, name, contextlib.nullcontext())
    noisy = gradients(net, name, er.saving("dither", levels=16, min_nbytes=0))
    assert true.norm() > 0
    assert (noisy - true).square().sum() <= 0.05 * true.square().sum()


class Scaled(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.form, self.last = nn.Linear(32, 64), form, nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.form(self.first(x)))


RATE, RATES = nn.Parameter(torch.tensor(100.0)), torch.full((64,), 100.0)
SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled first": lambda d: torch.exp(-100 * d * d),
    "scaled last": lambda d: torch.exp(-d * (d * 100)),
    "quotients": lambda d: torch.exp(-d / 0.1 * d / 0.1),
    "learned": lambda d: torch.exp(-RATE * d * d),
    "learned, between": lambda d: torch.exp(-d * RATE * d),
    "tensor": lambda d: 1 / (1 + RATES * d * d),
    "addcmul": lambda d: torch.exp(torch.addcmul(torch.zeros(1), d, d, value=-100)),
    "Cauchy": lambda d: 1 / (1 + 300 * d * d),
    "hyperbolic": lambda d: torch.exp(1 - torch.cosh(4 * d)),
    "Huber": lambda d: torch.exp(-50 * F.huber_loss(d, torch.zeros_like(d), reduction="none")),
}


@pytest.mark.parametrize("name", SQUARES)
def test_squares_of_one_value_in_two_scales(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """-c * d * d is (-c * d) * d; what is found too late is said, and exact in the next step."""
    net, x, labels = Scaled(SQUARES[name]), torch.randn(512, 32), torch.randint(0, 10, (512,))

    def gradient(around: contextlib.AbstractContextManager) -> Tensor:
        net.zero_grad()
        with around:
            loss = F.cross_entropy(net(x), labels)
        loss.backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    true = gradient(contextlib.nullcontext())
    noisy = [gradient(er.saving("dither", levels=16)) for _ in range(2)]
    errors = [float((one - true).square().sum() / true.square().sum()) for one in noisy]
    assert errors[0] <= 0.05 or "has a code" in caplog.text
    assert errors[1] <= 0.05


ARGUMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "shifted": lambda x: x * 1.0 + 3,
    "exp": torch.exp,
    "softplus": F.softplus,
}


def decayed(argument: str, rate: float, **codes: int) -> tuple[Tensor, int]:
    """Gradients of exp(-rate * argument), and the bytes that are held for it."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))
    rates = nn.Parameter(torch.full((64,), rate))
    x, target = torch.randn(ROWS, 8), torch.randn(ROWS, 1)
    with er.saving("dither", min_nbytes=0, **codes) if codes else er.saving("keep") as saved:
        loss = F.mse_loss(layers[1](torch.exp(-rates * ARGUMENTS[argument](layers[0](x)))), target)
    loss.backward()
    found = [one.grad.flatten() for one in (rates, *layers.parameters()) if one.grad is not None]
    return torch.cat(found), saved.ledger.after_nbytes


@pytest.mark.parametrize("rate", [30.0, 100.0])
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_exponential_of_what_has_a_code(argument: str, rate: float) -> None:
    """The code's error would be a factor of exp(rate * error) if it was made again from that."""
    true, _ = decayed(argument, rate)
    noisy, _ = decayed(argument, rate, levels=16)
    assert (noisy - true).square().sum() <= 0.05 * true.square().sum()


def test_an_exponential_of_a_softplus_is_made_again() -> None:
    """The code of its input is fine enough for its tails, so nothing else is held."""
    (_, of_softplus), (_, of_another) = (
        decayed(argument, 0.5, levels=16) for argument in ("softplus", "shifted")
    )
    # 7 bits an element, where another has two codes of 4 bits
    assert of_softplus < of_another - ROWS * 64 // 16


def test_a_plan_knows_what_an_exponential_needs() -> None:
    """The profile of a step says so, so that no plan counts on a code of it."""
    net, x = Gaussians(0.1), torch.rand(ROWS, 3)

    def step() -> None:
        FORMS["rate"](net, x).sum().backward()

    profile = er.measure(step, model=net, min_nbytes=0)
    needs = {s.site.consumer: s.site.need.name for one in profile.storages for s in one.saves}
    assert needs["square"] == needs["exp"] == "EXACT"


def test_a_layer_norm_that_is_written_out_has_codes() -> None:
    """It squares a difference, too, but takes the root of that."""
    weight, x = torch.ones(64, requires_grad=True), torch.randn(ROWS, 64, requires_grad=True)
    with er.saving("dither", levels=16, min_nbytes=0) as saved:
        far = x * 1 - (x * 1).mean(-1, keepdim=True)
        made = far * torch.rsqrt(far.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    assert made.requires_grad
    assert {row.action for row in saved.ledger.rows if row.consumer == "pow"} == {"dither"}


def test_a_product_in_front_of_a_softmax_is_no_square(caplog: pytest.LogCaptureFixture) -> None:
    """Attention whose bias and product of q and k are one op: no difference of squares."""
    bias = torch.zeros(1, 1, 56)
    q, k = (torch.randn(8, 56, 32, requires_grad=True) for _ in range(2))
    for _ in range(2):
        with er.saving("dither", levels=16, min_nbytes=0) as saved:
            logits = torch.baddbmm(bias, q * 1, (k * 1).transpose(1, 2))
            loss = F.softmax(logits, -1).square().sum()
        loss.backward()
        rows = [row for row in saved.ledger.rows if row.consumer == "baddbmm"]
        assert {row.action for row in rows if row.before_nbytes} == {"dither"}  # no copy of a bias
    assert not caplog.text
