"""What every registered codec promises, over its settings, its dtypes and any geometry of a tensor.

A new codec is tested by being registered, and by a line in SETTINGS and in VALUES (and, if it is
lossy, in BOUNDS, its promised error): without them the first test fails.
"""

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from elbowroom.codecs import (
    PART,
    Affine,
    Cast,
    Codec,
    Comet,
    Dither,
    Division,
    Encoded,
    Facts,
    Group,
    Sided,
    codec,
    codecs,
)
from elbowroom.codecs.base import memory_order
from elbowroom.errors import CodecError, UnsupportedTensor
from elbowroom.kernels.layout import TILE
from elbowroom.kernels.ops import pack_bits

pytestmark = pytest.mark.usefixtures("one_thread")

ZEROS = Facts(has_zeros=True)
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "bitmask": [{}],
    "narrow": [{}],
    "sparse_lossless": [{}],
    "cast": [
        {},
        {"to": "fp16"},
        {"to": "fp8_e4m3", "group_size": 32},
        {"to": "fp8_e5m2", "group_size": 256},
        {"to": "fp8_e4m3", "sparse": True},
    ],
    "group": [{}, {"bits": 1, "group_size": 32}, {"bits": 3}, {"bits": 8, "group_size": 64}],
    "dither": [
        {},
        {"bits": 1, "group_size": 32},
        {"levels": 3},
        {"levels": 6, "group_size": 128},
        {"levels": 100},
        {"bits": 8, "group_size": 256},
    ],
    "division": [
        {},
        {"rounding": "dither"},
        {"bits": 1, "block": 4, "range_blocks": 1},
        {"bits": 8, "block": 16, "range_blocks": 2, "rounding": "dither"},
    ],
    "fdsr": [
        {},
        {"min_numel": 0},
        {"min_numel": 0, "bands": "4/2/1.6", "rounding": "dither"},
        {"min_numel": 0, "bands": "6/4/0", "reuse": True, "rho": 0.5, "block": 8},
    ],
    "comet": [
        {},
        {"bound": 0.3, "relative": False, "prediction": "1d"},
        {"bound": 1e-3, "rounding": "stochastic"},
        {"rounding": "nearest", "prediction": "2d"},
    ],
    "sided": [
        {},
        {"upper": 3, "lower": 256, "group_size": 32},
        {"upper": 8, "lower": 5},
        {"lower": 16, "fold": 8},
    ],
}
STOCHASTIC = {"group", "dither", "division", "comet", "sided"}
FACTS = {
    "bitmask": [Facts(), Facts(value=1.0)],
    "narrow": [Facts(), Facts(smallest=-3, largest=250), Facts(largest=2**62)],
    "dither": [Facts(), ZEROS],
    "comet": [Facts(), ZEROS, Facts(error_bound=0.01)],
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ALL_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(*FLOATS, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn),
)


@dataclass(frozen=True)
class Case:
    """One codec with its settings, what its caller knows, and a dtype that it takes."""

    codec: Codec
    facts: Facts
    dtype: torch.dtype

    def values(self, *shape: int) -> Tensor:
        return VALUES[self.codec.id](torch.empty(shape, dtype=self.dtype), self.facts)

    def encode(self, x: Tensor, seed: int = 0) -> Encoded:
        return self.codec.encode(x, seed=seed, facts=self.facts)

    def __str__(self) -> str:
        known = "+".join(name for name, value in vars(self.facts).items() if value) or "nothing"
        fields = ",".join(str(v) for k, v in self.codec.config().items() if k != "id")
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.codec.id}({fields})-{known}-{dtype}"


def ready() -> Iterator[Case]:
    for id, all_settings in SETTINGS.items():
        for chosen in all_settings:
            made = codec(id, **chosen)
            for facts in FACTS.get(id, [Facts()]):
                yield from (Case(made, facts, dtype) for dtype in made.dtypes)


def noise(x: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(x.numel())
    return torch.randn(x.shape, generator=draw) * 3


def noise_with_zeros(x: Tensor, facts: Facts) -> Tensor:
    values = noise(x)
    return (values.clamp(min=0) if facts.has_zeros else values).to(x.dtype)


def one_value(x: Tensor, facts: Facts) -> Tensor:
    one = 1 if facts.value or x.dtype is torch.bool else 3
    return ((noise(x) > 0) * one).to(x.dtype)


def indices(x: Tensor, facts: Facts) -> Tensor:
    return (noise(x).abs() * 10).to(x.dtype) - 3


VALUES: dict[str, Callable[[Tensor, Facts], Tensor]] = {
    "bitmask": one_value,
    "narrow": indices,
    "sparse_lossless": lambda x, facts: noise(x).clamp(min=0).to(x.dtype),
    "cast": noise_with_zeros,
    "group": noise_with_zeros,
    "dither": noise_with_zeros,
    "division": noise_with_zeros,
    "fdsr": noise_with_zeros,
    "comet": noise_with_zeros,
    "sided": noise_with_zeros,
}

Fill = Callable[..., Tensor]
GEOMETRIES: dict[str, Callable[[Fill], Tensor]] = {
    "0-d": lambda fill: fill(),
    "empty": lambda fill: fill(0),
    "empty in the middle": lambda fill: fill(3, 0, 2).transpose(0, 2),
    "one element": lambda fill: fill(1, 1),
    "odd": lambda fill: fill(7, 11, 13),
    "one tile": lambda fill: fill(TILE),
    "three tiles and a bit": lambda fill: fill(3 * TILE + 77),
    "5-D": lambda fill: fill(2, 3, 4, 3, 5),
    "maps": lambda fill: fill(2, 3, 21, 30),
    "maps of one element": lambda fill: fill(9, 70, 1, 1),
    "columns": lambda fill: fill(3, 2, 90, 1),
    "transposed maps": lambda fill: fill(2, 3, 9, 34).transpose(2, 3),
    "channels last": lambda fill: fill(2, 5, 6, 7).to(memory_format=torch.channels_last),
    "channels last 3-D": lambda fill: fill(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    "transposed": lambda fill: fill(33, 65).t(),
    "strided slice": lambda fill: fill(40, 50)[::2, 3::4],
    "expanded": lambda fill: fill(1, 300).expand(7, 300),
    "overlapping": lambda fill: fill(100).as_strided((50, 4), (1, 1)),
    "far view": lambda fill: fill(70_001)[69_000:],
    "stride of a size-1 dim": lambda fill: fill(40).as_strided((1, 40), (999, 1)),
}


def cases(wanted: Callable[[Case], bool], share: int = 3) -> pytest.MarkDecorator:
    """Those that are wanted, of which one in `share` runs each time, each setting among them."""
    sampled = pytest.mark.sampled(share)
    chosen = [pytest.param(case, marks=sampled) for case in ready() if wanted(case)]
    return pytest.mark.parametrize("case", chosen, ids=str)


CASES = cases(lambda case: True)
LOSSY = cases(lambda case: not case.codec.lossless)
FLOATING = cases(lambda case: case.dtype.is_floating_point)
ZERO_AWARE = cases(lambda case: case.facts.has_zeros)


def inputs(case: Case) -> Iterator[tuple[str, Tensor]]:
    for name, geometry in GEOMETRIES.items():
        yield name, geometry(case.values)


def bits_of(x: Tensor) -> Tensor:
    """The bit patterns of x, with all NaN alike."""
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype is y.dtype and torch.equal(bits_of(x), bits_of(y))


def same_buffers(a: Encoded, b: Encoded) -> bool:
    return all(same_bits(x, y) for x, y in zip(a.buffers, b.buffers, strict=True))


# -- an affine in the same pass, or in one of its own ----------------------------------------------

MAPPABLE = cases(lambda case: not case.codec.lossless and case.dtype in FLOATS)


def even() -> Affine:
    """One that keeps zeros, and on which side of 0 a value lies."""
    return Affine(torch.tensor([2.0, 1.5, 30.0]), torch.zeros(3), 7)


@MAPPABLE
def test_encoding_by_an_affine_is_encoding_its_image(case):
    """With the same bits in float32; elsewhere the image need not be rounded to the dtype."""
    x = case.values(2, 3, 21, 30)
    image = even().of(x.view(-1)).view(x.shape)
    encoded = case.codec.encode(x, 5, case.facts, even())
    apart = case.encode(image, 5)
    assert encoded.raw == apart.raw or encoded.nbytes == apart.nbytes
    if encoded.raw:
        assert same_bits(encoded.decode(), x)
    elif case.dtype is torch.float32:
        assert same_buffers(encoded, apart)
    else:
        exact = even().of(x.view(-1).float()).view(x.shape)
        errors = [(e.decode().float() - exact).square().mean() for e in (encoded, apart)]
        assert errors[0] <= 1.1 * errors[1] + 1e-6


@MAPPABLE
def test_decoding_by_an_affine(case):
    """It is the affine of what is decoded, and 0 where a bit is not set."""
    for name, x in inputs(case):
        encoded, affine = case.encode(x, 5), Affine(torch.randn(5), torch.randn(5), 3)
        decoded = encoded.decode()
        flat = decoded.float().as_strided((x.numel(),), (1,)) if x.numel() else decoded.flatten()
        kept = torch.arange(x.numel()) % 3 != 0
        bits = pack_bits(kept)
        out = torch.empty(x.numel(), dtype=x.dtype)
        mapped = encoded.decode(out, affine, bits)
        assert (mapped.shape, mapped.stride()) == (decoded.shape, decoded.stride()), name
        assert mapped.data_ptr() == out.data_ptr()
        expected = torch.where(kept, affine.of(flat), 0.0) if x.numel() else flat
        if case.dtype is torch.float32:
            assert torch.equal(out, expected), name
        else:
            scale = 1 + expected.abs().max() if x.numel() else 1  # of what is rounded before
            assert ((out.float() - expected).abs() <= 2**-7 * scale).all(), name


@MAPPABLE
def test_what_is_raw_is_held_without_the_affine(case):
    x = case.values(2, 3, 21, 30)
    x[0, 0, 0, 0] = float("nan")
    encoded = case.codec.encode(x, 5, case.facts, even())
    if encoded.raw:
        assert same_bits(encoded.decode(), x)
        mapped = encoded.decode(None, even())
        assert same_bits(mapped, even().of(x.view(-1)).view(x.shape))
        with pytest.raises(CodecError, match="cannot decode a part of a tensor that it holds raw"):
            encoded.decode_part(0, torch.empty(x.numel(), dtype=x.dtype))
    else:
        assert encoded.decode()[0, 0, 0, 0].isnan()


# -- the promised error of the lossy codecs, from the values alone --------------------------------

COARSEST = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUBNORMAL = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
UNCODED = 256e-36  # differences in a tile that no codec holds: 255 steps of 1e-36
ARITHMETIC = 2.0**-21  # of the largest in the tile: a few float32 roundings


def each(x: Tensor, size: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """x [N] float64 -> [N]: `reduce` of the run of `size` elements that an element lies in."""
    return torch.cat([reduce(part).expand(len(part)) for part in x.split(size)])


def group_bound(c: Codec, x: Tensor, facts: Facts) -> Tensor:
    assert isinstance(c, Group)
    least, most = each(x, c.group_size, torch.min), each(x, c.group_size, torch.max)
    width = most - least + least.abs() * 2**-7  # low is rounded down to bf16
    scale = width / ((1 << c.bits) - 1) * (1 + 2**-7)  # and the scale up
    return scale + ARITHMETIC * torch.maximum(most.abs(), least.abs()) + UNCODED


def dither_bound(c: Codec, x: Tensor, facts: Facts) -> Tensor:
    assert isinstance(c, Dither)
    if not facts.has_zeros:
        return half_steps(c, x)
    bound = torch.zeros_like(x)
    for tile, held in zip(x.split(TILE), bound.split(TILE), strict=True):
        if bool((tile != 0).any()):
            held[tile != 0] = half_steps(c, tile[tile != 0])
    return bound


def half_steps(c: Dither, x: Tensor) -> Tensor:
    lo, hi = each(x, TILE, torch.min), each(x, TILE, torch.max)
    reach = torch.maximum(lo.abs(), hi.abs())
    unit = (hi - lo + (lo.abs() + hi.abs()) * 2**-7) / 255  # bounds are rounded outwards to bf16
    least, most = each(x, c.group_size, torch.min), each(x, c.group_size, torch.max)
    step = (most - least + 2 * unit) / (c.levels - 1)  # a group's range outwards to units
    return step * 0.5 + ARITHMETIC * reach + UNCODED


def division_bound(c: Codec, x: Tensor, facts: Facts) -> Tensor:
    """From the maps alone: the most that x - mean can span in a range, mean and range rounded."""
    assert isinstance(c, Division)
    _, reach, (outer, rows, columns, inner) = c._how(len(x), facts)
    x = x.view(outer, rows, columns, inner)
    high, wide = (1, c.block**2) if rows == 1 else (c.block, c.block)
    tall, broad = high * reach, wide * reach
    if not reach:
        tall, broad = rows, columns
    elif rows == 1:
        tall, broad = 1, wide * reach**2
    mean, bound = torch.empty_like(x), torch.empty_like(x)
    for r, k in product(range(0, rows, high), range(0, columns, wide)):
        block = x[:, r : r + high, k : k + wide]
        mean[:, r : r + high, k : k + wide] = block.mean(dim=(1, 2), keepdim=True)
    for r, k in product(range(0, rows, tall), range(0, columns, broad)):
        part = slice(None), slice(r, r + tall), slice(k, k + broad)
        h, shift = x[part] - mean[part], mean[part].abs().amax(dim=(1, 2), keepdim=True) * 2**-8
        least, most = h.amin(dim=(1, 2), keepdim=True), h.amax(dim=(1, 2), keepdim=True)
        width = most - least + 2 * shift + (least.abs() + shift) * 2**-7
        step = width / ((1 << c.bits) - 1) * (1 + 2**-7)
        largest = x[part].abs().amax(dim=(1, 2), keepdim=True)
        half = 0.5 if c.rounding == "dither" else 1.0
        bound[part] = step * half + 4 * ARITHMETIC * largest + UNCODED
    return bound.view(-1)


def comet_bound(c: Codec, x: Tensor, facts: Facts) -> Tensor:
    """No slack: `excess` adds none for this one."""
    assert isinstance(c, Comet)
    bound = facts.error_bound or c.bound * (float(x.max() - x.min()) if c.relative else 1.0)
    return torch.full_like(x, bound)


def sided_bound(c: Codec, x: Tensor, facts: Facts) -> Tensor:
    assert isinstance(c, Sided)
    bound = torch.zeros_like(x)
    for tile, held in zip(x.split(TILE), bound.split(TILE), strict=True):
        above, below = tile > 0, tile <= 0
        if bool(above.any()):
            held[above] = half_steps(Dither(c.upper, c.group_size), tile[above])
        if bool(below.any()) and c.fold == 1:
            held[below] = half_steps(Dither(c.lower, c.group_size), tile[below])
        elif bool(below.any()):  # as much as all that share a code can be off their mean, and half
            reach = float(tile[below].max() - tile[below].min())
            slack = (reach + float(tile[below].abs().max())) * 2**-6
            held[below] = c.fold * (reach + slack) * (1 + 1.01 / (c.lower - 1))
    return bound


def cast_bound(c: Codec, x: Tensor, facts: Facts) -> Tensor:
    assert isinstance(c, Cast)
    if c.to == "bf16":
        return x.abs() * 2**-8 + 2.0**-134
    if c.to == "fp16":
        return x.abs() * 2**-11 + 2.0**-25
    largest, relative, subnormal = {
        "fp8_e4m3": (448, 2**-4, 2**-10),
        "fp8_e5m2": (57344, 2**-3, 2**-17),
    }[c.to]
    scale = each(x.abs(), c.group_size, torch.max) / largest * (1 + 2**-7)
    return x.abs() * relative + scale * subnormal + largest * 1e-36


def fdsr_bound(c: Codec, x: Tensor, facts: Facts) -> Tensor:
    """Loose, for it knows no maps: `tests/numerics/test_fdsr.py` has the sharp one, and controls.

    A tile's error is at most a few times its norm, a norm at most 8 times its largest element.
    """
    return torch.full_like(x, 32 * float(x.abs().max())) + UNCODED


BOUNDS: dict[str, Callable[[Codec, Tensor, Facts], Tensor]] = {
    "cast": cast_bound,
    "group": group_bound,
    "dither": dither_bound,
    "division": division_bound,
    "fdsr": fdsr_bound,
    "comet": comet_bound,
    "sided": sided_bound,
}


def excess(case: Case, x: Tensor, y: Tensor) -> float:
    """By how much y, decoded from x, is beyond the promise: at most 0."""
    shape, (x, stride), y = tuple(x.shape), memory_order(x), memory_order(y)[0].double()
    if not len(x):
        return 0.0
    x, facts = x.double(), case.codec._seen(shape, stride, case.facts)
    bound = BOUNDS[case.codec.id](case.codec, x, facts)
    if case.codec.id == "comet":
        return float(((x - y).abs() - bound).nan_to_num(nan=float("inf")).max())
    bound = bound + (x.abs() + bound) * COARSEST[case.dtype] + SUBNORMAL[case.dtype]
    if case.facts.has_zeros:  # a value that is not zero is lifted off it
        bound = torch.where(x == 0, 0.0, bound + 2 * torch.finfo(case.dtype).tiny)
    over = (x - y).abs() - bound
    return float(over.nan_to_num(nan=float("inf")).max())


def keeps_promise(case: Case, x: Tensor, y: Tensor) -> bool:
    return same_bits(x, y) if case.codec.lossless else excess(case, x, y) <= 0


# -- the contract ---------------------------------------------------------------------------------


def test_every_registered_codec_is_in_the_tables():
    assert set(SETTINGS) == set(codecs())
    assert set(VALUES) == set(codecs())
    assert set(BOUNDS) == {id for id in codecs() if not codec(id).lossless}
    assert set(codecs()) >= STOCHASTIC


@CASES
def test_geometry_comes_back(case):
    for name, x in inputs(case):
        y = case.encode(x).decode()
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device), name
        dense = torch.ops.aten.is_non_overlapping_and_dense(x)
        assert y.stride() == (x.stride() if dense else x.contiguous().stride()), name
        assert type(y) is Tensor
        assert not y.requires_grad


@CASES
def test_values_come_back_as_promised(case):
    for name, x in inputs(case):
        encoded = case.encode(x, seed=3)
        assert not encoded.raw or x.numel() == 0 or case.codec.id in ("narrow", "fdsr"), name
        assert keeps_promise(case, x, encoded.decode()), name


@CASES
def test_the_size_is_known_before(case):
    for name, x in inputs(case):
        encoded = case.encode(x)
        held = sum(b.untyped_storage().nbytes() for b in encoded.buffers)
        told = case.codec.encoded_nbytes(x.shape, x.dtype, case.facts)
        assert encoded.nbytes == held, name
        assert (
            encoded.nbytes == told if case.codec.fixed_size(case.facts) else encoded.nbytes <= told
        ), name


@CASES
def test_the_configuration_is_json_and_makes_an_equal_codec(case):
    config = json.loads(json.dumps(case.codec.config()))
    twin = codec(**config)
    assert twin == case.codec
    assert hash(twin) == hash(case.codec)
    assert repr(twin) == repr(case.codec)
    assert pickle.loads(pickle.dumps(case.codec)) == case.codec


@CASES
def test_x_is_neither_changed_nor_aliased(case):
    for name, x in inputs(case):
        before, version = x.clone(), x._version
        encoded = case.encode(x)
        assert same_bits(x, before), name
        assert x._version == version, name
        first = encoded.decode().clone()
        x.untyped_storage().fill_(1)
        assert same_bits(encoded.decode(), first), name


@CASES
def test_storages_can_be_resized_as_before(case):
    """`Tensor.numpy()` would forbid it for good, and sharded training frees parameters that way."""
    x = case.values(3, 100)
    empty = case.values(0)
    encoded, nothing = case.encode(x), case.encode(empty)
    room = torch.empty(300, dtype=x.dtype)
    held = [x, empty, *encoded.buffers, *nothing.buffers]
    for y in (*held, encoded.decode(), encoded.decode(out=room), nothing.decode()):
        y.untyped_storage().resize_(0)


@CASES
def test_what_was_decoded_is_nobody_elses(case):
    for name, x in inputs(case):
        encoded = case.encode(x)
        first = encoded.decode()
        kept = first.clone()
        first.fill_(1)
        assert same_bits(encoded.decode(), kept), name
        assert same_bits(case.codec.decode(encoded), kept), name


@CASES
def test_decoding_takes_the_given_memory_and_nothing_around_it(case):
    for name, x in inputs(case):
        n = x.numel()
        room = torch.ones(n + 20, dtype=x.dtype)
        encoded = case.encode(x)
        y = encoded.decode(out=room[7 : 7 + n])
        assert n == 0 or y.data_ptr() == room[7:].data_ptr(), name
        assert same_bits(y, encoded.decode()), name
        assert bool((room[:7] == 1).all()), name
        assert bool((room[7 + n :] == 1).all()), name


@CASES
def test_parts_are_those_of_the_whole_or_refused(case):
    encoded = case.encode(case.values(2 * PART + 77))
    if not encoded.has_parts:
        with pytest.raises(CodecError, match=r"cannot decode a part of .* decode\(\) gives all"):
            encoded.decode_part(0, torch.empty(PART, dtype=case.dtype))
        return
    whole = encoded.decode()
    for start in (2 * PART, 0, PART):  # in any order
        out = torch.ones(whole[start : start + PART].numel(), dtype=case.dtype)
        encoded.decode_part(start, out)
        assert same_bits(out, whole[start : start + PART]), start


@CASES
def test_a_seed_decides_every_bit(case):
    x = case.values(3, 1000)
    torch.manual_seed(1)
    first = case.encode(x, seed=2**63 + 5)
    torch.manual_seed(2)
    assert same_buffers(first, case.encode(x, seed=2**63 + 5))
    assert same_buffers(first, case.encode(x, seed=5 - 2**63)), "two spellings of 64 bits"
    for other in (5, 2**32 + 5, -1, 0):
        y, z = first.decode(), case.encode(x, seed=other).decode()
        draws = case.codec.id in STOCHASTIC and case.codec.config().get("rounding") != "nearest"
        assert same_bits(y, z) == (not draws), other
        assert keeps_promise(case, x, z), other


# A threaded loop takes several seconds to compile: a sample runs each time.
# The threaded loops of 16-bit floats take 10 to 20 s each to compile, and differ in a load alone.
@cases(
    lambda case: case.dtype not in (torch.bfloat16, torch.float16) or case.codec.id == "group",
    share=5,
)
def test_the_number_of_threads_changes_no_bit(case):
    x = case.values(3 * 16 * TILE + 77)  # a thread takes 16 tiles at a time
    one = case.encode(x, seed=1)
    y = one.decode()
    torch.set_num_threads(3)
    three = case.encode(x, seed=1)
    assert same_buffers(one, three)
    assert same_bits(y, three.decode())


@CASES
def test_the_users_random_numbers_are_not_touched(case):
    x = case.values(100)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    case.encode(x).decode()
    assert torch.equal(state, torch.get_rng_state())


@CASES
def test_an_encoded_can_be_copied_and_pickled(case):
    encoded = case.encode(case.values(3, 50).t(), seed=7)
    for twin in (copy.deepcopy(encoded), pickle.loads(pickle.dumps(encoded))):
        assert same_bits(twin.decode(), encoded.decode())
        assert twin.codec == encoded.codec


@CASES
def test_a_wrong_out_is_refused(case):
    encoded = case.encode(case.values(4, 10))
    other = torch.float64 if case.dtype is not torch.float64 else torch.float32
    for out in (
        torch.empty(39, dtype=case.dtype),
        torch.empty(41, dtype=case.dtype),
        torch.empty(4, 10, dtype=case.dtype),
        torch.empty(80, dtype=case.dtype)[::2],
        torch.empty(40, dtype=other),
        torch.empty(40, dtype=case.dtype, device="meta"),
    ):
        with pytest.raises(
            CodecError, match=rf"'{case.codec.id}' decodes into out of shape \(40,\)"
        ):
            encoded.decode(out=out)


@pytest.mark.parametrize(
    ("id", "dtype"),
    [(id, dtype) for id in SETTINGS for dtype in ALL_DTYPES if dtype not in codec(id).dtypes],
    ids=str,
)
def test_another_dtype_is_refused_by_name(id, dtype):
    made = codec(id)
    with pytest.raises(UnsupportedTensor) as refused:
        made.encode(torch.zeros(3, 4, dtype=dtype))
    message = str(refused.value)
    assert f"codec '{id}' takes " in message
    for word in (*(str(taken).removeprefix("torch.") for taken in made.dtypes), "(3, 4)"):
        assert word in message
    assert f"got {str(dtype).removeprefix('torch.')} " in message
    assert ("view_as_real" in message) == dtype.is_complex
    assert isinstance(refused.value, TypeError)


@CASES
def test_another_layout_is_refused_by_name(case):
    x = case.values(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototype features of torch announce themselves
        strange = [x.to_sparse(), x.to_sparse_csr()]
        if case.dtype.is_floating_point:
            strange += [
                torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
                torch.nested.nested_tensor([x, x[:2]]),
            ]
    for one in strange:
        with pytest.raises(
            UnsupportedTensor, match=rf"codec '{case.codec.id}' takes dense tensors; got"
        ):
            case.encode(one)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("id", SETTINGS)
def test_a_quantized_tensor_is_refused(id):
    x = torch.quantize_per_tensor(torch.randn(10), 0.1, 0, torch.quint8)
    with pytest.raises(UnsupportedTensor, match=f"codec '{id}' takes .*got quint8"):
        codec(id).encode(x)


@pytest.mark.parametrize("id", sorted(id for id in SETTINGS if torch.float32 in codec(id).dtypes))
def test_nothing_encoded_needs_a_gradient(id):
    leaf = torch.nn.Parameter((torch.randn(40) > 0).float())
    for x in (leaf, leaf * 1):
        encoded = codec(id).encode(x)
        assert not any(b.requires_grad or b.grad_fn for b in encoded.buffers)
        assert not encoded.decode().requires_grad


@pytest.mark.parametrize("id", sorted(id for id in SETTINGS if torch.float32 in codec(id).dtypes))
def test_a_lazily_negated_tensor_keeps_its_sign(id):
    x = torch._neg_view(torch.full((500,), 2.0))
    assert torch.equal(codec(id).encode(x).decode(), x)


def test_an_offset_beyond_32_bits():
    try:
        x = torch.empty(2**31 + 5000, dtype=torch.uint8)[2**31 + 7 :]  # pages are taken as touched
    except RuntimeError:
        pytest.skip("this machine does not promise 2 GiB")
    x.copy_(torch.arange(x.numel()) % 3 == 0)
    for id in ("bitmask", "sparse_lossless"):
        assert same_bits(codec(id).encode(x).decode(), x)


# -- NaN, Inf, and what the format cannot hold ----------------------------------------------------


@FLOATING
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_back_exactly(case, bad):
    x = case.values(3000)
    if case.codec.id == "bitmask":
        x.masked_fill_(x != 0, bad)
        case = replace(case, facts=Facts(value=bad) if case.facts.value else Facts())
    else:
        x[2222] = bad
    encoded = case.encode(x)
    assert same_bits(encoded.decode(), x)
    assert encoded.raw == (not case.codec.lossless)


@LOSSY
def test_what_would_overflow_is_finite_after_all(case):
    most = min(torch.finfo(case.dtype).max, 1.7e38)
    for x in (
        torch.tensor([-most, most] * 300, dtype=case.dtype),
        torch.full((100,), -most, dtype=case.dtype),
        torch.tensor([most, 0.75 * most, 0.5 * most] * 40, dtype=case.dtype),
    ):
        for seed in range(3):
            y = case.encode(x, seed).decode()
            assert bool(y.isfinite().all())
            assert keeps_promise(case, x, y)


@LOSSY
def test_constants_and_the_very_small(case):
    tiny = torch.finfo(case.dtype).smallest_normal
    for value in (0.0, -0.0, 1.0, -3.3, 1e-5, tiny, -tiny, tiny / 2, 60000.0):
        for n in (1, 31, 2049):
            x = torch.full((n,), value, dtype=case.dtype)
            assert keeps_promise(case, x, case.encode(x, seed=n).decode()), value
            x[n // 2] += 1
            assert keeps_promise(case, x, case.encode(x, seed=n).decode()), value


@cases(lambda case: not case.codec.lossless and case.codec.id != "fdsr")
def test_the_bound_is_not_vacuous(case):
    """The negative control: bits of another seed, or of another tensor, must break the promise."""
    x = case.values(5000)
    if case.codec.id == "sided" or "dither" in case.codec.config().values():
        encoded = case.encode(x, seed=1)
        assert excess(case, x, replace(encoded, seed=2).decode()) > 0
    assert excess(case, x, case.encode(x.flip(0)).decode()) > 0


# -- exact zeros ----------------------------------------------------------------------------------


@ZERO_AWARE
@pytest.mark.parametrize("density", [0.0, 0.0001, 0.03, 0.5, 1.0])
def test_zeros_stay_and_nothing_else_becomes_one(case, density):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3 * TILE + 100, generator=draw)
    x = torch.where(torch.rand(x.shape, generator=draw) < density, x, 0.0).to(case.dtype)
    x[x == 0] *= torch.where(torch.arange(int((x == 0).sum())) % 2 == 0, 1, -1)  # -0.0 too
    for seed in range(20):
        y = case.encode(x, seed).decode()
        assert torch.equal(y != 0, x != 0)
        assert same_bits(y[x == 0], torch.zeros_like(y[x == 0])), "a zero comes back as +0.0"
        assert keeps_promise(case, x, y)


@ZERO_AWARE
@pytest.mark.parametrize("place", [0, 1, TILE - 1, TILE, 2 * TILE + 3])
@pytest.mark.parametrize("value", [1.0, -2.5, 6e-8, 60000.0])
def test_one_value_among_zeros(case, place, value):
    x = torch.zeros(2 * TILE + 5, dtype=case.dtype)
    x[place] = value
    y = case.encode(x, seed=place).decode()
    assert torch.equal(y != 0, x != 0)
    assert keeps_promise(case, x, y)


@ZERO_AWARE
def test_the_smallest_values_are_not_mistaken_for_zeros(case):
    tiny = torch.finfo(case.dtype).smallest_normal
    x = torch.tensor([tiny, -tiny, 0.0, tiny / 2, -tiny / 4, 0.0, -0.0] * 700, dtype=case.dtype)
    y = case.encode(x).decode()
    assert torch.equal(y != 0, x != 0)


@ZERO_AWARE
def test_the_bitmap_is_the_first_buffer(case):
    x = case.values(1001)
    bits = case.encode(x).buffers[0]
    assert bits.numpy().tobytes() == packed(x != 0)


def packed(flags: Tensor) -> bytes:
    """Bit i % 8 of byte i // 8, by hand."""
    held = bytearray(-(-len(flags) // 8))
    for i, flag in enumerate(flags.tolist()):
        held[i // 8] |= flag << (i % 8)
    return bytes(held)


# -- exact codecs: what else they say -------------------------------------------------------------


def test_a_mask_is_one_bit_an_element():
    x = torch.randn(1001) > 0
    (bits,) = codec("bitmask").encode(x).buffers
    assert bits.numpy().tobytes() == packed(x)


@pytest.mark.parametrize("third", [2.0, -1.0, -0.0])
def test_a_third_value_is_no_mask(third):
    x = torch.tensor([0.0, 1.0, third, 0.0])
    with pytest.raises(
        UnsupportedTensor, match=r"one value besides 0; this one of shape \(4,\).*'sparse_lossless'"
    ):
        codec("bitmask").encode(x)


@pytest.mark.parametrize("value", [1 / 0.9, -7.0, 5e-324, float("inf"), float("nan")])
def test_dropouts_values_are_found(value):
    x = torch.tensor([0.0, value, 0.0, value, value], dtype=torch.float64)
    encoded = codec("bitmask").encode(x)
    assert (encoded.nbytes, same_bits(encoded.decode(), x)) == (1, True)


@pytest.mark.parametrize(
    ("smallest", "largest", "nbytes"),
    [
        (0, 0, 1),
        (0, 255, 1),
        (-1, 127, 1),
        (-1, 128, 2),
        (0, 256, 2),
        (-129, 0, 2),
        (0, 32768, 4),
        (0, 2**31, 8),
    ],
)
def test_indices_take_the_smallest_integer_that_holds_them(smallest, largest, nbytes):
    x = torch.tensor([smallest, largest, 0])
    facts = Facts(smallest=smallest, largest=largest)
    for known in (None, facts):
        encoded = codec("narrow").encode(x, facts=known)
        assert encoded.nbytes == 3 * nbytes
        assert torch.equal(encoded.decode(), x)
    assert codec("narrow").encoded_nbytes((3,), x.dtype, facts) == 3 * nbytes


def test_a_broken_promise_about_indices_is_held_raw():
    x = torch.tensor([0, 300, -1])
    encoded = codec("narrow").encode(x, facts=Facts(smallest=0, largest=255))
    assert encoded.raw
    assert torch.equal(encoded.decode(), x)


# -- any shape, stride, dtype and value -----------------------------------------------------------

FINITE32 = st.floats(width=32, min_value=-(2.0**124), max_value=2.0**124)
ALWAYS = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def tensors(draw: st.DrawFn, values: st.SearchStrategy[Any], dtype: torch.dtype) -> Tensor:
    """A tensor of up to 9,000 elements that repeats a few drawn values, viewed in a drawn way."""
    few = torch.tensor(draw(st.lists(values, min_size=1, max_size=40)), dtype=torch.float64)
    few = few if dtype.is_floating_point else few.long()
    shape = draw(st.lists(st.integers(1, 9), max_size=4)) + draw(st.sampled_from([[], [64], [300]]))
    n = int(torch.tensor(shape).prod())
    x = few.repeat(-(-n // len(few)))[:n].to(dtype).view(shape)
    x = x.permute(draw(st.permutations(range(x.dim()))))
    if x.dim() and draw(st.booleans()):
        x = x[:: draw(st.integers(1, 3))]
    return x


@CASES
@ALWAYS
@given(data=st.data())
def test_any_tensor(case, data):
    values: st.SearchStrategy[Any] = FINITE32
    if case.codec.id == "bitmask":
        one = 1 if case.facts.value or case.dtype is torch.bool else data.draw(st.integers(1, 100))
        values = st.sampled_from([0, one])
    elif case.codec.id == "narrow":
        values = st.integers(-3, 250)
    elif case.dtype is torch.float16:
        values = st.floats(width=16, allow_nan=False, allow_infinity=False)
    elif not case.dtype.is_floating_point:
        values = st.integers(0, 127)
    if case.facts.has_zeros:
        values = st.just(0.0) | values
    x = data.draw(tensors(values, case.dtype))
    encoded = case.encode(x, seed=data.draw(st.integers(-(2**63), 2**64 - 1)))
    y = encoded.decode()
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert keeps_promise(case, x, y)
    assert torch.equal(y != 0, x != 0) or not case.facts.has_zeros
    if not encoded.raw:
        told = case.codec.encoded_nbytes(x.shape, x.dtype, case.facts)
        assert (
            encoded.nbytes == told if case.codec.fixed_size(case.facts) else encoded.nbytes <= told
        )


@ALWAYS
@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=100))
def test_sparse_keeps_any_bit_pattern(words):
    x = torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)
    y = codec("sparse_lossless").encode(x).decode()
    assert torch.equal(y.view(torch.int32), x.view(torch.int32))
