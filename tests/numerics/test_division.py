"""Division: unbiased, of known variance, any map; and the paper's formula where that has no fault.

Thresholds are derived, seeds are fixed, and beside each statistic stands a control that fails it.
"""

from math import log, prod, sqrt

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from elbowroom.codecs import Encoded, Facts, codec
from elbowroom.codecs.base import memory_order
from elbowroom.kernels import maps as cells
from elbowroom.kernels import ops, reference
from elbowroom.kernels.reference.codes import unpack_codes
from elbowroom.kernels.reference.division import spread
from elbowroom.kernels.reference.noise import uniform

pytestmark = pytest.mark.usefixtures("one_thread")

FALSE_ALARM = 1e-6
DRAWS = 2000
LAST = torch.channels_last
SETTINGS = [
    {},
    {"rounding": "dither"},
    {"bits": 1, "block": 4, "rounding": "dither"},
    {"bits": 4, "range_blocks": 1},
    {"block": 16, "range_blocks": 2, "rounding": "dither"},
]


def values(*shape: int) -> Tensor:
    """Maps with slopes, noise and an offset each: what an average takes off, and what it leaves."""
    draw = torch.Generator().manual_seed(prod(shape))
    x = torch.randn(shape, generator=draw)
    return x + torch.linspace(-2, 5, shape[-1]) + torch.randn(*shape[:2], 1, 1, generator=draw) * 4


def grid(encoded: Encoded) -> tuple[Tensor, Tensor]:
    """The step [N] of each element and the value of code 0 without dither [N], in memory order."""
    c, (_, mean, scale, low) = encoded.codec, encoded.buffers
    block, reach, found = c._how(encoded.numel, encoded.facts)
    over, over_ranges = cells.blocks(found, block), cells.ranges(found, block, reach)
    return (
        spread(scale, over_ranges).double(),
        spread(mean, over).double() + spread(low, over_ranges).double(),
    )


def errors(c, x: Tensor, seeds: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(x~ - x) / step [seeds, N] in memory order, the step [N], and remainders on the grid [N]."""
    flat, found = memory_order(x)[0].double(), []
    for seed in seeds:
        encoded = c.encode(x, seed=seed)
        found.append(memory_order(encoded.decode())[0].double() - flat)
    step, first = grid(encoded)
    return torch.stack(found) / step, step, ((flat - first) / step) % 1.0


def limit(elements: int, draws: int) -> float:
    """Hoeffding, for errors in an interval one step wide; the noise has 65536 levels."""
    return sqrt(log(2 * elements / FALSE_ALARM) / (2 * draws)) + 2**-17 + 1e-5  # float32


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["maps", "channels_last"])
@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_the_mean_over_seeds_is_x(chosen, layout):
    x = values(2, 3, 13, 19)
    x = x.to(memory_format=LAST) if layout == "channels_last" else x
    found, _, _ = errors(codec("division", **chosen), x, list(range(DRAWS)))
    assert float(found.mean(dim=0).abs().max()) <= limit(x.numel(), DRAWS)


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_control_the_same_seed_again_is_biased(chosen):
    x = values(2, 3, 13, 19)
    found, _, _ = errors(codec("division", **chosen), x, [1] * 3)
    assert float(found.mean(dim=0).abs().max()) > limit(x.numel(), DRAWS)


def test_control_rounding_to_nearest_is_biased():
    x = values(2, 3, 13, 19)
    _, _, remainder = errors(codec("division"), x, [1])
    nearest = remainder.round() - remainder
    assert float(nearest.abs().max()) > limit(x.numel(), DRAWS)


def test_stochastic_rounding_has_the_variance_of_a_coin_and_dither_a_twelfth():
    """4,446 elements x 200 draws: the mean square of either is known to 0.5 % (five sigma: 0.4 %).

    Of the mean of K = 889,200 squares, each at most 1 and of variance at most 1/20.
    """
    x = values(6, 3, 13, 19)
    for rounding in ("stochastic", "dither"):
        c = codec("division", rounding=rounding)
        found, _, remainder = errors(c, x, list(range(200)))
        coin = float((remainder * (1 - remainder)).mean())
        known = {"stochastic": coin, "dither": 1 / 12}
        slack = 5 * sqrt(1 / 20 / found.numel())
        square = float((found**2).mean())
        assert abs(square - known.pop(rounding)) <= slack
        (other,) = known.values()
        assert abs(square - other) > slack, "the control: the other's variance"


# -- the published method, where it has no fault: maps of whole blocks ----------------------------


def published(x: Tensor, u: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """notes/activation-compression.md, 3.6: codes, averages and x^ of x [N, C, H, W]."""
    average = avg_pool2d(x, 8).bfloat16().float()
    rise = interpolate(average, scale_factor=8, mode="nearest")
    h = x - rise
    least, most = h.amin(dim=(2, 3), keepdim=True), h.amax(dim=(2, 3), keepdim=True)
    scale = (2**bits - 1) / (most - least + 2e-6)
    q = torch.round(((h - least) * scale + u - 0.5).clamp(min=0))
    return q, average, rise + q / scale + least


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 2, 16, 40), (1, 4, 56, 56)])
def test_it_is_the_papers_method_on_whole_blocks(shape, bits):
    """Codes differ only by what rounding low and scale to bf16 moves: 2^-7 of the range in all.

    So a code differs with a chance of at most (2^bits - 1) * 2^-7, by one, and a value by a step
    then, else by 2^-7 of the range.
    """
    x = values(*shape)
    encoded = codec("division", bits=bits).encode(x, seed=9)
    u = uniform(9, 0, -(-x.numel() // 2048), x.device).view(-1)[: x.numel()].view(shape)
    q, average, y = published(x, u, bits)
    codes, mean, scale, low = encoded.buffers
    assert float((mean.view_as(average).float() - average).abs().max()) <= 2**-8 * float(
        average.abs().max()
    )
    same = unpack_codes(codes, x.numel(), 1 << bits).view(shape).float() == q
    assert float((~same).float().mean()) <= (2**bits - 1) * 2**-7
    step = scale.float().view(*shape[:2], 1, 1)
    width = step * (2**bits - 1) + low.float().abs().view(*shape[:2], 1, 1)
    gap = (encoded.decode() - y).abs()
    # a mean may be off by one bf16 step, where sums of another order straddle a boundary
    assert bool((gap <= torch.where(same, 0.0, step) + width * 2**-6 + 2**-7).all())
    ours, theirs = (encoded.decode() - x).square().mean(), (y - x).square().mean()
    assert 0.9 < float(ours / theirs) < 1.1


def test_control_another_noise_gives_other_codes():
    x = values(2, 3, 16, 16)
    encoded = codec("division").encode(x, seed=10)
    u = uniform(9, 0, 1, x.device).view(-1)[: x.numel()].view(x.shape)
    q, _, _ = published(x, u, 2)
    codes = unpack_codes(encoded.buffers[0], x.numel(), 4).view(x.shape)
    assert float((codes != q).float().mean()) > 3 * 2**-7


# -- maps -----------------------------------------------------------------------------------------


def test_an_edge_block_is_averaged_over_what_it_holds():
    x = values(1, 2, 14, 13)
    (_, mean, _, _) = codec("division").encode(x).buffers
    expected = torch.stack(
        [x[..., r : r + 8, c : c + 8].mean(dim=(2, 3)).view(-1) for r in (0, 8) for c in (0, 8)],
        dim=1,
    )
    assert torch.allclose(mean.float().view(2, 4), expected, rtol=2**-8)


def test_a_map_smaller_than_a_block_is_one_block():
    x = values(2, 3, 5, 7)
    (_, mean, _, _) = codec("division").encode(x).buffers
    assert torch.allclose(mean.float().view(2, 3), x.mean(dim=(2, 3)), rtol=2**-8)


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_channels_last_has_the_same_blocks_and_ranges(chosen):
    x, c = values(2, 5, 21, 18), codec("division", **chosen)
    for a, b in zip(
        c.encode(x).buffers[1:], c.encode(x.to(memory_format=LAST)).buffers[1:], strict=True
    ):
        assert torch.equal(a.view(2, 5, -1), b.view(2, -1, 5).transpose(1, 2))


def test_a_constant_and_a_step_between_blocks_come_back_exactly():
    """What the averages hold costs no error: h is 0."""
    x = torch.zeros(1, 1, 16, 16)
    x[..., 8:, :] = 3.0
    x[..., 8:] -= 0.5
    assert torch.equal(codec("division", bits=1).encode(x).decode(), x)


@pytest.mark.parametrize("side", [7, 8, 56, 112])
def test_bits_a_value(side):
    blocks = ((side + 7) // 8) ** 2
    for chosen, ranges in (({}, 1), ({"range_blocks": 1}, blocks)):
        nbytes = codec("division", **chosen).encoded_nbytes((64, 32, side, side), torch.float32)
        bits = 2 + (16 * blocks + 32 * ranges) / side**2
        assert nbytes * 8 / (64 * 32 * side**2) == pytest.approx(bits)


@pytest.mark.parametrize("block", [4, 8, 16])
def test_one_row_takes_blocks_of_as_many_elements_and_ranges_of_256(block):
    c = codec("division", block=block)
    ranges, blocks = 3 * 3, 3 * -(-640 // block**2)
    assert c.encoded_nbytes((3, 640), torch.float32) == 3 * 640 // 4 + 2 * blocks + 4 * ranges


# -- sequences ------------------------------------------------------------------------------------


def tokens(B: int, T: int, C: int) -> Tensor:
    """Each channel with an offset and a spread of its own, which change slowly along T."""
    draw = torch.Generator().manual_seed(B * T * C)
    offsets, spreads = (4 * torch.randn(2, C, generator=draw)).unbind()
    x = torch.randn(B, T, C, generator=draw) * spreads.abs() + offsets
    return x + torch.linspace(-2, 2, T)[:, None]


def square(c, x: Tensor, facts: Facts) -> float:
    y = c.encode(x, seed=1, facts=facts).decode()
    return float((y - x).square().sum() / x.square().sum())


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_a_sequence_has_its_blocks_along_itself(rounding):
    c, x, along = codec("division", rounding=rounding), tokens(2, 300, 96), Facts(sequence=-2)
    encoded = c.encode(x, seed=1, facts=along)
    means = encoded.buffers[1].float().view(2, 5, 96)  # 300 are four blocks of 64, and 44
    for k in range(5):
        expected = x[:, 64 * k : 64 * k + 64].mean(dim=1)
        assert torch.allclose(means[:, k], expected, rtol=2**-8, atol=1e-6)
    assert encoded.nbytes == c.encoded_nbytes((2, 300, 96), torch.float32, along)
    turned = x.transpose(1, 2)  # as conv1d reads it: the same memory, so the same code
    again = c.encode(turned, seed=1, facts=Facts(sequence=-1))
    assert all(torch.equal(a, b) for a, b in zip(encoded.buffers, again.buffers, strict=True))
    copy = c.encode(turned.contiguous(), seed=1, facts=Facts(sequence=-1))
    assert torch.equal(copy.buffers[1].view(2, 96, 5), encoded.buffers[1].view(2, 5, 96).mT)
    assert copy.nbytes == encoded.nbytes


def test_along_the_sequence_errors_are_smaller_than_along_rows_and_than_those_of_zeros():
    """With one range a row, as before, two bits were worse than nothing at all."""
    x, c = tokens(2, 512, 768), codec("division")
    x[..., 5] *= 30  # the outlier that hidden states have
    along, rows = square(c, x, Facts(sequence=-2)), square(c, x, Facts())
    whole = square(codec("division", range_blocks=64), x, Facts())
    assert along < 0.25 * rows < rows < whole
    assert along < 0.5
    gaussian = torch.randn(64, 3072, generator=torch.Generator().manual_seed(1))
    assert square(codec("division", range_blocks=64), gaussian, Facts()) > 0.9
    assert square(c, gaussian, Facts()) < 0.65


@pytest.mark.parametrize("sequence", [-5, 0, 7, -1, -2, -3])
def test_any_sequence_comes_back_within_a_step(sequence):
    x, c = tokens(3, 70, 65), codec("division", rounding="dither")
    encoded = c.encode(x, seed=5, facts=Facts(sequence=sequence))
    gap = (encoded.decode() - x).abs().view(-1).double()
    assert bool((gap <= grid(encoded)[0] + 2**-20 * float(x.abs().max())).all())


def test_a_sequence_shorter_than_a_block_is_coded_by_rows():
    x, c = tokens(8, 63, 96), codec("division")
    rows, along = (c.encode(x, seed=1, facts=facts) for facts in (Facts(), Facts(sequence=-2)))
    assert all(torch.equal(a, b) for a, b in zip(rows.buffers, along.buffers, strict=True))


ALWAYS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@ALWAYS
@given(
    maps=st.tuples(*(st.integers(1, most) for most in (4, 40, 40, 20))),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    block=st.sampled_from([4, 8, 16]),
    reach=st.integers(0, 3),
    bits=st.integers(1, 8),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_map_gives_the_bits_of_the_reference(maps, dtype, block, reach, bits, seed):
    draw = torch.Generator().manual_seed(prod(maps))
    x = (torch.randn(prod(maps), generator=draw) * 3).to(dtype)
    how = 1 << bits, block, reach, list(maps)
    results = []
    for where in (ops, reference):
        stored = where.division_quantize(x, seed, *how)
        a, b = torch.empty_like(x), torch.empty_like(x)
        where.division_dequantize(*stored, seed, *how, False, a)
        where.division_dequantize(*stored, seed, *how, True, b)
        results.append([*stored, a, b])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@ALWAYS
@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    chosen=st.sampled_from(SETTINGS),
    every=st.integers(1, 2),
)
def test_any_shape_and_stride_comes_back_within_a_step(shape, order, dtype, chosen, every):
    n = prod(shape)
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype).view(shape)
    places = list(range(len(shape)))
    order.shuffle(places)
    x = x.permute(places)[::every]
    c = codec("division", **chosen)
    encoded = c.encode(x, seed=5)
    y = encoded.decode()
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert encoded.nbytes == c.encoded_nbytes(tuple(x.shape), x.dtype)
    flat, back = memory_order(x)[0].double(), memory_order(y)[0].double()
    coarse = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    reach = 2 * float(flat.abs().max()) + 1e-6
    assert bool(((back - flat).abs() <= grid(encoded)[0] + coarse * reach).all())
