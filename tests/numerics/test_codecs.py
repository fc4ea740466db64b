"""Statistics that the codecs promise: no bias over seeds, a gradient error known beforehand.

Thresholds are derived, seeds are fixed, and beside each test stands a control that must fail it.
"""

from collections.abc import Iterator
from math import log, sqrt

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from elbowroom.codecs import Codec, Dither, Encoded, Facts, Group, Sided, codec
from elbowroom.kernels.layout import TILE, codes_nbytes, groups
from elbowroom.kernels.reference.dither import grid

pytestmark = pytest.mark.usefixtures("one_thread")

ZEROS = Facts(has_zeros=True)
FALSE_ALARM = 1e-6


def name(of: object) -> str | None:
    if isinstance(of, Facts):
        return "zeros" if of.has_zeros else "dense"
    return "-".join(map(str, of.config().values())) if isinstance(of, Codec) else None


def steps(encoded: Encoded) -> Tensor:
    """The step of each element, [N] float64; 0 for exact zeros. From the metadata."""
    c, n = encoded.codec, encoded.numel
    if isinstance(c, Group):
        return encoded.buffers[1].double().repeat_interleave(c.group_size)[:n]
    if isinstance(c, Sided):
        return steps_of_sides(c, encoded)
    assert isinstance(c, Dither)
    if not encoded.facts.has_zeros:
        _, ranges, bounds = encoded.buffers
        step = grid(ranges, bounds, c.levels, c.group_size)[1]
        return step.double().repeat_interleave(c.group_size)[:n]
    bits, payload, bounds = encoded.buffers
    held = torch.zeros(n, dtype=torch.float64)
    flags = ((bits[:, None] >> torch.arange(8)) & 1).view(-1)[:n] != 0
    for i, (tile, flag) in enumerate(zip(held.split(TILE), flags.split(TILE), strict=True)):
        kept = int(flag.sum())
        head = 2 * groups(kept, c.group_size)
        step = grid(payload[:head].view(-1, 2), bounds[i : i + 1], c.levels, c.group_size)[1]
        tile[flag] = step.double().repeat_interleave(c.group_size)[:kept]
        payload = payload[head + codes_nbytes(c.levels, kept) :]
    assert len(payload) == 0
    return held


def steps_of_sides(c: Sided, encoded: Encoded) -> Tensor:
    payload, bounds, bits = encoded.buffers
    held = torch.zeros(encoded.numel, dtype=torch.float64)
    above = ((bits[:, None] >> torch.arange(8)) & 1).view(-1)[: encoded.numel] != 0
    for i, (tile, up) in enumerate(zip(held.split(TILE), above.split(TILE), strict=True)):
        for side, (chosen, levels) in enumerate(((up, c.upper), (~up, c.lower))):
            n, at = int(chosen.sum()), 2 * i + side
            head = 2 * groups(n, c.group_size)
            step = grid(payload[:head].view(-1, 2), bounds[at : at + 1], levels, c.group_size)[1]
            tile[chosen] = step.double().repeat_interleave(c.group_size)[:n]
            payload = payload[head + codes_nbytes(levels, n) :]
    assert len(payload) == 0
    return held


def drawn(c: Codec, x: Tensor, facts: Facts, seeds: range) -> Iterator[Encoded]:
    return (c.encode(x, seed=seed, facts=facts) for seed in seeds)


def values(kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(1021, generator=draw)  # no multiple of any group
    return {
        "normal": x,
        "relu": x.relu(),
        "heavy tail": x**5,
        "offset": 100 + x,
        "sorted": x.sort().values,
        "two values": (x > 0).float() * 0.3 - 7,
    }[kind]


SETTINGS = [
    (codec("group"), Facts()),
    (codec("group", bits=1, group_size=32), Facts()),
    (codec("dither"), Facts()),
    (codec("dither", levels=3, group_size=256), Facts()),
    (codec("dither", bits=8), Facts()),
    (codec("dither"), ZEROS),
    (codec("dither", bits=1, group_size=32), ZEROS),
    (codec("sided"), Facts()),
    (codec("sided", upper=3, lower=16, group_size=32), Facts()),
]
KINDS = ["normal", "relu", "heavy tail", "offset", "sorted", "two values"]


def bias_and_limit(c: Codec, x: Tensor, facts: Facts, seeds: list[int]) -> tuple[Tensor, Tensor]:
    """abs(mean - x), and what Hoeffding allows: a draw lies in an interval as wide as its step."""
    n, total = len(seeds), torch.zeros(x.numel(), dtype=torch.float64)
    for seed in seeds:
        encoded = c.encode(x, seed=seed, facts=facts)
        total += encoded.decode().double()
    step = steps(encoded)
    rounding = step * 2**-17 + float(x.abs().max()) * 2**-22  # noise in 65536 levels, float32
    return (total / n - x).abs(), step * sqrt(log(2 * x.numel() / FALSE_ALARM) / (2 * n)) + rounding


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("c", "facts"), SETTINGS, ids=name)
def test_the_mean_over_seeds_is_x(c, facts, kind):
    bias, limit = bias_and_limit(c, values(kind), facts, list(range(3000)))
    assert bool((bias <= limit).all())


@pytest.mark.parametrize(("c", "facts"), SETTINGS, ids=name)
def test_control_the_same_seed_again_is_biased(c, facts):
    bias, limit = bias_and_limit(c, values("normal"), facts, [1] * 3000)
    assert bool((bias > limit).any())


def test_control_rounding_to_nearest_is_biased():
    x = values("normal")
    step = steps(codec("group").encode(x))
    nearest = (x / step).round() * step
    assert bool(((nearest - x).abs() > step * sqrt(log(2 * 1021 / FALSE_ALARM) / 6000)).any())


# -- the error of a gradient ----------------------------------------------------------------------
#
#   y = x W^T,  dW = dy^T x;   x~ = x + e, e independent with variance s^2 / 12 at step s:
#   E |dW~ - dW|^2 = sum_t |dy_t|^2 sum_(i in row t) s_i^2 / 12    (stochastic rounding: s^2 f(1-f))

TOKENS, WIDTH, OUT = 96, 192, 24
SEEDS = range(400)


class Problem:
    """One linear layer, its exact gradient, and the gradient with the saved x encoded."""

    def __init__(self, c: Codec, facts: Facts) -> None:
        draw = torch.Generator().manual_seed(3)
        scale = torch.linspace(0.2, 3, TOKENS)[:, None]  # rows of unlike ranges, and of unlike dy
        self.x = torch.randn(TOKENS, WIDTH, generator=draw) * scale
        if facts.has_zeros:
            self.x = self.x.relu()
        self.dy = torch.randn(TOKENS, OUT, generator=draw) * scale.flip(0)
        self.weight = torch.randn(OUT, WIDTH, generator=draw).requires_grad_()
        self.c, self.facts = c, facts
        self.exact = self.gradient(lambda x: x, lambda x: x)

    def gradient(self, pack, unpack) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = linear(self.x, self.weight)
        (dw,) = torch.autograd.grad(y, self.weight, self.dy)
        return dw

    def encoded_gradient(self, seed: int) -> Tensor:
        def pack(t: Tensor) -> Encoded:
            assert t.shape == self.x.shape  # x does not need a gradient, so the weight is not saved
            return self.c.encode(t, seed=seed, facts=self.facts)

        return self.gradient(pack, lambda encoded: encoded.decode())

    def measured(self) -> float:
        errors = [
            float((self.encoded_gradient(s) - self.exact).double().square().sum()) for s in SEEDS
        ]
        return sum(errors) / len(errors)

    def predicted(self, variance_of_step: float) -> float:
        step = steps(self.c.encode(self.x, facts=self.facts)).view(TOKENS, WIDTH)
        return float(
            (self.dy.double().square().sum(1) * step.square().sum(1)).sum() * variance_of_step
        )


DITHERS = [
    (codec("dither"), Facts()),
    (codec("dither", levels=3, group_size=32), Facts()),
    (codec("dither", bits=4), Facts()),
    (codec("dither"), ZEROS),
    (codec("dither", levels=2, group_size=32), ZEROS),
    (codec("sided"), Facts()),
    (codec("sided", upper=16, lower=3, group_size=32), Facts()),
]


@pytest.mark.parametrize(("c", "facts"), DITHERS, ids=name)
def test_the_error_of_a_linear_layers_gradient_is_predicted(c, facts):
    # |error|^2 sums OUT * WIDTH = 4608 terms and 400 seeds are averaged: its spread is below 0.3 %
    problem = Problem(c, facts)
    ratio = problem.measured() / problem.predicted(1 / 12)
    assert 0.95 <= ratio <= 1.05
    control = problem.measured() / problem.predicted(
        1 / 6
    )  # what stochastic rounding has on average
    assert not 0.95 <= control <= 1.05


def test_stochastic_rounding_does_twice_as_much_harm():
    problem = Problem(codec("group", bits=2, group_size=64), Facts())
    ratio = problem.measured() / problem.predicted(1 / 6)
    assert 0.95 <= ratio <= 1.05
    assert problem.measured() / problem.predicted(1 / 12) > 1.9


def test_what_dither_does_not_know_it_cannot_spare():
    """4 levels on a ReLU's output: without the bitmap the zeros, one half, are noisy too."""
    plain, aware = Problem(codec("dither"), ZEROS), Problem(codec("dither"), ZEROS)
    plain.facts = Facts()
    assert plain.measured() > 1.5 * aware.measured()  # 1.64: groups of non-zeros reach further


def test_two_sides_spare_half_a_step():
    """4 levels on either side of 0 against 4 for both: half the range, a quarter of the error."""
    plain, sided = Problem(codec("dither"), Facts()), Problem(codec("sided", lower=4), Facts())
    assert plain.measured() > 3 * sided.measured()


@pytest.mark.parametrize(("c", "facts"), DITHERS, ids=name)
def test_the_mean_gradient_is_exact(c, facts):
    problem = Problem(c, facts)
    mean = sum((problem.encoded_gradient(s) - problem.exact).double() for s in SEEDS) / len(SEEDS)
    expected = problem.predicted(1 / 12) / len(SEEDS)
    assert float(mean.square().sum()) <= 1.2 * expected  # a chi-square of 4608 degrees: 2 % spread
