"""Codes in compiled graphs of functions that are far from linear, beside the eager engine's.

What backward computes again from a code, an exponential or a quotient say, may magnify its error
without bound. The eager engine has rules for what it sees one call at a time; the graph has its
own, and must not be worse.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom as er
from curved import CURVED, DISTANCES, LABELS, Net, gradient, inputs, near, noise
from elbowroom.compiled.decision import Decision
from elbowroom.compiled.partition import Partitioner, listening
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import without_codegen

pytestmark = pytest.mark.usefixtures("one_thread", "nothing_compiled")

CODES = "dither, 16 levels"


def compiled(net: Net, **settings) -> tuple[Tensor, Decision]:
    """The gradient of a step whose graph is rewritten, but not given to Inductor."""
    found: list[Decision] = []
    partitioner = Partitioner(**settings)
    with listening(found.append):
        got = gradient(net, torch.compile(net, backend=without_codegen(partitioner)), inputs())
    return got, found[0]


@pytest.mark.parametrize("width", [0.03, 0.01])
@pytest.mark.parametrize("name", DISTANCES)
def test_a_gaussian_of_any_width(name: str, width: float) -> None:
    """Multiplied out it had a noise of 55 and more at a width of 0.03, and 1e16 at 0.01."""

    net = Net(near(name), width)
    true = gradient(net, net, inputs())
    got, _ = compiled(net, codes=CODES, min_nbytes=0)
    assert true.norm() > 0
    assert noise(got, true) <= 0.05


@pytest.mark.parametrize("name", CURVED)
def test_no_code_of_a_graph_is_worse_than_the_eager_engines(name: str) -> None:
    """Cross entropy of large logits that fit had 1.9, and 3e5 where they were ten times larger."""
    net = Net(CURVED[name])
    true = gradient(net, net, inputs())
    got, _ = compiled(net, codes=CODES, min_nbytes=0)
    if noise(got, true) > 0.05:

        def eager(x: Tensor) -> Tensor:
            with er.saving("dither", levels=16, min_nbytes=0):
                return net(x)

        assert noise(got, true) <= 2 * noise(gradient(net, eager, inputs()), true)


SINGULAR = {
    "quotient": lambda d: 1 / (d * d + 1e-4),
    "reciprocal": lambda d: 0.1 / d,
    "logarithm": lambda d: 3 * torch.log(d.abs() + 1e-6),
    "root": lambda d: torch.rsqrt(d * d + 1e-4),
}


@pytest.mark.parametrize("act", [torch.tanh, torch.sigmoid, lambda s: torch.exp(-s.abs())])
@pytest.mark.parametrize("name", SINGULAR)
def test_a_saturated_result_of_what_is_steep_has_no_code(
    name: str, act: Callable[[Tensor], Tensor]
) -> None:
    """tanh(0.1 / d) had a noise of 3e14, exp(-1 / (d * d + 1e-4)) of 7e5."""
    torch.manual_seed(0)
    layer, last, x = nn.Linear(64, 256), nn.Linear(256, 64), torch.randn(512, 64)
    found = []
    for settings in ({}, {"codes": CODES, "min_nbytes": 0}):
        torch._dynamo.reset()
        layer.zero_grad()
        partitioner = Partitioner(**settings)
        step = torch.compile(
            lambda x: last(act(SINGULAR[name](layer(x)))), backend=without_codegen(partitioner)
        )
        step(x).square().mean().backward()
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
    assert noise(found[1], found[0]) <= 0.05


USUAL = ["attention", "cross entropy", "contrastive", "layer norm", "gelu", "silu"]


@pytest.mark.parametrize("name", USUAL)
def test_what_is_as_usual_has_codes(name: str) -> None:
    """What stays exact is small: probabilities of attention that is written out had no code."""
    _, plain = compiled(Net(CURVED[name]))
    torch._dynamo.reset()
    _, coded = compiled(Net(CURVED[name]), codes=CODES, min_nbytes=0)
    assert coded.is_lossy
    assert coded.saved_nbytes < 0.5 * plain.saved_nbytes


def left(net: Net, z: Tensor) -> Tensor:
    return net.features(z) - 0.1 * z.repeat(1, 2)


def by_tanh(x: Tensor) -> Tensor:
    """GELU as GPT-2 has it."""
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.0447 * torch.pow(x, 3))))


STEEP = {
    "a narrow bump": lambda n, z: (left(n, z).square() * -20000).exp().mean(),
    "a narrow quotient": lambda n, z: (1 + left(n, z).square() * 1e4).pow(-2).mean(),
    "exp of a relu": lambda n, z: (F.relu(n.features(z) * 5 - 1) * -1000).exp().mean(),
    "erf of 60": lambda n, z: (n.features(z) * 300).erf().square().mean(),
    "step of a sigmoid": lambda n, z: (
        ((left(n, z) * 200 + 0.1).sigmoid() - (left(n, z) * 200).sigmoid()).square().mean()
    ),
    "gelu less relu": lambda n, z: (
        (F.gelu(n.features(z) * 1000) - F.relu(n.features(z) * 1000)).square().mean()
    ),
    "silu less relu": lambda n, z: (
        (F.silu(n.features(z) * 1000) - F.relu(n.features(z) * 1000)).square().mean()
    ),
}


@pytest.mark.parametrize("name", STEEP)
def test_steep_functions_are_not_computed_from_codes(name: str) -> None:
    """They had a noise of 0.13 to 24, and exp(-1000 relu(x)) 7.5."""
    net = Net(STEEP[name])
    true = gradient(net, net, inputs())
    got, decision = compiled(net, codes=CODES, min_nbytes=0)
    assert decision.is_lossy  # what is linear has codes all the same
    assert noise(got, true) <= 0.01


def huber(d: Tensor) -> Tensor:
    return F.smooth_l1_loss(d, torch.zeros_like(d), reduction="none")


NARROW: dict[str, Callable[[Tensor], Tensor]] = {
    "exp of a square": lambda d: (-100 * d * d).exp(),
    "exp of a square by addcmul": lambda d: torch.addcmul(d.new_zeros(()), d, d, value=-100).exp(),
    "exp of a sum of squares": lambda d: (
        (-20 * d.square().sum(-1, keepdim=True)).exp().expand(d.shape)
    ),
    "exp of a Huber loss": lambda d: (-100 * huber(d)).exp(),
    "exp of cosh": lambda d: (-100 * (d.cosh() - 1)).exp(),
    "rsqrt of a square": lambda d: (1 + 300 * d * d).rsqrt(),
    "inverse of a square": lambda d: 1 / (1 + 300 * d * d),
    "exp of exp": lambda d: (-(3 * d).exp()).exp(),
    "tanh of a square": lambda d: (100 * d * d).tanh(),
    "sigmoid of exp": lambda d: (6 * d).exp().sigmoid(),
}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_peaks_that_a_layer_reads_are_exact(name: str) -> None:
    """The layer saves their result. A code of it had a noise of 0.02 to 2e4 upstream."""

    class Head(Net):
        def forward(self, z: Tensor) -> Tensor:
            return F.cross_entropy(self.second(NARROW[name](self.first(z) / 2)), LABELS)

    net = Head(lambda n, z: z)
    true = gradient(net, net, inputs())
    got, _ = compiled(net, codes=CODES, min_nbytes=0)
    upstream = sum(p.numel() for p in net.first.parameters())
    assert true[:upstream].norm() > 0
    assert noise(got[:upstream], true[:upstream]) <= 0.01


SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu by tanh": by_tanh,
    "silu": lambda x: x / (1 + (-x).exp()),
    "RMS norm": lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_what_is_smooth_is_not_taken_for_a_narrow_peak(name: str) -> None:
    """A GELU's slope has an exp(-x^2 / 2), and norms divide by a square that is summed up."""

    def loss(net: Net, z: Tensor) -> Tensor:
        return net.second(SMOOTH[name](net.first(z))).square().mean()

    _, coded = compiled(Net(loss), codes=CODES, min_nbytes=0)
    assert coded.saved_nbytes < 0.5 * coded.plain_saved_nbytes


@pytest.mark.parametrize("name", ["elu", "gelu", "gelu by tanh", "silu", "exp of a relu"])
def test_one_slope_and_gates_have_codes(name: str) -> None:
    """A slope takes the place of what it is computed from; gates keep codes of their arguments."""
    usual = {"elu": F.elu, "gelu": F.gelu, "gelu by tanh": by_tanh, "silu": F.silu}
    made = STEEP.get(name) or (lambda n, z: usual[name](n.features(z)).square().mean())
    _, coded = compiled(Net(made), codes=CODES, min_nbytes=0)
    assert coded.saved_nbytes < 0.6 * coded.plain_saved_nbytes


def test_infinite_logits_of_a_sigmoid_have_codes() -> None:
    """They are coded as if they were 24; what cannot be held decodes to NaN."""

    def loss(net: Net, z: Tensor) -> Tensor:
        far = net.features(z)
        far = far + torch.where(far > 0.3, torch.inf, 0.0).detach()
        return (far * 1000).sigmoid().square().mean()

    net = Net(loss)
    true = gradient(net, net, inputs())
    got, decision = compiled(net, codes=CODES, min_nbytes=0)
    assert decision.is_lossy
    assert decision.saved_nbytes < 0.5 * decision.plain_saved_nbytes
    assert noise(got, true) <= 0.05


def test_a_plan_for_a_budget_keeps_what_enters_an_exponential() -> None:
    """It weighs other saved values than those of plain torch.compile."""

    def loss(net: Net, z: Tensor) -> Tensor:
        far = DISTANCES["multiplied out"](net, net.points(z))
        kernels = torch.exp(-far * net.rate) @ net.weights
        return F.mse_loss(kernels, z[:, 0]) + F.cross_entropy(net.features(z) * 100, LABELS)

    net = Net(loss, 0.03)
    true, plain = compiled(net)
    torch._dynamo.reset()
    room = int(0.67 * plain.peak_nbytes)
    got, decision = compiled(net, room_nbytes=room, exact=None)
    assert decision.is_lossy
    assert decision.peak_nbytes <= room
    gaussians = sum(p.numel() for p in (net.scale, net.middles, net.widths, net.weights))
    assert noise(got[:gaussians], true[:gaussians]) <= 0.05
    assert noise(got, true) <= 0.05
