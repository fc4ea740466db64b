"""Every backend equals the reference on every output, to the last bit (but -0.0 is 0.0).

A tile is short, a group constant, a value not finite: a fast kernel treats each apart.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from elbowroom.kernels import layout, numba, ops, reference
from elbowroom.kernels.reference.bits import flags

LEVELS = (2, 3, 4, 5, 6, 7, 8, 16, 17, 64, 200, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = -0x1234_5678_9ABC_DEF0  # both halves have their top bit set
QUANTIZERS = ("group", "dither", "nonzero")


T = TypeVar("T")


class Backend(NamedTuple):
    module: ModuleType  # has the ops as functions
    device: str
    sizes: tuple[int, ...]

    @property
    def is_slow(self) -> bool:
        """Triton's interpreter takes up to a second a call."""
        return self.sizes[1] != 1

    def some(self, items: Sequence[T], turn: int) -> Sequence[T]:
        """All of them; in Triton's interpreter one, in turn."""
        return [items[turn % len(items)]] if self.is_slow else items


def triton_backend() -> Backend:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return Backend(ops, "cuda", BACKENDS["numba"]().sizes)
    from elbowroom.kernels import triton

    return Backend(triton, "cpu", (0, 63, 5000))


BACKENDS: dict[str, Callable[[], Backend]] = {
    "numba": lambda: Backend(numba, "cpu", (0, 1, 7, 63, 2047, 2048, 2049, 5000)),
    "triton": triton_backend,
}


@pytest.fixture(params=["numba", pytest.param("triton", marks=pytest.mark.sampled)])
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()


pytestmark = pytest.mark.usefixtures("poisoned_memory")


# --- calling an op on a backend and on the reference ---


def run(where: Any, device: str, op: str, *args: Any) -> tuple[Tensor, ...]:
    """What `op` returns, then what it wrote; other inputs must be untouched."""
    moved = [arg.to(device, copy=True) if isinstance(arg, Tensor) else arg for arg in args]
    returned = getattr(where, op)(*moved)
    written = WRITES.get(op)
    for i, (before, after) in enumerate(zip(args, moved, strict=True)):
        if isinstance(before, Tensor) and i != written:
            assert same_bits(after.cpu(), before), f"{op} changed its argument {i}"
    outputs = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    if written is not None:
        outputs += (moved[written],)
    return tuple(output.cpu() for output in outputs)


WRITES = {
    "unpack_bits": 2,
    "masked": 2,
    "times_bits": 3,
    "group_dequantize": 5,
    "dither_dequantize": 6,
    "nonzero_dequantize": 6,
    "division_dequantize": 10,
    "sided_dequantize": 8,
    "fp8_dequantize": 4,
    "comet_dequantize": 10,
    "affine": 5,
    "dropout": 3,
}


def on(backend: Backend) -> tuple[tuple[Any, str], ...]:
    """Where to run an op for comparison: there, and by the reference."""
    return (backend.module, backend.device), (reference, "cpu")


def assert_equal(backend: Backend, op: str, *args: Any) -> tuple[Tensor, ...]:
    """Run `op` on both; return the outputs."""
    expected = run(reference, "cpu", op, *args)
    got = run(backend.module, backend.device, op, *args)
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wrong = ~((a == b) | (a != a) & (b != b))
        places = wrong.nonzero()[:5].tolist()
        assert not wrong.any(), f"output {i} at {places}: {a[wrong][:5]}, not {b[wrong][:5]}"
    return expected


def assert_round_trip(
    backend: Backend, kind: str, x: Tensor, levels: int, group_size: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Quantize and dequantize on both; return what is stored and what is restored."""
    stored = assert_equal(backend, f"{kind}_quantize", x, SEED, levels, group_size)
    noise = () if kind == "group" else (SEED,)
    (restored,) = assert_equal(
        backend, f"{kind}_dequantize", *stored, *noise, levels, group_size, torch.empty_like(x)
    )
    return stored, restored


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# --- the cases ---


def normal(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


def thinned(x: Tensor, density: float) -> Tensor:
    chosen = torch.rand(x.numel(), generator=torch.Generator().manual_seed(1)) < density
    return torch.where(chosen, x, torch.zeros_like(x))


def cases(backend: Backend, levels: int) -> Iterator[tuple[int, torch.dtype, int]]:
    """Every size with every dtype (one, in Triton's interpreter); group sizes take turns."""
    offset = LEVELS.index(levels)
    for i, n in enumerate(backend.sizes):
        for k, dtype in enumerate(DTYPES):
            if not backend.is_slow or (i + k + offset) % 3 == 0:
                yield n, dtype, layout.GROUP_SIZES[(i + k + offset) % 4]


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_equals_the_reference(backend, kind, levels):
    for n, dtype, group_size in cases(backend, levels):
        x = normal(n, dtype)
        x = thinned(x, 0.4) if kind == "nonzero" else x
        stored, restored = assert_round_trip(backend, kind, x, levels, group_size)
        if kind != "nonzero":
            assert stored[0].numel() == layout.packed_nbytes(levels, n)
        assert restored.isfinite().all()


def awkward(name: str, dtype: torch.dtype) -> Tensor:
    """2200 finite values: one full tile and a short one."""
    x = normal(2200, torch.float32)
    steps = torch.arange(2200)
    largest = min(torch.finfo(dtype).max, 2.0**125) * 0.99
    made = {
        "constant": torch.full_like(x, 0.3),
        "constant by group": (steps // 32).float() * 0.7 - 3,
        "zeros": torch.zeros_like(x),
        "negative zeros": torch.full_like(x, -0.0),
        "both zeros": torch.where(x > 0, 0.0, -0.0),
        "sorted": x.sort().values,
        "ascending integers": steps.float(),
        "one outlier": torch.where(steps == 77, 1e4, x),
        "huge": x.clamp(-1, 1) * largest,
        "tiny": x * 1e-37,
        "subnormal": x * 3e-40,
        "smallest subnormal": torch.where(x > 0, 1.4e-45, -1.4e-45),
        "wide": x.sign() * torch.logspace(-37, 3, 2200),
        "below the smallest step": 1.0 + x * 1e-38,
    }
    return made[name].to(dtype)


AWKWARD = (
    "constant",
    "constant by group",
    "zeros",
    "negative zeros",
    "both zeros",
    "sorted",
    "ascending integers",
    "one outlier",
    "huge",
    "tiny",
    "subnormal",
    "smallest subnormal",
    "wide",
    "below the smallest step",
)


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("kind", [*QUANTIZERS, "e4m3", "e5m2"])
def test_awkward_values(backend, kind, name):
    for dtype in DTYPES:
        x = awkward(name, dtype)
        if kind in QUANTIZERS:
            _, restored = assert_round_trip(backend, kind, x, 4, 64)
        else:
            stored = assert_equal(backend, "fp8_quantize", x, 64, kind)
            (restored,) = assert_equal(
                backend, "fp8_dequantize", *stored, 64, kind, torch.empty_like(x)
            )
        assert restored.isfinite().all()
        if kind == "nonzero":
            assert torch.equal(restored == 0, x == 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**126, -(2.0**127)])
@pytest.mark.parametrize("kind", [*QUANTIZERS, "e4m3", "e5m2"])
def test_what_is_not_finite_poisons_its_range(backend, kind, bad):
    """The group (the tile, with dither) restores to NaN throughout, and nothing else is touched."""
    for dtype in (torch.float32, torch.float16):
        x = normal(6000, torch.float32).to(dtype)
        clean = x.clone()
        x[2048 + 100] = bad  # infinite in float16
        x[5999] = bad
        reach = layout.TILE if kind in ("dither", "nonzero") else 64
        poisoned = torch.zeros(6000, dtype=torch.bool)
        for i in (2148, 5999):
            poisoned[i // reach * reach : (i // reach + 1) * reach] = True
        if kind in QUANTIZERS:
            _, restored = assert_round_trip(backend, kind, x, 4, 64)
            _, expected = assert_round_trip(backend, kind, clean, 4, 64)
        else:
            restored, expected = (float8_round_trip(backend, y, kind) for y in (x, clean))
        assert restored[poisoned].isnan().all()
        assert torch.equal(restored[~poisoned], expected[~poisoned])


def float8_round_trip(backend: Backend, x: Tensor, fmt: str) -> Tensor:
    stored = assert_equal(backend, "fp8_quantize", x, 64, fmt)
    return assert_equal(backend, "fp8_dequantize", *stored, 64, fmt, torch.empty_like(x))[0]


@pytest.mark.parametrize("density", [0.0, 0.001, 0.5, 1.0])
@pytest.mark.parametrize("levels", [3, 4, 7])
def test_nonzero_at_every_density(backend, levels, density):
    for dtype in DTYPES:
        x = thinned(normal(5000, dtype), density)
        (bits, _, _), restored = assert_round_trip(backend, "nonzero", x, levels, 32)
        assert torch.equal(restored != 0, x != 0)
        assert torch.equal(bits, reference.pack_bits(x))


@pytest.mark.parametrize("missing", [1, 400, None])
def test_triton_reads_nothing_beyond_a_short_payload(missing):
    """The others raise; here the host would have to wait. What lies behind makes no difference."""
    backend = triton_backend()
    x = thinned(normal(5000, torch.float32), 0.5)  # three tiles
    bits, payload, bounds = reference.nonzero_quantize(x, SEED, 4, 64)
    tails = (SEED, 4, 64)
    whole = torch.empty_like(x)
    reference.nonzero_dequantize(bits, payload, bounds, *tails, whole)
    n = 0 if missing is None else len(payload) - missing
    restored = []
    for behind in (0, 255):
        memory = payload.clone()
        memory[n:] = behind
        short = memory.to(backend.device)[:n]
        args = bits.to(backend.device), short, bounds.to(backend.device), *tails
        out = torch.empty_like(x, device=backend.device)
        backend.module.nonzero_dequantize(*args, out)
        restored.append(out.cpu())
    assert same_bits(*restored)
    kept = {1: 4096, 400: 2048, None: 0}[missing]  # elements of the tiles that are not cut
    assert torch.equal(restored[0][:kept], whole[:kept])
    assert torch.equal(restored[0][kept:] == 0, x[kept:] == 0)
    assert restored[0][kept:][x[kept:] != 0].isnan().all()
    with pytest.raises(ValueError, match="bytes of payload"):
        numba.nonzero_dequantize(bits, payload[:n], bounds, *tails, whole)


MAPS = (  # outer, rows, columns, inner
    (0, 5, 7, 1),
    (2, 16, 24, 1),
    (3, 7, 7, 1),
    (2, 17, 41, 1),
    (1, 1, 5000, 1),
    (3, 1, 333, 1),
    (2, 5, 14, 9),
    (1, 30, 21, 3),
    (1, 9, 3, 130),
    (2, 1, 70, 5),
    (1, 1, 150, 70),
    (4, 1, 1, 300),
)


def assert_maps(
    backend: Backend, x: Tensor, levels: int, block: int, reach: int, maps: tuple[int, ...]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Quantize and dequantize maps on both; return what is stored, and what either way restores."""
    how = levels, block, reach, list(maps)
    stored = assert_equal(backend, "division_quantize", x, SEED, *how)
    restored = []
    for dither in (False, True):
        out = torch.empty_like(x)
        restored += assert_equal(backend, "division_dequantize", *stored, SEED, *how, dither, out)
    return stored, restored


@pytest.mark.parametrize("maps", MAPS)
def test_division_equals_the_reference(backend, maps):
    n = math.prod(maps)
    for i, dtype in enumerate(DTYPES):
        for block, reach, levels in (((8, 0, 4),), ((4, 1, 8), (16, 0, 2)), ((8, 2, 256),))[i]:
            stored, restored = assert_maps(backend, normal(n, dtype), levels, block, reach, maps)
            assert stored[0].numel() == layout.packed_nbytes(levels, n)
            assert all(y.isfinite().all() for y in restored)


@pytest.mark.parametrize("name", AWKWARD)
def test_division_with_awkward_values(backend, name):
    geometries = ((1, 44, 50, 1), (2, 10, 11, 10), (1, 1, 2200, 1))
    for maps, dtype in zip(geometries, DTYPES, strict=True):
        _, restored = assert_maps(backend, awkward(name, dtype), 4, 8, 0, maps)
        assert all(y.isfinite().all() for y in restored)


GEOMETRIES = (((3, 40, 50, 1), 0), ((3, 40, 50, 1), 1), ((1, 40, 50, 3), 0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**126, -(2.0**127)])
def test_what_is_not_finite_poisons_its_map(backend, bad):
    """Or its range; in channels_last too, where maps lie between each other."""
    for i, (maps, reach) in enumerate(GEOMETRIES):
        for dtype in backend.some((torch.float32, torch.float16), i + (bad < 0)):
            x = normal(6000, torch.float32).to(dtype)
            clean = x.clone()
            poisoned = torch.zeros(maps, dtype=torch.bool)
            for o, r, c, i in ((0, 0, 0, 0), (maps[0] - 1, 39, 49, maps[3] - 1)):
                x.view(maps)[o, r, c, i] = bad  # infinite in float16
                top, left = (r // 8 * 8, c // 8 * 8) if reach else (0, 0)
                high, wide = (8, 8) if reach else (40, 50)
                poisoned[o, top : top + high, left : left + wide, i] = True
            poisoned = poisoned.view(-1)
            _, restored = assert_maps(backend, x, 4, 8, reach, maps)
            _, expected = assert_maps(backend, clean, 4, 8, reach, maps)
            for y, z in zip(restored, expected, strict=True):
                assert y[poisoned].isnan().all()
                assert torch.equal(y[~poisoned], z[~poisoned])


# --- two sides ---

SIDES = ((4, 2), (2, 4), (8, 3), (2, 2), (16, 5), (256, 128), (6, 7), (64, 200))


def chosen_bits(n: int, density: float) -> Tensor:
    """A bitmap that has nothing to do with the values: any is right."""
    return reference.pack_bits(thinned(torch.ones(n), density))


def sided_round_trip(
    backend: Backend,
    x: Tensor,
    bits: Tensor,
    upper: int,
    lower: int,
    group_size: int,
    fold: int = 1,
) -> tuple[tuple[Tensor, ...], Tensor]:
    settings = (SEED, upper, lower, group_size, fold)
    stored = assert_equal(backend, "sided_quantize", x, bits, *settings)
    (restored,) = assert_equal(
        backend, "sided_dequantize", bits, *stored, *settings, torch.empty_like(x)
    )
    return stored, restored


@pytest.mark.parametrize(("upper", "lower"), SIDES)
def test_sided_equals_the_reference(backend, upper, lower):
    offset = SIDES.index((upper, lower))
    for i, n in enumerate(backend.sizes):
        for k, dtype in enumerate(DTYPES):
            if backend.is_slow and (i + k + offset) % 3:
                continue
            x, group_size = normal(n, dtype), layout.GROUP_SIZES[(i + k + offset) % 4]
            for bits in backend.some((reference.pack_bits(x > 0), chosen_bits(n, 0.3)), i + offset):
                (_, bounds), restored = sided_round_trip(backend, x, bits, upper, lower, group_size)
                assert restored.isfinite().all()
                assert bounds.isfinite().all()


@pytest.mark.parametrize("fold", layout.FOLDS[1:])
def test_sided_with_shared_codes_equals_the_reference(backend, fold):
    offset = layout.FOLDS.index(fold)
    for i, n in enumerate(backend.sizes):
        for k, dtype in enumerate(DTYPES):
            if backend.is_slow and (i + k + offset) % 3:
                continue
            x, group_size = normal(n, dtype), layout.GROUP_SIZES[(i + k + offset) % 4]
            upper, lower = SIDES[(i + k) % len(SIDES)]
            bits = chosen_bits(n, (0.0, 0.3, 0.9, 1.0)[(i + offset) % 4])
            _, restored = sided_round_trip(backend, x, bits, upper, lower, group_size, fold)
            assert restored.isfinite().all()


@pytest.mark.parametrize("density", [0.0, 0.001, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sided_at_every_density(backend, dtype, density):
    """One side, or both, may be empty: its bounds are 0, and it takes no byte."""
    n = 5000
    x, bits = normal(n, dtype), chosen_bits(n, density)
    for upper, lower in backend.some(((4, 2), (3, 256)), DTYPES.index(dtype)):
        (payload, bounds), restored = sided_round_trip(backend, x, bits, upper, lower, 32)
        for i, tile in enumerate(flags(bits, n).split(layout.TILE)):
            for side, held in enumerate((tile, ~tile)):
                assert bool(held.any()) == bool(bounds[2 * i + side].any())
        if density in (0.0, 1.0):
            levels = upper if density else lower
            assert len(payload) == layout.packed_nbytes(levels, n) + 2 * layout.groups(n, 32)
        assert restored.isfinite().all()


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_values_on_two_sides(backend, name):
    turn = AWKWARD.index(name)
    for dtype in backend.some(DTYPES, turn):
        x = awkward(name, dtype)
        for bits in backend.some((reference.pack_bits(x > 0), chosen_bits(len(x), 0.7)), turn):
            for fold in (1, 8):  # sums of huge values may be beyond what has a code
                _, restored = sided_round_trip(backend, x, bits, 4, 3, 64, fold)
                assert restored.isfinite().all() or (fold > 1 and name == "huge")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**126])
@pytest.mark.parametrize("fold", [1, 4])
def test_what_is_not_finite_poisons_its_side(backend, bad, fold):
    for dtype in backend.some((torch.float32, torch.float16), int(bad == float("inf"))):
        x = normal(6000, torch.float32).to(dtype)
        bits = chosen_bits(6000, 0.5)
        _, expected = sided_round_trip(backend, x, bits, 4, 2, 64, fold)
        above, tile = flags(bits, 6000), torch.arange(6000) // layout.TILE
        up, low = (int((side & (tile == 1)).nonzero()[9]) for side in (above, ~above))
        for place in (up, low):
            hurt = x.clone()
            hurt[place] = bad
            poisoned = (tile == 1) & (above == above[place])
            _, restored = sided_round_trip(backend, hurt, bits, 4, 2, 64, fold)
            assert restored[poisoned].isnan().all()
            assert torch.equal(restored[~poisoned], expected[~poisoned])


@pytest.mark.parametrize("n", [1, 7, 2047, 2049, 5001])
def test_sided_ignores_bits_beyond_the_last_element(backend, n):
    x, clean = normal(n, torch.float32), chosen_bits(n, 0.5)
    stray = clean.clone()
    stray[-1] |= 0xFF << (n % 8) & 0xFF
    stored = [sided_round_trip(backend, x, bits, 8, 3, 32) for bits in (clean, stray)]
    assert same_bits(stored[0][0][0], stored[1][0][0])
    assert same_bits(stored[0][1], stored[1][1])


@pytest.mark.parametrize("missing", [1, 400, None])
def test_triton_reads_nothing_beyond_a_short_payload_of_two_sides(missing):
    backend, settings = triton_backend(), (SEED, 4, 2, 64, 4)
    x, bits = normal(5000, torch.float32), chosen_bits(5000, 0.5)  # three tiles
    payload, bounds = reference.sided_quantize(x, bits, *settings)
    whole = torch.empty_like(x)
    reference.sided_dequantize(bits, payload, bounds, *settings, whole)
    n = 0 if missing is None else len(payload) - missing
    restored = []
    for behind in (0, 255):
        memory = payload.clone()
        memory[n:] = behind
        args = (bits.to(backend.device), memory.to(backend.device)[:n], bounds.to(backend.device))
        out = torch.empty_like(x, device=backend.device)
        backend.module.sided_dequantize(*args, *settings, out)
        restored.append(out.cpu())
    assert same_bits(*restored)
    kept = {1: 4096, 400: 2048, None: 0}[missing]  # elements of the tiles that are not cut
    assert torch.equal(restored[0][:kept], whole[:kept])
    assert restored[0][kept:].isnan().all()
    for where in (reference, numba):
        for wrong in (payload[:n], torch.cat([payload, payload[:1]])):
            with pytest.raises(ValueError, match="bytes of payload, as the bitmap says; got"):
                where.sided_dequantize(bits, wrong, bounds, *settings, whole)


def test_the_seed_decides_on_two_sides(backend):
    x, bits = normal(3000, torch.float32), chosen_bits(3000, 0.5)
    seeds = (0, 1, -1, 2**32, 2**63 - 1, -(2**63))
    made = [
        run(backend.module, backend.device, "sided_quantize", x, bits, seed, 4, 4, 64, 1)[0]
        for seed in seeds
    ]
    for a, b in itertools.combinations(made, 2):
        assert not torch.equal(a, b)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
def test_dropout_equals_the_reference(backend, p):
    for n, dtype in itertools.product(backend.sizes, DTYPES):
        x = normal(n, dtype)
        assert_equal(backend, "dropout", x, SEED, p, torch.empty_like(x))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("group_size", layout.GROUP_SIZES)
def test_fp8_equals_the_reference(backend, fmt, group_size):
    for n, dtype in itertools.product(backend.sizes, DTYPES):
        x = normal(n, dtype)
        stored = assert_equal(backend, "fp8_quantize", x, group_size, fmt)
        assert_equal(backend, "fp8_dequantize", *stored, group_size, fmt, torch.empty_like(x))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_fp8_restores_all_codes(backend, fmt):
    """Also those that the quantizer never makes: Inf and NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    scale = torch.full((8,), 0.75, dtype=torch.bfloat16)
    for dtype in DTYPES:
        assert_equal(
            backend, "fp8_dequantize", codes, scale, 32, fmt, torch.empty(256, dtype=dtype)
        )


@pytest.mark.parametrize(
    "dtype",
    [*DTYPES, torch.float64, torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64],
)
def test_bits_equal_the_reference(backend, dtype):
    for n in backend.sizes:
        x = (normal(n, torch.float32) * 2).to(dtype)
        if dtype.is_floating_point and n:
            x[::3] = 0.0
            x[1::3] = -0.0
            x[-1] = float("nan")  # not zero
        (bits,) = assert_equal(backend, "pack_bits", x)
        for value in (1.0, 1.25):
            assert_equal(backend, "unpack_bits", bits, value, torch.empty_like(x))
        args = x, bits, torch.empty_like(x)
        for got, expected in zip(*(run(*w, "masked", *args) for w in on(backend)), strict=True):
            assert same_bits(got, expected)  # signs of zeros and payloads of NaN among them
        if dtype in DTYPES and hasattr(backend.module, "times_bits"):
            args = x, bits, 1 / 0.9, torch.empty_like(x)
            both = zip(*(run(*w, "times_bits", *args) for w in on(backend)), strict=True)
            assert all(same_bits(got.nan_to_num(), right.nan_to_num()) for got, right in both)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("source", [torch.int64, torch.int32, torch.int16])
def test_narrow_equals_the_reference(backend, source, dtype):
    info = torch.iinfo(source)
    for n in backend.sizes:
        x = torch.randint(-300, 300, (n,), generator=torch.Generator().manual_seed(n)).to(source)
        x[: n // 2] %= 100
        if n > 2:
            x[0], x[1] = info.min, info.max
        assert_equal(backend, "narrow", x, dtype)


@pytest.mark.parametrize("inner", [1, 7, 4096])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_equals_the_reference(backend, dtype, masked, inner):
    scale, shift = normal(5, torch.float32), normal(6, torch.float32)[:5].contiguous()
    for n in backend.sizes:
        x = normal(n, dtype)
        if n > 50:
            x[40], x[41], x[42] = float("nan"), float("inf"), -0.0
        bits = reference.pack_bits(normal(n + 1, torch.float32)[:n].relu()) if masked else None
        assert_equal(backend, "affine", x, scale, shift, inner, bits, torch.empty_like(x))


# --- an affine in the same pass ---

MAPPED = (*QUANTIZERS, "sided")
CHANNELS = ((5, 1), (1, 1), (3, 7), (2, 2048), (3, 4096), (700, 1))  # how many, inner


def by_channel(count: int) -> tuple[Tensor, Tensor]:
    """scale, shift [count], of both signs."""
    return normal(count, torch.float32) * 3, normal(count + 1, torch.float32)[:count].clone()


def mapped_round_trip(
    backend: Backend, kind: str, x: Tensor, by: tuple[Any, ...], back: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Quantize x mapped `by` scale, shift, inner; dequantize `back` by those and a mask."""
    bits = (chosen_bits(x.numel(), 0.6),) if kind == "sided" else ()
    levels = (4, 3, 64, 4) if kind == "sided" else (4, 64)
    stored = assert_equal(backend, f"{kind}_quantize", x, *bits, SEED, *levels, *by)
    seed = () if kind == "group" else (SEED,)
    args = (*bits, *stored, *seed, *levels, torch.empty_like(x), *back)
    return stored, assert_equal(backend, f"{kind}_dequantize", *args)[0]


@pytest.mark.parametrize(("count", "inner"), CHANNELS)
@pytest.mark.parametrize("kind", MAPPED)
def test_mapped_equals_the_reference(backend, kind, count, inner):
    scale, shift = by_channel(count)
    for i, n in enumerate(backend.sizes):
        dtype = DTYPES[(i + count) % 3]
        x = normal(n, dtype)
        mask = chosen_bits(n, 0.5)
        if kind == "nonzero":
            x, shift = thinned(x, 0.4), shift * 0
        by = scale, shift, inner
        _, restored = mapped_round_trip(backend, kind, x, by, (*by, mask))
        assert not restored[~flags(mask, n)].any()
        others = (by, (*by, None)), ((None, None, 1), (None, None, 1, mask))
        for there, back in backend.some(others, count):
            mapped_round_trip(backend, kind, x, there, back)


@pytest.mark.parametrize(
    ("rows", "count", "inner", "share"),
    [(3, 5, 1, 400), (7, 4, 3, 121), (900, 2, 1, 4), (2, 3, 2048, 5000)],
)
@pytest.mark.parametrize("kind", MAPPED)
def test_rows_of_channels_equal_the_reference(backend, kind, rows, count, inner, share):
    """Equal shares of the tensor have channels of their own."""
    scale, shift = by_channel(rows * count)
    n = rows * share
    x, mask = normal(n, DTYPES[count % 3]), chosen_bits(n, 0.5)
    if kind == "nonzero":
        x, shift = thinned(x, 0.4), shift * 0
    by = scale.view(rows, count), shift.view(rows, count), inner
    mapped_round_trip(backend, kind, x, by, (*by, mask))
    assert_equal(backend, "affine", x, *by, mask, torch.empty_like(x))


def test_a_row_of_channels_serves_its_share():
    """By the plainest means: each share on its own."""
    x, (scale, shift) = normal(3 * 70, torch.float32), by_channel(3 * 5)
    out, apart = torch.empty_like(x), torch.empty_like(x)
    numba.affine(x, scale.view(3, 5), shift.view(3, 5), 2, None, out)
    for i in range(3):
        of_row = scale.view(3, 5)[i], shift.view(3, 5)[i]
        numba.affine(x.view(3, 70)[i], *of_row, 2, None, apart.view(3, 70)[i])
    assert torch.equal(out, apart)


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("kind", MAPPED)
def test_mapped_awkward_values(backend, kind, name):
    """Among them those whose image overflows, and those that the way back makes 0."""
    scale, shift = torch.tensor([2.0, -1e-4, 3e38]), torch.tensor([0.0, 0.5, 0.0])
    for k, dtype in enumerate(DTYPES):
        if not backend.is_slow or (AWKWARD.index(name) + k) % 3 == 0:
            mapped_round_trip(
                backend, kind, awkward(name, dtype), (scale, shift, 9), (1 / scale, shift, 9, None)
            )


@pytest.mark.parametrize("kind", MAPPED)
def test_one_pass_gives_the_bits_of_two(kind):
    """In float32; a float16 or bfloat16 tensor is rounded once less."""
    x, bits, inner = normal(5000, torch.float32), chosen_bits(5000, 0.5), 7
    scale, shift = by_channel(3)
    sides, levels = ((bits,), (4, 3, 64, 4)) if kind == "sided" else ((), (4, 64))
    quantize, dequantize = (getattr(numba, f"{kind}_{verb}") for verb in ("quantize", "dequantize"))
    y, one, two = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    numba.affine(x, scale, shift, inner, None, y)
    apart = quantize(y, *sides, SEED, *levels)
    stored = quantize(x, *sides, SEED, *levels, scale, shift, inner)
    assert all(same_bits(a, b) for a, b in zip(stored, apart, strict=True))
    seed = () if kind == "group" else (SEED,)
    dequantize(*sides, *stored, *seed, *levels, one, scale, shift, inner, bits)
    dequantize(*sides, *stored, *seed, *levels, two)
    numba.affine(two, scale, shift, inner, bits, two)
    assert torch.equal(one, two)


def test_nonzero_restores_no_zero_however_small_the_scale(backend):
    x = thinned(normal(3000, torch.float32), 0.5)
    for dtype, scale in ((torch.float32, 1e-38), (torch.float16, 1e-7)):
        back = torch.tensor([scale]), torch.zeros(1), 1, None
        by = torch.tensor([1.0]), torch.zeros(1), 1
        _, restored = mapped_round_trip(backend, "nonzero", x.to(dtype), by, back)
        assert torch.equal(restored != 0, x.to(dtype) != 0)


def bounded(bound: float, rounding: str = "dither") -> Tensor:
    """A grid of `comet`: bound, step, 1 / step."""
    step = bound * (1 if rounding == "stochastic" else 2) * 0.999
    return torch.tensor([bound * (1 - 2**-22), step, 1 / step])


PREDICTED = [(0, 0, 0), (1, layout.TILE, 1), (5, 7, 1), (4, 6, 3)]


def maps_for(backend: Backend, maps: tuple[int, int, int]) -> tuple[int, int, int]:
    """Fewer and larger ones for Triton's interpreter, which takes long for each."""
    rows, columns, inner = maps
    return (rows * 3, columns * 16, inner) if backend.is_slow and rows > 1 else maps


def assert_bounded(backend, x, bound, rounding="dither", aware=False, maps=(0, 0, 0)):
    """Quantize and dequantize on both: equal, within the bound, zeros and no others exact."""
    settings, grid = (SEED, rounding), bounded(bound, rounding)
    stored = assert_equal(backend, "comet_quantize", x, grid, *settings, aware, *maps)
    out = torch.empty_like(x)
    (restored,) = assert_equal(backend, "comet_dequantize", *stored, grid, *settings, *maps, out)
    error = (restored.double() - x.double()).abs()
    assert bool((error[x.isfinite()] <= bound).all())
    assert torch.equal(restored[~x.isfinite()].isnan(), x[~x.isfinite()].isnan())
    assert torch.equal(restored != 0, x != 0)
    return stored[1]


def forms(headers: Tensor) -> set[str]:
    """Which forms of a block occur: see the reference."""
    found = set()
    for header in headers.tolist():
        special = {0: "zeros", 0x20: "all 0", 0x40: "masked, all 0", 0x80: "raw"}
        kind = "masked" if header & 0x40 else "filled" if header & 0x80 else "full"
        found.add(special.get(header, kind + " zigzag" * bool(header & 0x20)))
    return found


@pytest.mark.parametrize("maps", PREDICTED, ids=str)
@pytest.mark.parametrize("rounding", ["dither", "stochastic", "nearest"])
def test_comet_equals_the_reference(backend, rounding, maps):
    if backend.is_slow and rounding != "dither" and maps[0] > 1:
        pytest.skip("slow in the interpreter, and prediction does not depend on the rounding")
    maps = maps_for(backend, maps)
    for i, n in enumerate(backend.sizes):
        whole = n if maps[0] < 2 else n // (maps[0] * maps[1] * maps[2]) * maps[0] * maps[1]
        whole = whole * (maps[2] if maps[0] > 1 else 1)
        for k, dtype in enumerate(DTYPES):
            if not backend.is_slow or (i + k) % 3 == 0:
                x = thinned(normal(whole, dtype), (0.4, 0.97)[i % 2])
                assert_bounded(backend, x, (0.03, 0.3)[(i + k) % 2], rounding, i % 2 == 0, maps)


def mixed(dtype: torch.dtype) -> Tensor:
    """[2100] with blocks of every form."""
    x = normal(2100, torch.float32).abs() * 0.3 + 0.01
    x[:64] = 0
    x[64:96] *= 1e-5  # all q = 0
    x[96:128] *= 1e-5
    x[96:112] = 0
    x[128:256:2] = 0
    x[192:256] *= -1
    x[300], x[330] = 0, 0
    x[352:384] *= -1
    x[360] = 0
    x[400:420] *= -1
    x[512], x[545], x[600] = float("nan"), float("inf"), 4e4
    x[700:900] = 0
    x[888] = 3e-5
    return x.to(dtype)


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_comet_in_every_form_of_a_block(backend, dtype, aware):
    found = set()
    for maps in ((0, 0, 0), (7, 100, 3)):
        found |= forms(assert_bounded(backend, mixed(dtype), 0.02, "dither", aware, maps))
    wanted = {"zeros", "all 0", "masked", "masked zigzag", "full", "full zigzag", "raw"}
    wanted |= {"masked, all 0"} if aware else {"filled", "filled zigzag"}
    assert found == wanted


@pytest.mark.parametrize("name", AWKWARD)
def test_comet_on_awkward_values(backend, name):
    if backend.is_slow and AWKWARD.index(name) % 3:
        pytest.skip("slow in the interpreter: a third of them")
    for k, dtype in enumerate(DTYPES):
        if not backend.is_slow or (AWKWARD.index(name) + k) % 3 == 0:
            x = awkward(name, dtype)
            bounds = (1e-3, float(x.double().abs().max()) * 1e-4 + 1e-30)
            for bound in bounds if not backend.is_slow else bounds[k % 2 :][:1]:
                assert_bounded(backend, x, bound, maps=maps_for(backend, PREDICTED[k]))


def test_comet_with_wide_codes(backend):
    """Codes of 8 bits and more: bytes first, then what is left."""
    x = normal(2048, torch.float32)
    for bound in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        headers = assert_bounded(backend, x, bound)
        assert bool((headers == 0x80).any()) == (bound <= 1e-5)


@pytest.mark.parametrize("kind", [*QUANTIZERS, "division"])
def test_the_seed_decides(backend, kind):
    x = normal(3000, torch.float32)
    how = (4, 8, 0, [1, 50, 60, 1]) if kind == "division" else (4, 64)
    seeds = (0, 1, -1, 2**32, 2**63 - 1, -(2**63))  # 1 << 32 differs from 0 in the upper half alone
    bytes_of = {}
    for seed in seeds:
        stored = run(backend.module, backend.device, f"{kind}_quantize", x, seed, *how)
        again = run(backend.module, backend.device, f"{kind}_quantize", x, seed, *how)
        assert all(same_bits(a, b) for a, b in zip(stored, again, strict=True))
        bytes_of[seed] = stored[1 if kind == "nonzero" else 0]
    for a, b in itertools.combinations(seeds, 2):
        assert not torch.equal(bytes_of[a], bytes_of[b]), (a, b)


def test_triton_repeats_the_layout():
    """What compiled code computes on constants is what `layout.py` says."""
    pytest.importorskip("triton")
    from elbowroom.kernels.triton import device

    for levels in range(2, 257):
        for n in (0, 1, 63, 2047, 2048):
            assert device.codes_nbytes(levels, n) == layout.codes_nbytes(levels, n)
        found = [
            (device.per_byte(levels, i), device.shift(levels, i))
            for i in range(device.parts(levels))
        ]
        if levels in layout.RADIX:
            assert found == [(layout.RADIX[levels], 0)]
        else:
            assert found == [(s.per, s.shift) for s in layout.segments(levels)]
