"""Codes in eager steps of functions that are far from linear: never silently wrong.

What an exponential, a quotient or a softmax magnifies is known when it follows, and what comes
before has its code by then. That is taken back if the tensor still exists; else a warning says so,
and the next step keeps the tensor.
"""

import logging
from collections.abc import Callable

import pytest
from torch import Tensor

import elbowroom as er
from curved import CURVED, DISTANCES, Net, gradient, inputs, near, noise

pytestmark = pytest.mark.usefixtures("one_thread")


def steps(net: Net, count: int = 2, **settings) -> list[Tensor]:
    """The gradients of so many steps under codes."""

    def coded(x: Tensor) -> Tensor:
        with er.saving("dither", levels=16, min_nbytes=0, **settings):
            return net(x)

    return [gradient(net, coded, inputs()) for _ in range(count)]


def check(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    true = gradient(net, net, inputs())
    with caplog.at_level(logging.WARNING, "elbowroom"):
        (first,) = steps(net, 1)
    assert noise(first, true) <= 0.05 or "gradients of this step may be far off" in caplog.text
    caplog.clear()
    for later in steps(net):
        assert noise(later, true) <= 0.05
    assert not caplog.text


@pytest.mark.parametrize("width", [0.1, 0.03, 0.01])
@pytest.mark.parametrize("name", DISTANCES)
def test_a_gaussian_of_any_width(name: str, width: float, caplog: pytest.LogCaptureFixture) -> None:
    """With batches it had a noise of 0.1 at a width of 0.1, and 70,000 at 0.01, unsaid."""
    check(Net(near(name), width), caplog)


SHARP: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "softmax, 1000": lambda n, z: n.features(z).mul(1000).softmax(-1).square().mean(),
    "log of a square": lambda n, z: (n.features(z).square() + 1e-4).log().mean(),
    "exp of a root": lambda n, z: (-100 * (n.features(z) ** 2 + 1e-3).sqrt()).exp().mean(),
    "sigmoid of a distance": lambda n, z: (
        (DISTANCES["multiplied out"](n, n.points(z)) - 0.05).mul(-1000).sigmoid().square().mean()
    ),
    "quotient of a distance": lambda n, z: (
        (1 / (1 + 1000 * DISTANCES["multiplied out"](n, n.points(z)))).square().mean()
    ),
}


@pytest.mark.parametrize("name", [*CURVED, *SHARP])
def test_no_gradient_is_silently_wrong(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A softmax of sharp scores had 18, exp of a root 2, a quotient of squares 0.6."""
    check(Net((CURVED | SHARP)[name]), caplog)


def test_a_code_is_taken_back_while_its_tensor_exists(caplog: pytest.LogCaptureFixture) -> None:
    """The first step is right then, and nothing is said."""

    def loss(net: Net, z: Tensor) -> Tensor:
        x = net.features(z)
        return (-500 * x.square()).exp().mean()

    net = Net(loss)
    true = gradient(net, net, inputs())
    with caplog.at_level(logging.WARNING, "elbowroom"):
        (first,) = steps(net, 1)
    assert noise(first, true) <= 0.05
    assert not caplog.text


def test_each_model_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """The warning came once a process for modules of one name."""
    for _ in range(2):
        net = Net(CURVED["square below 0"])
        caplog.clear()
        with caplog.at_level(logging.WARNING, "elbowroom"):
            steps(net, 1)
        assert "from the next step on" in caplog.text


def test_a_norm_of_a_product_has_codes() -> None:
    """The product lies below the square, so what is left of both is no small difference."""
    net = Net(CURVED["silu"])
    for _ in range(2):
        with er.saving("dither", levels=16, min_nbytes=0) as saved:
            y = (inputs() @ net.first.weight.t()) @ net.second.weight.t()
            made = y * (y.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        assert made.requires_grad
        assert {row.action for row in saved.ledger.rows if row.consumer == "pow"} == {"dither"}
