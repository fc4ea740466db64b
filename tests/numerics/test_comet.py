"""The bound of `comet` holds everywhere; its dither is what the prediction of gradients assumes.

Bounds are checked with `<=` in float64, without slack. The limits of statistics are derived, seeds
are fixed, and rounding to nearest is the control that must fail.
"""

from dataclasses import replace
from math import log, sqrt

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv2d, linear

from elbowroom.codecs import Comet, Facts, codec
from elbowroom.errors import CodecError, UnknownField
from elbowroom.kernels import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ZEROS = Facts(has_zeros=True)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hostile(name: str) -> Tensor:
    x, i = draw(2, 3, 40, 20), torch.arange(4800.0).view(2, 3, 40, 20)
    return {
        "constant": torch.full_like(x, 0.3),
        "all zero": torch.zeros_like(x),
        "both zeros": torch.where(x > 0, 0.0, -0.0),
        "subnormal": x * 3e-40,
        "half of it subnormal in float16": x * 1e-5,
        "wide": x.sign() * torch.logspace(-37, 3, 4800).view_as(x),
        "sorted": x.flatten().sort().values.view_as(x),
        "offset": 1000 + x,
        "one outlier": torch.where(i == 77, 6e4, x),
        "smooth": (i / 100).sin(),
        "relu": x.relu(),
        "huge": x.clamp(-1, 1) * 6.5e4,
    }[name]


NAMES = ["constant", "all zero", "both zeros", "subnormal", "half of it subnormal in float16"]
NAMES += ["wide", "sorted", "offset", "one outlier", "smooth", "relu", "huge"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rounding", ["dither", "stochastic", "nearest"])
@pytest.mark.parametrize("prediction", ["none", "1d", "2d"])
def test_the_bound_holds_everywhere(prediction, rounding, name):
    for dtype in DTYPES:
        x = hostile(name).to(dtype)
        width = float(x.double().max() - x.double().min())
        for bound, relative in ((1e-1, True), (1e-4, True), (1e-2, False), (1e-9, False)):
            c = Comet(bound, relative, rounding, prediction)
            for facts in (Facts(), ZEROS):
                y = c.encode(x, seed=5, facts=facts).decode()
                error = (y.double() - x.double()).abs().max()
                assert float(error) <= bound * (width if relative else 1), (dtype, bound)
                assert torch.equal(y != 0, x != 0)


def test_control_half_the_bound_does_not_hold():
    x = draw(5000)
    error = (codec("comet", bound=0.1, relative=False).encode(x).decode() - x).abs().max()
    assert 0.05 < float(error) <= 0.1


def test_facts_override_the_bound():
    x = draw(5000)
    encoded = codec("comet", bound=0.5).encode(x, facts=Facts(error_bound=1e-3))
    assert float((encoded.decode().double() - x.double()).abs().max()) <= 1e-3
    forgetful = replace(encoded, facts=Facts())  # the bound is in the code, not in the facts
    assert torch.equal(forgetful.decode(), encoded.decode())


@pytest.mark.parametrize("bound", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(UnknownField, match=r"bound=.* is not possible; bound is a positive"):
        codec("comet", bound=bound)
    with pytest.raises(CodecError, match=r"cannot keep to facts.error_bound=.*Leave it out"):
        codec("comet").encode(draw(9), facts=Facts(error_bound=bound))


def test_nan_and_inf_are_held_exactly():
    x = draw(5000)
    x[7], x[4000] = float("nan"), float("-inf")
    encoded = codec("comet").encode(x)
    assert encoded.raw
    assert torch.equal(encoded.decode().view(torch.int32), x.view(torch.int32))


def test_zeros_cost_a_header():
    encoded = codec("comet").encode(torch.zeros(2048 * 10))
    assert encoded.nbytes == 64 * 10 + 2 * 10 + 12  # headers, sizes, grid


def test_the_bitmap_is_relus_mask():
    x = draw(3000).relu()
    encoded = codec("comet").encode(x, facts=ZEROS)
    bits = encoded.bitmap
    assert bits is encoded.bitmap
    flags = ((bits[:, None] >> torch.arange(8)) & 1).view(-1)[:3000] != 0
    assert torch.equal(flags, x > 0)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_shape_stride_dtype_and_setting(data):
    shape = data.draw(st.lists(st.integers(1, 9), max_size=5)) + data.draw(
        st.sampled_from([[], [70], [300]])
    )
    x = draw(*shape, seed=len(shape)).clamp(min=data.draw(st.sampled_from([-9.0, 0.0])))
    x = x.to(data.draw(st.sampled_from(DTYPES))).permute(
        data.draw(st.permutations(range(len(shape))))
    )
    x = x[:: data.draw(st.integers(1, 3))] if x.dim() else x
    c = Comet(
        data.draw(st.sampled_from([0.3, 0.01, 1e-5])),
        False,
        data.draw(st.sampled_from(["dither", "stochastic", "nearest"])),
        data.draw(st.sampled_from(["none", "1d", "2d"])),
    )
    facts = data.draw(st.sampled_from([Facts(), ZEROS]))
    y = c.encode(x, seed=data.draw(st.integers(0, 2**64 - 1)), facts=facts).decode()
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert torch.equal(y != 0, x != 0)
    assert bool(((y.double() - x.double()).abs() <= c.bound).all())


# -- the error of dither: uniform, of mean 0, independent of x ------------------------------------

N, BOUND = 2**18, 0.3


def errors(x: Tensor, rounding: str = "dither") -> Tensor:
    """In units of the bound, over the non-zeros."""
    y = Comet(BOUND, relative=False, rounding=rounding).encode(x, seed=9).decode()
    return ((y.double() - x.double()) / BOUND)[x != 0]


@pytest.mark.parametrize("data", ["normal", "relu", "smooth", "fine"])
def test_dither_is_uniform_and_independent_of_x(data):
    x = {
        "normal": draw(N),
        "relu": draw(N).relu(),
        "smooth": (torch.arange(N) / 50.0).sin(),
        "fine": draw(N) * BOUND * 0.1,  # all within the bound: still not 0
    }[data]
    e, kept = errors(x), x[x != 0].double()
    n = len(e)
    # Kolmogorov-Smirnov: P(distance > d) <= 2 exp(-2 n d^2) = 1e-6; the grid of noise adds 2^-17
    steps = torch.arange(1, n + 1) / n
    distance = ((e.sort().values + 1) / 2 - steps).abs().max()
    assert float(distance) <= sqrt(log(2e6) / (2 * n)) + 1 / n + 1e-4
    five = 5 / sqrt(n)  # five standard deviations
    assert abs(float(e.mean())) <= sqrt(1 / 3) * five
    assert abs(float(e.square().mean()) - 1 / 3) <= sqrt(4 / 45) * five + 1e-4
    assert abs(float(torch.corrcoef(torch.stack([e, kept]))[0, 1])) <= five
    assert abs(float(torch.corrcoef(torch.stack([e[1:], e[:-1]]))[0, 1])) <= five


def test_control_nearest_depends_on_x():
    x = draw(N) * BOUND * 0.3  # most lie nearest to 0
    e = errors(x, "nearest")
    assert abs(float(torch.corrcoef(torch.stack([e, x.double()]))[0, 1])) > 0.1


@pytest.mark.parametrize(("rounding", "variance"), [("dither", 1 / 3), ("stochastic", 1 / 6)])
def test_the_mean_over_seeds_is_x(rounding, variance):
    x, n = draw(997), 3000
    c = Comet(BOUND, relative=False, rounding=rounding)
    drawn = torch.stack([c.encode(x, seed=s).decode() for s in range(n)]).double() - x
    # Hoeffding: a draw lies within an interval of two bounds
    limit = 2 * BOUND * sqrt(log(2 * 997 / 1e-6) / (2 * n)) + BOUND * 2**-15
    assert bool((drawn.mean(0).abs() <= limit).all())
    assert float(drawn.square().mean()) == pytest.approx(variance * BOUND**2, rel=0.02)


# -- the error of a weight gradient: sigma_k = bound * sqrt(R / 3) * |dy_k| -----------------------


KEYS = 60  # all outputs share one x~: a single draw spreads by some percent


def smooth_maps() -> Tensor:
    """[8, 6, 28, 28] after ReLU, correlated between pixels, samples and channels."""
    base = torch.nn.functional.interpolate(draw(8, 6, 7, 7), size=28, mode="bilinear")
    return (base + base.mean(0, keepdim=True)).relu()


def conv_ratio(rounding: str, stride: int = 1, groups: int = 1) -> float:
    """Measured / predicted sigma, over KEYS keys; dy follows x, as it does in a network."""
    x = smooth_maps()
    weight = draw(12, 6 // groups, 3, 3, seed=1).requires_grad_()
    dy = conv2d(x, weight, stride=stride, groups=groups).detach()
    dy = dy + draw(*dy.shape, seed=2)
    bound = 0.1 * float(x.max())

    def gradient(saved: Tensor) -> Tensor:
        y = conv2d(saved, weight, stride=stride, groups=groups)
        return torch.autograd.grad(y, weight, dy)[0].double()

    exact = gradient(x)
    c = Comet(bound, relative=False, rounding=rounding)
    measured = [gradient(c.encode(x, seed=s).decode()) - exact for s in range(KEYS)]
    share = (x != 0).double()  # exactly: sum dy^2 where the input below the tap is not 0
    taps = torch.autograd.grad(
        conv2d(share, weight.double(), stride=stride, groups=groups), weight, dy.double().square()
    )[0]
    variance = bound**2 / 3 * taps.double().sum()
    found = sum(float(error.square().sum()) for error in measured) / len(measured)
    return sqrt(found / float(variance))


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 3)])
def test_the_error_of_a_convolutions_gradient_is_predicted(stride, groups):
    assert 0.9 <= conv_ratio("dither", stride, groups) <= 1.1


def test_control_nearest_fails_on_correlated_data():
    assert not 0.9 <= conv_ratio("nearest") <= 1.1


def test_the_error_of_a_linear_layers_gradient_is_predicted():
    x, dy = draw(256, 96).relu(), draw(256, 40, seed=1)
    weight = draw(40, 96, seed=2).requires_grad_()
    bound = 0.1
    c = Comet(bound, relative=False)

    def gradient(saved: Tensor) -> Tensor:
        return torch.autograd.grad(linear(saved, weight), weight, dy)[0].double()

    exact = gradient(x)
    found = [gradient(c.encode(x, seed=s, facts=ZEROS).decode()) - exact for s in range(KEYS)]
    per_output = torch.stack(found).square().mean(dim=(0, 2))  # [40]
    r = float((x != 0).double().mean())
    predicted = r * bound**2 / 3 * dy.double().square().sum(0)
    assert 0.9 <= sqrt(float(per_output.sum() / predicted.sum())) <= 1.1


def test_a_header_that_asks_for_a_bitmap_that_is_not_there_is_refused_by_the_reference():
    x, grid = draw(64), torch.tensor([0.05, 0.1, 10.0])
    bits, headers, sizes, payload = reference.comet_quantize(x, grid, 1, "dither", True, 0, 0, 0)
    headers[0] = 0x80 | 0x40 | 3
    with pytest.raises(ValueError, match="ask for no bitmap"):
        reference.comet_dequantize(
            bits, headers, sizes, payload, grid, 1, "dither", 0, 0, 0, torch.empty_like(x)
        )
