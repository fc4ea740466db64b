"""The kernels of fdsr: all equal the reference to the last bit, and the reference an oracle.

Triton in its interpreter, which takes 0.2 to 1 s for a round trip: fewer shapes.
"""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.fft import dctn
from torch import Tensor

from elbowroom.codecs.facts import Maps
from elbowroom.kernels import numba, ops, reference
from elbowroom.kernels.bands import BLOCKS, PLANES, SIGNS, bands_of, best_block, cosines, mixed
from elbowroom.kernels.layout import codes_nbytes
from elbowroom.kernels.reference import fdsr, transform

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = -0x1234_5678_9ABC_DEF0
SETTINGS = {  # levels, kept tiles, dither
    "dither": ((16, 3), 0, True),
    "dither runs": ((64, 4, 8, 4, 2), 0, True),
    "dither reuse": ((32, 8, 4, 0), 32, True),
    "nearest": ((63, 15, 5, 3, 0), 0, False),
    "half reused": ((63, 15, 7, 0), 16, False),
    "all reused": ((255, 15, 0), 10**9, False),
    "mean only": ((255, 0), 0, False),
    "mean, reused": ((255, 0), 7, False),
    "one level for all": ((3,), 0, False),
}
SHAPES = ((2, 3, 16, 24), (1, 2, 13, 11), (2, 33, 4, 5), (3, 5, 28, 28), (1, 1, 4, 4))
SIGNS_16 = "-++-+++-+-++++--"
PLANES_3 = [
    (16, 33, 107),
    (-8, -11, 12),
    (94, 67, -39),
    (2, -17, -53),
    (-43, 22, -36),
    (43, -70, -3),
    (-17, -5, -42),
    (-21, 44, 4),
]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def maps_of(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> tuple[Tensor, list[int]]:
    """Smooth-ish maps as a flat tensor, and how they lie."""
    draw = torch.Generator().manual_seed(shape[-1])
    x = (torch.randn(shape, generator=draw).cumsum(-1) * 2).to(dtype)
    if last:
        x = x.to(memory_format=torch.channels_last)
    return x.as_strided((x.numel(),), (1,)), list(Maps.of(tuple(x.shape), x.stride()))


def arguments(name: str, maps: list[int], block: int) -> tuple:
    levels, kept, dither = SETTINGS[name]
    lanes = bands_of(block, levels).lanes
    kept = min(kept, lanes) if bands_of(block, levels).rest else 0
    return SEED, maps, block, levels, kept, dither


def triton_backend() -> ModuleType:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return ops
    from elbowroom.kernels import triton

    return triton


BACKENDS: dict[str, Callable[[], ModuleType]] = {"numba": lambda: numba, "triton": triton_backend}


@pytest.fixture(params=["numba", pytest.param("triton", marks=pytest.mark.sampled)])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    return BACKENDS[request.param]()


def both(backend: ModuleType, x: Tensor, settings: tuple) -> tuple[tuple[Tensor, ...], Tensor]:
    """Quantize and dequantize on both, to the same bits. What is stored, and restored."""
    device = "cuda" if backend is ops else "cpu"
    stored = reference.fdsr_quantize(x, *settings)
    twin = (t.cpu() for t in backend.fdsr_quantize(x.to(device), *settings))
    outs = torch.empty_like(x), torch.empty_like(x, device=device)
    reference.fdsr_dequantize(*stored, *settings, outs[0])
    backend.fdsr_dequantize(*(t.to(device) for t in stored), *settings, outs[1])
    for a, b in zip((*stored, outs[0]), (*twin, outs[1].cpu()), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert bool(((a == b) | (a != a) & (b != b)).all())
    return stored, outs[0]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("block", BLOCKS)
def test_equals_the_reference(backend, block, name):
    shapes = SHAPES if backend is numba else SHAPES[:2]
    for i, shape in enumerate(shapes):
        dtype = DTYPES[(i + block) % 3]
        for last in (False, True) if backend is numba else (i == 1,):
            x, maps = maps_of(shape, dtype, last)
            before = x.clone()
            _, restored = both(backend, x, arguments(name, maps, block))
            assert torch.equal(x, before)
            assert bool(restored.isfinite().all())


@pytest.mark.parametrize("name", ["dither", "half reused"])
@pytest.mark.parametrize(
    "kind", ["constant", "zeros", "negative zeros", "huge", "tiny", "subnormal", "one outlier"]
)
def test_awkward_values(backend, kind, name):
    for dtype in DTYPES if backend is numba else DTYPES[:1]:
        x, maps = maps_of((3, 5, 16, 16), torch.float32, last=False)
        most = min(torch.finfo(dtype).max, 2.0**117)
        x = {
            "constant": torch.full_like(x, 0.3),
            "zeros": torch.zeros_like(x),
            "negative zeros": torch.full_like(x, -0.0),
            "huge": x.clamp(-1, 1) * most,
            "tiny": x * 1e-37,
            "subnormal": x * 3e-40,
            "one outlier": torch.where(torch.arange(len(x)) == 77, 1e4, x),
        }[kind].to(dtype)
        _, y = both(backend, x, arguments(name, maps, 8))
        assert bool(y.isfinite().all())
        if kind in ("zeros", "negative zeros"):
            assert bool((y == 0).all())
        if kind == "constant":
            assert float((y.float() - 0.3).abs().max()) < 0.3 * 2**-7


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e37])
@pytest.mark.parametrize("name", ["dither", "half reused"])
def test_what_is_not_finite_poisons_its_group(backend, name, bad):
    x, maps = maps_of((1, 2, 64, 64), torch.float32, last=False)  # 64 tiles a plane, 2 groups
    clean = x.clone()
    x[64 * 64 + 5] = bad
    _, y = both(backend, x, arguments(name, maps, 8))
    poisoned = torch.zeros(len(x), dtype=torch.bool)
    poisoned[64 * 64 : 64 * 64 + 32 * 64] = True
    assert bool(y[poisoned].isnan().all())
    assert bool(y[~poisoned].isfinite().all())
    if name == "dither":  # the codebook is common to all groups
        _, expected = both(backend, clean, arguments(name, maps, 8))
        assert torch.equal(y[~poisoned], expected[~poisoned])


def test_the_largest_sum_of_squares(backend):
    """All of the last band at absmax: 36 squares of 2^26, which do not fit 31 bits."""
    settings = arguments("dither", [1, 8, 256, 1], 8)
    b = bands_of(8, (16, 3))
    y = torch.zeros(1, 64, 32)
    y[:, b.band.index(7) :] = 1.0
    x = transform.elements(y, b).view(8, 8, 32).permute(0, 2, 1).reshape(-1)
    (_, scales, _), _ = both(backend, x, settings)
    assert abs(float(scales[0, 8]) - 1) < 0.01


@pytest.mark.parametrize("block", BLOCKS)
def test_the_transform_is_scipys(block):
    b = bands_of(block, (4,))
    x = torch.randn(3, block**2, b.lanes, generator=torch.Generator().manual_seed(0))
    y = transform.coefficients(x, b)
    tiles = x.view(3, block, block, -1).numpy().astype(np.float64)
    expected = dctn(tiles, axes=(1, 2), norm="ortho").reshape(3, block**2, -1)[:, list(b.order)]
    assert np.abs(y.numpy() - expected).max() < 1e-5
    assert float((transform.elements(y, b) - x).abs().max()) < 1e-5
    D = torch.tensor(cosines(block), dtype=torch.float64)
    assert float((D @ D.T - torch.eye(block)).abs().max()) < 1e-12


@pytest.mark.parametrize("levels", [(16, 3), (64, 4, 8, 4, 2), (8, 4, 0)])
@pytest.mark.parametrize("block", BLOCKS)
def test_mixing_is_orthonormal_and_leaves_the_mean(block, levels):
    b = bands_of(block, levels)
    z = torch.eye(block**2)[None, :, :]  # a lane a position
    m = transform.mix(z, b)[0]
    assert float((m @ m.T - torch.eye(block**2)).abs().max()) < 1e-5
    assert float((transform.unmix(m[None], b) - z).abs().max()) < 1e-5
    assert bool((m[0, 1:] == 0).all())
    for run in b.runs[1:]:  # no run reaches into another
        assert bool((m[run.start : run.stop, : run.start] == 0).all())
        assert bool((m[run.start : run.stop, run.stop :] == 0).all())
        covered = {p for s, size in mixed(run) for p in range(s, s + size)}
        assert covered == set(range(run.start, run.stop))


def test_a_payload_by_hand():
    """The layout that bands.py tells, added up for one setting."""
    b = bands_of(8, (63, 15, 7, 3, 3, 0))
    assert [run[:] for run in b.runs] == [(0, 1, 63), (1, 3, 15), (3, 6, 7), (6, 15, 3)]
    assert (b.coded, b.rest, b.bands, b.lanes, b.cell) == (15, 49, 4, 32, 1)
    codes = 24 + 2 * 16 + 3 * 12 + -(-9 * 32 // 5)
    assert codes_nbytes(63, 32) == 24
    assert b.nbytes(0) == codes + 32
    assert b.nbytes(16) == codes + 32 + 4 + 2 * 16
    assert b.nbytes(32) == codes + 32 + 2 * 32
    assert (b.scales(0), b.scales(16)) == (6, 7)


def test_gains_cover_their_range_and_round_up():
    values = torch.logspace(-2.9, 1.79, 5000)
    up = fdsr.gain_value(fdsr.gain_code(values, up=True))
    assert bool((up >= values).all())
    assert bool((up <= values * (1 + 2**-4)).all())
    near = fdsr.gain_value(fdsr.gain_code(values, up=False))
    assert bool(((near - values).abs() <= values * 2**-5).all())
    assert fdsr.gain_code(torch.tensor([0.0, 1e-30, 62.0]), up=True).tolist() == [0, 1, 255]


def test_tiles_fit_maps():
    assert [best_block(s, s) for s in (224, 112, 56, 28, 14, 7, 32, 16, 8, 4, 5, 12, 100)] == [
        *(8, 8, 8, 7, 7, 7, 8, 8, 8, 4, 7, 4, 8)
    ]


def test_the_constants_of_the_format():
    """A change would turn every payload of an earlier release into noise."""
    assert "".join("-" if s < 0 else "+" for s in SIGNS[:16]) == SIGNS_16
    assert [row[:3] for row in PLANES] == PLANES_3
