"""Payloads in memory of a fixed size: the bytes are those of a payload as long as it must be.

Whatever does not fit is in the spill, and what is restored has the same bits.
"""

import pytest
import torch
from torch import Tensor

from elbowroom.codecs import Comet, Dither, Facts, Sided
from elbowroom.kernels import layout, numba, ops, reference
from elbowroom.kernels.fakes import would_wait

N = 2 * layout.TILE + 900
SEED = -77
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRID = torch.tensor([0.05, 0.099, 1 / 0.099])

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def values(dtype: torch.dtype) -> Tensor:
    """Tiles of which one is all zeros, one has none, and one is mixed; one block is not finite."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(N, generator=draw) * (torch.rand(N, generator=draw) < 0.4)
    x[: layout.TILE] = 0
    x[layout.TILE : 2 * layout.TILE] = 1 + torch.arange(layout.TILE) / 64
    x[-40] = torch.inf
    return x.to(dtype)


def channels(mapped: bool) -> tuple[object, ...]:
    return (torch.tensor([1.5, 0.5]), torch.zeros(2), 3) if mapped else ()


class Op:
    """One kind of payload: how it is made, made in given memory, and read."""

    def __init__(self, kind: str, dtype: torch.dtype, *, mapped: bool, n: int = N) -> None:
        self.kind, self.dtype, self.by = kind, dtype, channels(mapped)
        self.x = values(dtype)[-n:]
        if kind == "nonzero":
            self.settings: tuple[object, ...] = 3, 32
            codec = Dither(levels=3, group_size=32)
            self.most_of_tile = layout.nonzero_tile_nbytes(3, 32)
        elif kind.startswith("sided"):
            self.settings = 4, 3, 32, 4 if kind == "sided, shared" else 1
            codec = Sided(*self.settings)
            self.most_of_tile = layout.sided_tile_nbytes(*self.settings)
            self.bits = reference.pack_bits(self.x)
        else:
            self.settings = (4, 8, 1) if kind == "comet, predicted" else (0, 0, 0)
            codec = Comet()
            self.most_of_tile = layout.TILE * dtype.itemsize
        facts = Facts(has_zeros=kind == "nonzero")
        sizes = (codec._layout(n, dtype, facts) for n in (n, layout.TILE))
        self.most, of_tile = (next(e for e in every if e.at_most).nbytes for every in sizes)
        assert of_tile == self.most_of_tile  # what codecs reserve is what kernels reckon with

    def exact(self, where: object) -> tuple[Tensor, ...]:
        if self.kind == "nonzero":
            return where.nonzero_quantize(self.x, SEED, *self.settings, *self.by)
        if self.kind.startswith("sided"):
            return where.sided_quantize(self.x, self.bits, SEED, *self.settings, *self.by)
        aware = self.kind == "comet, aware"
        return where.comet_quantize(self.x, GRID, SEED, "dither", aware, *self.settings)

    @property
    def place(self) -> int:
        """Of the payload among what `exact` gives."""
        return {"n": 1, "s": 0, "c": 3}[self.kind[0]]

    def into(self, where: object, capacity: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """All that `exact` gives, the payload in `capacity` bytes; its spill; how much it took."""
        payload = torch.empty(capacity, dtype=torch.uint8)
        spill = torch.empty(self.most - capacity + self.most_of_tile, dtype=torch.uint8)
        used = torch.empty(1, dtype=torch.int64)
        there = payload, spill, used
        if self.kind == "nonzero":
            made = where.nonzero_quantize_into(self.x, SEED, *self.settings, *there, *self.by)
        elif self.kind.startswith("sided"):
            args = self.x, self.bits, SEED, *self.settings, *there, *self.by
            made = (where.sided_quantize_into(*args),)
        else:
            given = GRID, SEED, "dither", self.kind == "comet, aware", *self.settings
            made = where.comet_quantize_into(self.x, *given, *there)
        made = list(made)
        made.insert(self.place, payload)
        return tuple(made), spill, used

    def read(self, where: object, stored: tuple[Tensor, ...], spill: Tensor | None) -> Tensor:
        out = torch.empty_like(self.x)
        if self.kind == "nonzero":
            by = (*self.by, None) if self.by else (None, None, 1, None)
            where.nonzero_dequantize(*stored, SEED, *self.settings, out, *by, 0, spill)
        elif self.kind.startswith("sided"):
            by = (*self.by, None) if self.by else (None, None, 1, None)
            args = self.bits, *stored, SEED, *self.settings, out, *by, 0, spill
            where.sided_dequantize(*args)
        else:
            where.comet_dequantize(*stored, GRID, SEED, "dither", *self.settings, out, spill)
        return out


KINDS = ("nonzero", "sided", "sided, shared", "comet", "comet, aware", "comet, predicted")
BACKENDS = ["numba", pytest.param("triton", marks=pytest.mark.sampled)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Where payloads are read and made; numba leaves the second to the reference."""
    if request.param == "numba":
        return numba, reference
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs on a CPU")
    from elbowroom.kernels import triton

    return triton, triton


SHARES = (0.0, 0.3, 0.7, 1.0, 1.1)


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_in_the_spill(backend, kind, turn):
    read, make = backend
    share, dtype = SHARES[turn], DTYPES[turn % 3]  # of the payload that fits
    # Predicting takes Triton's interpreter 6 s for a tile: of the second there are a few elements.
    n = layout.TILE + 64 if make is not reference and kind == "comet, predicted" else N
    op = Op(kind, dtype, mapped=turn in (1, 2) and not kind.startswith("comet"), n=n)
    exact = op.exact(reference)
    expected = op.read(reference, exact, None)
    size = len(exact[op.place])
    stored, spill, used = op.into(make, min(int(share * size), op.most))
    assert used.tolist() == [size]
    for i, (a, b) in enumerate(zip(stored, exact, strict=True)):
        assert i == op.place or bool(((a == b) | (a != a) & (b != b)).all())  # -0.0 is 0.0
    for where in (read, reference):
        got = op.read(where, stored, spill)
        assert torch.equal(got.nan_to_num(nan=7e4), expected.nan_to_num(nan=7e4))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_elements_that_are_not_zero_come_back(backend, dtype):
    _, make = backend
    x = (values(torch.float32).nan_to_num() * 20).to(dtype)
    left = int((x != 0).sum())
    for capacity in (0, left // 2, left, N):
        kept, spill = torch.empty(2, N + layout.TILE, dtype=dtype).unbind()
        used, out = torch.empty(1, dtype=torch.int64), torch.empty_like(x)
        there = kept[:capacity], spill[: N - capacity + layout.TILE]
        bits = make.sparse_pack_into(x, *there, used)
        assert torch.equal(bits, reference.pack_bits(x))
        assert used.tolist() == [left * dtype.itemsize]
        make.sparse_unpack(bits, *there, out)
        assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 2047, 2049, 40001])
def test_elements_that_are_not_zero_in_memory_of_their_number(backend, dtype, n):
    """In runs, as behind a causal mask, and one here and one there."""
    draw = torch.Generator().manual_seed(n)
    for density in (0.0, 0.1, 0.5, 1.0):
        x = torch.randint(1, 100, (n,), generator=draw).to(dtype)
        x[torch.rand(n, generator=draw) >= density] = 0
        x[n // 4 : n // 2] = 0
        x[n // 2 : n // 4 * 3] = 3
        bits, kept = ops.sparse_pack(x)
        assert torch.equal(bits, reference.pack_bits(x))
        assert torch.equal(kept, x[x != 0])
        for make in (*backend, ops):
            out = torch.empty_like(x)
            make.sparse_unpack(bits, kept, kept[:0], out)
            assert torch.equal(out, x)


@pytest.mark.parametrize("make", [ops, reference], ids=["ops", "reference"])
def test_too_few_elements_are_said(make):
    bits, kept = ops.sparse_pack(torch.arange(5000))
    with pytest.raises(ValueError, match="expected 4999 non-zeros, as the bitmap says; got 4998"):
        make.sparse_unpack(bits, kept[1:], kept[:0], torch.empty(5000, dtype=torch.int64))


def test_of_a_tensor_without_elements_nothing_is_written():
    empty, used = torch.empty(0, dtype=torch.uint8), torch.ones(1, dtype=torch.int64)
    bits, bounds = ops.nonzero_quantize_into(torch.empty(0), 1, 4, 64, empty, empty, used)
    assert (len(bits), len(bounds), used.item()) == (0, 0, 0)


def test_no_value_on_a_cpu_is_waited_for():
    assert not would_wait(torch.ones(1))
    assert would_wait(torch.ones(1, device="meta"))
