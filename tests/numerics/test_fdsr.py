"""What fdsr promises of its error: with dither no bias, a variance known beforehand, and a bound.

A pixel's error is a fixed combination of independent errors that are uniform in +-step / 2: where
all runs are mixed by orthonormal matrices, its variance is sum_c D_pc^2 w_c^2 step_c^2 / 12.
"""

import itertools
from dataclasses import replace
from math import log

import pytest
import torch
from torch import Tensor

from elbowroom.codecs import Codec, Encoded, codec
from elbowroom.codecs.fdsr import VARIANTS
from elbowroom.kernels.bands import Bands, bands_of, cosines
from elbowroom.kernels.layout import codes_nbytes
from elbowroom.kernels.reference import fdsr, transform

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (2, 3, 24, 19)  # ragged: 24 x 19
SEEDS = range(1500)
FALSE_ALARM = 1e-6
DITHERED = [
    {"bands": "4/1.6"},
    {"bands": "6/3/2/1", "block": 4},
    {"bands": "5/2/2/1.6", "block": 7},
]


def made(rounding: str = "dither", **settings) -> Codec:
    return codec("fdsr", rounding=rounding, min_numel=0, **settings)


def maps(shape: tuple[int, ...] = SHAPE) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=draw).cumsum(-1).cumsum(-2) * 0.2
    return x * torch.linspace(0.1, 2, shape[1])[:, None, None] + 3


def pieces(encoded: Encoded) -> tuple[Bands, Tensor, Tensor]:
    """Bands; weights [G, positions, 1] (1 for the mean); steps [G, positions, lanes]."""
    _places, block, levels, _, _ = encoded.codec._settings(encoded.facts.maps)
    b = bands_of(block, tuple(levels))
    payload, scales, _ = encoded.buffers
    weights = fdsr.spread(scales[:, 2 : 2 + b.bands], b)[:, :, None].double()
    weights[:, 0] = 1
    head = codes_nbytes(b.runs[0].levels, b.lanes)
    gains = fdsr.gain_value(payload[:, head : head + b.lanes // b.cell])
    gains = gains.repeat_interleave(b.cell, dim=1).double()
    steps = torch.zeros(len(payload), block**2, b.lanes, dtype=torch.float64)
    steps[:, 0] = fdsr.mean_grid(scales[:, :2], b)[1][:, 0].double()
    for run in b.runs[1:]:
        steps[:, run.start : run.stop] = (gains * 2 / (run.levels - 1))[:, None]
    return b, weights, steps


def by_pixel(encoded: Encoded) -> Tensor:
    """sum_c D_pc^2 w_c^2 step_c^2 of each element, as encoded.shape, float64."""
    b, weights, steps = pieces(encoded)
    raster = torch.empty_like(steps)
    raster[:, list(b.order)] = (weights * steps) ** 2
    D = torch.tensor(cosines(b.block), dtype=torch.float64) ** 2
    squares = torch.einsum("ij,lk,giln->gjkn", D, D, raster.view(-1, b.block, b.block, b.lanes))
    at, real = fdsr.places(encoded.facts.maps, b, squares.device)
    out = torch.zeros(encoded.numel, dtype=torch.float64)
    out[at[real]] = squares.reshape(at.shape)[real]
    return out.as_strided(encoded.shape, encoded.stride)


def errors(c: Codec, x: Tensor) -> Tensor:
    """[seeds, *x.shape]"""
    return torch.stack([c.encode(x, seed=seed).decode().double() - x for seed in SEEDS])


@pytest.mark.parametrize("settings", DITHERED, ids=str)
def test_dither_is_unbiased_with_the_variance_predicted(settings):
    x = maps()
    found = errors(made(**settings), x)
    known = by_pixel(made(**settings).encode(x))
    n = len(SEEDS)
    # Hoeffding: sum over c of widths^2 is `known`; noise comes in 65536 levels, sums in float32
    limit = (known / (2 * n) * log(2 * x.numel() / FALSE_ALARM)).sqrt()
    limit += known.sqrt() * 2**-14 + float(x.abs().max()) * 2**-20
    assert bool((found.mean(dim=0).abs() <= limit).all())
    # 1500 x 2736 terms of kurtosis near 1.8 to 3: the spread is below 0.2 %
    assert 0.98 <= float(found.square().mean(dim=0).sum() / (known / 12).sum()) <= 1.02


@pytest.mark.parametrize(
    "settings", [{}, {"bands": "6/3/2/1.6"}, {"bands": "6/4/0", "reuse": True}]
)
def test_control_rounding_to_nearest_is_biased(settings):
    x = maps()
    c = made("nearest", **settings)
    assert torch.equal(c.encode(x, seed=1).decode(), c.encode(x, seed=2).decode())
    bias = (c.encode(x).decode() - x).double()
    step = by_pixel(made(bands="6/3/2/1.6").encode(x))
    assert bool((bias.abs() > (step / 3000 * log(2e6 * x.numel())).sqrt()).any())


def test_control_a_dropped_band_is_biased():
    x = maps()
    c = made(bands="6/4/3/0")
    mean = errors(c, x).mean(dim=0)
    dropped = made(bands="6/8/8/0").encode(x).decode().double() - x  # almost all of it is dropped
    assert float((mean - dropped).square().sum()) < 0.05 * float(mean.square().sum())


@pytest.mark.parametrize("settings", DITHERED, ids=str)
def test_no_code_is_more_than_half_a_step_off(settings):
    """In the domain where codes live; the wrong seed breaks it."""
    x = maps()
    encoded = made(**settings).encode(x, seed=9)
    b, weights, steps = pieces(encoded)
    at, real = fdsr.places(encoded.facts.maps, b, x.device)
    whole = real.all(dim=1)  # what a tile holds beyond the edge of a map is not restored

    def beyond(y: Tensor) -> float:
        e = transform.coefficients((y - x).reshape(-1)[at], b).double() / weights
        e = transform.mix(e.float(), b).double()
        over = e.abs() - steps / 2
        slack = 1e-4 * steps.amax(dim=1, keepdim=True) + 1e-5 / weights
        return float((over - slack).transpose(1, 2)[whole].max())

    assert beyond(encoded.decode()) <= 0
    assert beyond(replace(encoded, seed=10).decode()) > 0


def test_reuse_explains_what_is_alike():
    """Tiles that are multiples of few patterns are found again; noise is not."""
    draw = torch.Generator().manual_seed(0)
    few = torch.randn(5, 8, 8, generator=draw)
    few = few - few.mean(dim=(1, 2), keepdim=True)
    pick = torch.randint(5, (64, 8, 8), generator=draw)
    size = torch.rand(64, 8, 8, generator=draw) + 0.5
    alike = (few[pick] * size[..., None, None]).permute(0, 1, 3, 2, 4).reshape(1, 64, 64, 64)
    noise = torch.randn(1, 64, 64, 64, generator=draw)
    c, without = (codec("fdsr", bands="6/0", reuse=reuse) for reuse in (True, False))

    def lost(c: Codec, x: Tensor) -> float:
        return float((c.encode(x.contiguous()).decode() - x).square().sum() / x.square().sum())

    assert lost(without, alike) > 0.9
    assert lost(c, alike) < 0.01
    assert 0.6 < lost(c, noise) < lost(without, noise)


def test_rho_keeps_the_tiles_of_most_residual():
    x = torch.randn(1, 16, 64, 64, generator=torch.Generator().manual_seed(0))
    size = torch.where(
        torch.rand(1, 16, 8, 8, generator=torch.Generator().manual_seed(1)) < 0.2, 9, 0.1
    )
    x = x * size.repeat_interleave(8, 2).repeat_interleave(8, 3)
    lost = [
        float(
            (codec("fdsr", bands="6/0", reuse=True, rho=rho).encode(x).decode() - x).square().sum()
        )
        for rho in (1.0, 0.5)
    ]
    assert lost[1] < 1.01 * lost[0]
    assert codec("fdsr", bands="6/0", reuse=True, rho=0.5).encoded_nbytes(x.shape, x.dtype) < codec(
        "fdsr", bands="6/0", reuse=True
    ).encoded_nbytes(x.shape, x.dtype)


def test_rungs_go_up_in_rate_and_down_in_error_on_either_side_of_the_turn():
    x = maps((8, 8, 56, 56))
    told = []
    for variant in VARIANTS:
        encoded = variant.encode(x)
        e = float((encoded.decode() - x).double().square().sum())
        told.append((encoded.nbytes, e, variant.rounding))
    for (a, e, kind), (b, f, other) in itertools.pairwise(told):
        assert a < b
        assert f < e or kind != other
    assert [kind for *_, kind in told] == sorted((kind for *_, kind in told), reverse=True)


def test_it_beats_dither_on_smooth_maps_at_equal_bits():
    """1.9 bits: dither with 3 levels, groups of 64. And it does not on white noise."""
    draw = torch.Generator().manual_seed(0)
    white = torch.randn(4, 8, 56, 56, generator=draw)
    f = (torch.fft.fftfreq(56)[:, None] ** 2 + torch.fft.rfftfreq(56) ** 2).sqrt()
    smooth = torch.fft.irfft2(torch.fft.rfft2(white) / (f + 1 / 56) ** 1.5, s=(56, 56))
    ours, plain = made(bands="4/1.6"), codec("dither", levels=3)
    for x, least, most in ((smooth, 0.0, 0.75), (white, 0.75, 1.5)):
        found = []
        for c in (ours, plain):
            encoded = c.encode(x, seed=3)
            found.append(float((encoded.decode() - x).double().square().sum()))
            assert 1.8 < 8 * encoded.nbytes / x.numel() < 1.9
        assert least < found[0] / found[1] < most


def test_rungs_are_in_order_of_rate_on_all_usual_maps():
    """But 4 x 4, where the card says that they are not."""
    for shape in ((64, 64, 28, 28), (16, 64, 128, 128), (64, 32, 14, 14), (64, 64, 7, 7)):
        sizes = [variant.encoded_nbytes(shape, torch.float32) for variant in VARIANTS]
        assert sizes == sorted(set(sizes))
