"""The kernels against searches and loops that share no idea with the code, only the documents.

The reference alone cannot prove a format: what it gets wrong, its twins repeat.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from elbowroom.kernels import layout, numba, reference
from elbowroom.kernels.reference.noise import uniform

BACKENDS = {"reference": reference, "numba": numba}
SIZES = (1, 2, 9, 63, 2048, 2048 + 1000)


@pytest.fixture(params=[*BACKENDS, pytest.param("triton", marks=pytest.mark.sampled)])
def backend(request):
    if request.param != "triton":
        return BACKENDS[request.param]
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("test_kernels.py compares it with the reference on the device")
    from elbowroom.kernels import triton

    return triton


# The table of layout.py's docstring: levels -> codes in a byte, for each run of bytes.
CODES_A_BYTE = {
    2: [8],
    4: [4],
    8: [4, 8],
    16: [2],
    32: [2, 8],
    64: [2, 4],
    128: [2, 4, 8],
    256: [1],
}
IN_BASE = {3: 5, 5: 3, 6: 3}


def packed(codes: list[int], levels: int) -> list[int]:
    """Codes to bytes, one byte at a time."""
    out: list[int] = []
    for start in range(0, len(codes), 2048):
        tile = codes[start : start + 2048]
        if levels in IN_BASE:
            out += digits_to_bytes(tile, IN_BASE[levels], levels)
            continue
        power = min(p for p in CODES_A_BYTE if p >= levels)
        left = power.bit_length() - 1  # bits of a code not stored yet, the highest first
        for per in CODES_A_BYTE[power]:
            left -= 8 // per
            out += digits_to_bytes(
                [(code >> left) % 2 ** (8 // per) for code in tile], per, 2 ** (8 // per)
            )
        assert left == 0
    return out


def digits_to_bytes(digits: list[int], per: int, base: int) -> list[int]:
    n = -(-len(digits) // per)
    out = []
    for j in range(n):
        byte = 0
        for k in reversed(range(per)):
            byte = byte * base + (digits[j + k * n] if j + k * n < len(digits) else 0)
        out.append(byte)
    return out


@pytest.mark.parametrize("levels", [2, 3, 4, 5, 6, 7, 8, 16, 17, 32, 64, 100, 128, 200, 256])
def test_codes_lie_where_the_layout_says(backend, levels):
    """With low 0 and scale 1 an integer is its own code."""
    for n in SIZES:
        x = torch.randint(0, levels, (n,), generator=torch.Generator().manual_seed(n))
        x[0::32], x[1::32] = 0, levels - 1  # each group spans 0..levels-1
        codes, scale, low = backend.group_quantize(x.float(), 1, levels, 32)
        spanned = scale[: (n + 30) // 32].float()
        assert low.eq(0).all()
        assert spanned.eq(1).all()
        assert codes.tolist() == packed(x.tolist(), levels)
        assert len(codes) == layout.packed_nbytes(levels, n)

        out = torch.empty(n)
        backend.group_dequantize(codes, scale, low, levels, 32, out)
        assert torch.equal(out, x.float())


@pytest.mark.parametrize(
    ("fmt", "dtype", "most"),
    [("e4m3", torch.float8_e4m3fn, 448.0), ("e5m2", torch.float8_e5m2, 57344.0)],
)
def test_float8_is_the_nearest_code(backend, fmt, dtype, most):
    """Every bf16 in range, every midpoint of two codes and its neighbours, against all codes."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    codes = values.isfinite().nonzero().view(-1)
    grid = values[codes].sort().values.unique()
    middle = ((grid[1:] + grid[:-1]) / 2).float()
    above, below = (middle.nextafter(torch.tensor(end)) for end in (9e9, -9e9))
    x = torch.cat([all_patterns(torch.bfloat16).float(), middle, above, below])
    x = x[x.abs() <= most]
    rows = pad(x, (0, -len(x) % 31)).view(-1, 31)
    x = pad(rows, (1, 0), value=most).flatten()  # absmax of each group: the scale is 1
    got, scale = backend.fp8_quantize(x, 32, fmt)
    assert scale.float().eq(1).all()
    assert same_or_tie(got, x, codes, values)
    out = torch.empty_like(x)
    backend.fp8_dequantize(got, scale, 32, fmt, out)
    assert torch.equal(out.double(), values[got.long()])


def same_or_tie(got: Tensor, x: Tensor, codes: Tensor, values: Tensor) -> bool:
    """No code is nearer than the one chosen, and of two equally near ones it is the even one."""
    distances = (x.double()[:, None] - values[codes][None, :]).abs()  # [N, codes]
    least = distances.min(dim=1).values
    assert torch.equal((x.double() - values[got.long()]).abs(), least)
    nearest = distances == least[:, None]
    nearest &= (values[codes] != 0) | (codes == 0)  # +0 and -0 are one value
    tie = nearest.sum(dim=1) == 2
    assert tie.any()
    return bool((got[tie] % 2 == 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 2.0**-9, 2.0**9])
def test_all_halves_convert(backend, dtype, factor):
    """All 65536 patterns to float32, times a factor, and back, as NumPy or an oracle does it."""
    x = all_patterns(dtype)
    y = x.clone()
    backend.affine(y, torch.tensor([factor]), torch.tensor([0.0]), 1, None, y)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype is torch.float16:
            product = x.numpy().astype(np.float32) * np.float32(factor)
            expected = torch.from_numpy(product.astype(np.float16))
        else:
            wide = x.view(torch.int16).numpy().astype(np.uint32) << 16
            product = wide.view(np.float32) * np.float32(factor)
            expected = torch.from_numpy(nearest_bf16(product)).view(torch.bfloat16)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y[~y.isnan()], expected[~y.isnan()])


def all_patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def nearest_bf16(x: np.ndarray) -> np.ndarray:
    """Of the two bf16 around x the nearer, if equally near the even one: int16 bits."""
    bits = x.view(np.uint32)
    below, above = bits >> 16, (bits >> 16) + 1  # towards zero, away from it
    rest = (bits & 0xFFFF).astype(np.int64)
    up = (rest > 0x8000) | ((rest == 0x8000) & (below % 2 == 1))
    chosen = np.where(np.isfinite(x) & up, above, below)
    return np.where(np.isnan(x), 0x7FC0, chosen).astype(np.uint16).view(np.int16)


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_bits_lie_where_the_document_says(backend, density):
    for n in (1, 8, 9, 2500):
        chosen = torch.rand(n, generator=torch.Generator().manual_seed(n)) < density
        bits = backend.pack_bits(chosen).tolist()
        assert bits == [
            sum(2**k for k in range(8) if 8 * j + k < n and chosen[8 * j + k])
            for j in range(-(-n // 8))
        ]


@pytest.mark.parametrize("n", [1, 9, 2048, 2048 + 300])
@pytest.mark.parametrize(("upper", "lower"), [(4, 2), (3, 16), (8, 5)])
def test_two_sides_are_two_tiles_of_dither(backend, upper, lower, n):
    """The chosen values of a tile, in order, then the others: each as `dither` stores a tile."""
    draw = torch.Generator().manual_seed(n)
    x, chosen = torch.randn(n, generator=draw), torch.rand(n, generator=draw) < 0.4
    bits = backend.pack_bits(chosen)
    payload, bounds = backend.sided_quantize(x, bits, 5, upper, lower, 32, 1)
    start = 0
    for i in range(0, n, 2048):
        for side, levels in ((True, upper), (False, lower)):
            ours = [j for j in range(i, min(i + 2048, n)) if bool(chosen[j]) == side]
            ranges = payload[start : start + 2 * -(-len(ours) // 32)].view(-1, 2).tolist()
            start += 2 * len(ranges)
            lo, hi = bounds[2 * (i // 2048) + (not side)].double().tolist()
            for g, (a, b) in enumerate(ranges):
                low, high = (lo + end * (hi - lo) / 255 for end in (a, b))
                group = [float(x[j]) for j in ours[32 * g : 32 * g + 32]]
                slack = 1e-6 * max(abs(lo), abs(hi))
                assert low - slack <= min(group)
                assert max(group) <= high + slack
            start += layout.codes_nbytes(levels, len(ours))
    assert start == len(payload)

    out = torch.empty(n)
    backend.sided_dequantize(bits, payload, bounds, 5, upper, lower, 32, 1, out)
    for side, levels in ((chosen, upper), (~chosen, lower)):
        held = bounds[0 if side is chosen else 1 :: 2].double()
        widest = float((held[:, 1] - held[:, 0]).max())
        all_of = (out - x)[side].abs()
        assert not len(all_of) or float(all_of.max()) <= 0.51 * widest / (levels - 1)


def test_a_sided_payload_by_hand():
    """Bounds, ranges and codes of four values, two on either side: 256 levels leave no doubt."""
    x = torch.tensor([1.0, -2.0, 3.0, -4.0])
    bits = torch.tensor([0b0101], dtype=torch.uint8)
    payload, bounds = reference.sided_quantize(x, bits, 5, 256, 2, 32, 1)
    assert bounds.tolist() == [[1, 3], [-4, -2]]
    above, below = payload[:4].tolist(), payload[4:].tolist()
    assert above[:2] == [0, 255]  # the range of the one group: all of the tile's
    assert above[2] in (0, 1)  # 1.0 is at level 0 before the noise
    assert above[3] == 255
    assert below[:2] == [0, 255]
    assert below[2] & 1 == 1  # -2 is the upper of two levels; -4 may go up by the noise alone
    assert len(below) == 3


@pytest.mark.parametrize("n", [1, 9, 2048, 2048 + 300])
@pytest.mark.parametrize("fold", layout.FOLDS[1:])
def test_lower_values_that_share_a_code(backend, n, fold):
    """mean + s_i z_k: by hand, from the noise of `dither` at 256 levels with no value above."""
    draw = torch.Generator().manual_seed(n)
    x, none = 3 + torch.randn(n, generator=draw), torch.zeros(n, dtype=torch.bool)
    bits, out = backend.pack_bits(none), torch.empty(n)
    settings = (5, 2, 256, 32, fold)
    payload, bounds = backend.sided_quantize(x, bits, *settings)
    backend.sided_dequantize(bits, payload, bounds, *settings, out)
    nbytes = 0
    for i in range(0, n, 2048):
        tile, held = x[i : i + 2048].double(), out[i : i + 2048].double()
        count = -(-len(tile) // fold)
        nbytes += 2 + count + 2 * -(-count // 32)
        u = uniform(5, i // 2048, 1, x.device)[0][: len(tile)]
        sign = 1 - 2 * ((u * 65536).int() & 1).double()
        mean = float(tile.mean())
        reach = float(tile.max() - tile.min())
        slack = reach / 255 + 2**-7 * abs(mean)  # of the mean: in 255ths, and then in bf16
        z = torch.zeros(count * fold, dtype=torch.float64)
        z[: len(tile)] = sign * (tile - mean)
        z = z.view(fold, count).sum(0)
        step = float(z.max() - z.min() + 2 * fold * slack) * (1 + 2**-6) / 255
        expected = mean + sign * z.repeat(fold)[: len(tile)]
        assert float((held - expected).abs().max()) <= step + (fold + 1) * slack
    assert len(payload) == nbytes


@pytest.mark.parametrize("fold", layout.FOLDS[1:])
def test_what_shares_a_code_is_right_on_average(backend, fold):
    draw = torch.Generator().manual_seed(fold)
    x, above = torch.randn(600, generator=draw), torch.rand(600, generator=draw) < 0.3
    bits, seeds = backend.pack_bits(above), 12 if backend.__name__.endswith("triton") else 200
    errors = torch.empty(seeds, 600)
    for seed in range(seeds):
        stored = backend.sided_quantize(x, bits, seed, 4, 4, 32, fold)
        backend.sided_dequantize(bits, *stored, seed, 4, 4, 32, fold, out := torch.empty(600))
        errors[seed] = out - x
    below = errors[:, ~above]
    # Values that share a code err together, so a few dozen sums make all of the average.
    assert float(below.mean(0).square().mean()) < 2 * float(below.square().mean()) / seeds
    assert float(below.square().mean()) < 1.5 * fold


def test_narrow_counts_what_does_not_fit(backend):
    x = torch.tensor([0, 127, 128, -128, -129, 10**12])
    y, lost = backend.narrow(x, torch.int8)
    assert int(lost) == 3
    assert y[[0, 1, 3]].tolist() == [0, 127, -128]
    assert not backend.narrow(x, torch.int64)[1]


def test_affine_by_hand(backend):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])  # channels 0 0 1 1 0 0 1
    backend.affine(
        x,
        torch.tensor([10.0, 100.0]),
        torch.tensor([1.0, 2.0]),
        2,
        torch.tensor([0b1111101], dtype=torch.uint8),
        x,
    )
    assert x.tolist() == [11, 0, 302, 402, 51, 61, 702]
