"""What the noise promises: errors that are unbiased, of known variance, and blind to the data.

Each element of one tile is drawn n times: once a tile and seed. An error lies in an interval one
step wide, so by Hoeffding the mean of n errors stays within step * sqrt(ln(2 K / a) / (2 n)) for
all K elements at once, but for a chance a. Seeds are fixed: a test that passes goes on passing.
"""

import math

import pytest
import torch
from scipy.special import chdtri
from torch import Tensor

from elbowroom.kernels import ops
from elbowroom.kernels.layout import TILE
from elbowroom.kernels.reference.dither import grid
from elbowroom.kernels.reference.noise import uniform

FALSE_ALARM = 1e-6
REPEATS = 256  # tiles a seed
SEEDS = torch.randint(2**62, (40,), generator=torch.Generator().manual_seed(1)).tolist()
DRAWS = len(SEEDS) * REPEATS  # 10,240
GRID_BIAS = 2.0**-17  # u is one of 65536 numbers: reference/noise.py
GROUP_SIZE = 64
BINS = 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def hoeffding(elements: int, draws: float) -> float:
    """How far the mean of errors one step wide may lie from 0, in steps, for any of `elements`."""
    return math.sqrt(math.log(2 * elements / FALSE_ALARM) / (2 * draws)) + GRID_BIAS


def tile_of_normals() -> Tensor:
    return torch.randn(TILE, generator=torch.Generator().manual_seed(7))


def per_element(group_values: Tensor) -> Tensor:
    return group_values.double().repeat_interleave(GROUP_SIZE)


def drawn(kind: str, x: Tensor, levels: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """errors / step [DRAWS, TILE] of x [TILE], remainders [TILE], and the steps [TILE]."""
    many = x.repeat(REPEATS).to(device)
    out = torch.empty_like(many)
    errors = []
    for seed in SEEDS:
        if kind == "dither":
            stored = ops.dither_quantize(many, seed, levels, GROUP_SIZE)
            ops.dither_dequantize(*stored, seed, levels, GROUP_SIZE, out)
            low, step = grid(stored[1].cpu(), stored[2].cpu(), levels, GROUP_SIZE)
        else:
            stored = ops.group_quantize(many, seed, levels, GROUP_SIZE)
            ops.group_dequantize(*stored, levels, GROUP_SIZE, out)
            step, low = stored[1].cpu(), stored[2].cpu()
        errors.append(out.cpu().double().view(REPEATS, TILE) - x.double())
    groups = TILE // GROUP_SIZE
    low, step = per_element(low[:groups]), per_element(step[:groups])
    remainders = ((x.double() - low) / step) % 1.0
    return torch.cat(errors) / step, remainders, step


def unbiased(errors: Tensor) -> bool:
    """errors / step [draws, K]: whether no element's mean is further from 0 than chance allows."""
    draws, elements = errors.shape
    return bool((errors.mean(dim=0).abs() <= hoeffding(elements, draws)).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("levels", [2, 3, 4, 16])
def test_dither_is_uniform_unbiased_and_blind_to_the_data(levels, device):
    x = tile_of_normals()
    errors, remainders, _ = drawn("dither", x, levels, device)
    assert unbiased(errors)
    for inside in by_remainder(remainders):
        part = errors[:, inside]
        assert abs(part.mean()) <= hoeffding(BINS, part.numel())
        assert float((part**2).mean()) == pytest.approx(1 / 12, rel=0.02)
        assert float((part**4).mean()) == pytest.approx(1 / 80, rel=0.02)  # of a uniform number
    assert abs(correlation(errors, x)) <= math.sqrt(2 * math.log(2 / FALSE_ALARM) / errors.numel())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("levels", [2, 3, 4, 16])
def test_stochastic_rounding_is_unbiased_with_the_variance_of_a_coin(levels, device):
    errors, remainders, _ = drawn("group", tile_of_normals(), levels, device)
    assert unbiased(errors)
    for inside in by_remainder(remainders):
        f = remainders[inside]
        expected = float((f * (1 - f)).mean())
        assert float((errors[:, inside] ** 2).mean()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("remainder", [0.25, 0.75])
def test_rounding_to_the_nearest_is_caught(remainder):
    """The negative control: these checks can fail."""
    errors = torch.full((DRAWS, TILE), round(remainder) - remainder, dtype=torch.float64)
    assert not unbiased(errors)
    assert float((errors**2).mean()) != pytest.approx(1 / 12, rel=0.02)


def by_remainder(remainders: Tensor) -> list[Tensor]:
    """Which elements fall into each of BINS equal parts of [0, 1)."""
    parts = [(remainders * BINS).floor() == b for b in range(BINS)]
    assert all(part.sum() > 20 for part in parts)
    return parts


def correlation(errors: Tensor, x: Tensor) -> float:
    """Of errors [draws, K] with x [K], over all draws."""
    z = (x.double() - x.double().mean()) / x.double().std(correction=0)
    e = errors - errors.mean()
    return float((e @ z).sum() / e.numel() / e.std(correction=0))


# --- bounds, in float64 ---

UNCODED = (
    256e-36  # all levels of the smallest step that is coded: SMALLEST in reference/rounding.py
)
FOUR_ROUNDINGS = 4 * 2.0**-24  # of x - low, low + step / 2, the product and the sum

SHAPES = {
    "normal": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)),
    "constant": lambda n: torch.full((n,), -0.7),
    "constant by group": lambda n: (torch.arange(n) // GROUP_SIZE).float() * 0.37,
    "sorted": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)).sort().values,
    "wide": lambda n: torch.logspace(-30, 30, n) * torch.where(torch.arange(n) % 3 == 0, -1.0, 1.0),
    "subnormal": lambda n: torch.linspace(-1e-39, 1e-39, n),
    "far from zero": lambda n: 1000.0 + torch.rand(n, generator=torch.Generator().manual_seed(n)),
    "one outlier": lambda n: torch.where(torch.arange(n) == 9, 1e6, torch.linspace(-1, 1, n)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [2, 3, 4, 16, 256])
def test_dither_is_off_by_half_a_step_at_most(levels, shape):
    """Half a step, and the rounding of float32 arithmetic on numbers as large as the tile's."""
    x, out = SHAPES[shape](5000), torch.empty(5000)
    for seed in range(20):
        stored = ops.dither_quantize(x, seed, levels, GROUP_SIZE)
        ops.dither_dequantize(*stored, seed, levels, GROUP_SIZE, out)
        _, step = grid(stored[1], stored[2], levels, GROUP_SIZE)
        largest = stored[2].double().abs().amax(dim=1).repeat_interleave(TILE)[:5000]
        bound = per_element(step)[:5000] / 2 + FOUR_ROUNDINGS * largest
        assert ((out.double() - x.double()).abs() <= bound.clamp(min=UNCODED)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [2, 3, 4, 16, 256])
def test_stochastic_rounding_is_off_by_one_step_at_most(levels, shape):
    x, out = SHAPES[shape](5000), torch.empty(5000)
    for seed in range(20):
        stored = ops.group_quantize(x, seed, levels, GROUP_SIZE)
        ops.group_dequantize(*stored, levels, GROUP_SIZE, out)
        bound = per_element(stored[1])[:5000].clamp(min=UNCODED)
        assert ((out.double() - x.double()).abs() <= bound).all()


# --- the numbers themselves ---


def numbers(seed: int, tiles: int = 512) -> Tensor:
    return uniform(seed, 0, tiles, torch.device("cpu"))  # [tiles, TILE]


def bins(u: Tensor, count: int) -> Tensor:
    return (u.double() * count).long().flatten()


def even(bin_of: Tensor, count: int) -> bool:
    """Pearson's test that the bins are equally full."""
    found = torch.bincount(bin_of, minlength=count).double()
    expected = bin_of.numel() / count
    statistic = ((found - expected) ** 2 / expected).sum()
    return bool(statistic < chdtri(count - 1, FALSE_ALARM))  # chi2.isf, of a slow import


def independent(a: Tensor, b: Tensor) -> bool:
    """Whether the pairs of numbers fill a 32 x 32 board evenly."""
    return even(bins(a, 32) * 32 + bins(b, 32), 1024)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40, 123456789])
def test_noise_fills_the_unit_interval_evenly(seed):
    u = numbers(seed)
    assert 0 < u.min() < u.max() < 1
    assert even(bins(u, 65536), 65536)  # every number that can occur
    assert even(bins(u * 256 % 1, 256), 256)  # the lower eight bits
    by_place = u.view(-1, TILE).mean(dim=0)  # [TILE]
    limit = math.sqrt(math.log(2 * TILE / FALSE_ALARM) / (2 * len(u)))
    assert ((by_place - 0.5).abs() <= limit).all()


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40, 123456789])
def test_noise_is_independent_of_its_neighbours(seed):
    u = numbers(seed)
    half = TILE // 2
    assert independent(u[:, 1:], u[:, :-1])  # the next element
    assert independent(u[:, :half], u[:, half:])  # the other half of the same word
    assert independent(u[1:], u[:-1])  # the next tile
    assert independent(u, numbers(seed + 1))
    assert independent(u, numbers(seed ^ 2**32))  # the upper half of the seed
    for lag in (1, 2, 7, 64):
        shifted = u.double().roll(lag, dims=1)
        r = torch.corrcoef(torch.stack([u.double().flatten(), shifted.flatten()]))[0, 1]
        assert abs(r) <= math.sqrt(2 * math.log(2 / FALSE_ALARM) / u.numel())


def test_a_tile_never_repeats_the_noise_of_another_under_another_seed():
    assert not torch.equal(numbers(0, 2)[1], numbers(1, 2)[0])


def test_a_counter_is_caught():
    """The negative control: evenly spread numbers that follow from each other."""
    u = ((torch.arange(512 * TILE) * 40503) % 65536 / 65536).view(512, TILE)
    assert even(bins(u, 256), 256)
    assert not independent(u[:, 1:], u[:, :-1])
