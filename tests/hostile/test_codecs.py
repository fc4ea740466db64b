"""Encoded bytes that were cut, swapped or altered: our error, no crash, no foreign memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from elbowroom.codecs import Encoded, Facts, codec
from elbowroom.errors import CodecError

pytestmark = pytest.mark.usefixtures("one_thread")

ZEROS = Facts(has_zeros=True)
NOISE = torch.randn(5, 700, generator=torch.Generator().manual_seed(0))
SAMPLES: dict[str, Callable[[], Encoded]] = {
    "bitmask": lambda: codec("bitmask").encode(NOISE > 0),
    "narrow": lambda: codec("narrow").encode((NOISE * 9).long()),
    "sparse_lossless": lambda: codec("sparse_lossless").encode(NOISE.relu()),
    "cast bf16": lambda: codec("cast").encode(NOISE),
    "cast fp8": lambda: codec("cast", to="fp8_e4m3").encode(NOISE),
    "group": lambda: codec("group").encode(NOISE),
    "dither": lambda: codec("dither").encode(NOISE),
    "dither 3 levels": lambda: codec("dither", levels=3).encode(NOISE),
    "dither zeros": lambda: codec("dither").encode(NOISE.relu(), facts=ZEROS),
    "division": lambda: codec("division", rounding="dither").encode(NOISE),
    "comet": lambda: codec("comet").encode(NOISE),
    "comet zeros": lambda: codec("comet").encode(NOISE.relu(), facts=ZEROS),
    "comet 1d": lambda: codec("comet", prediction="1d").encode(NOISE),
    "sided": lambda: codec("sided").encode(NOISE),
    "raw": lambda: codec("dither").encode(NOISE / 0),
}
DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one longer": lambda b: torch.cat([b, b[:1]]),
    "nothing left": lambda b: b[:0].clone(),
    "another dtype": lambda b: b.double(),
    "same bytes, other dtype": lambda b: b.view(
        {1: torch.bool, 2: torch.int16, 4: torch.int32}[b.element_size()]
        if b.dtype is not torch.int16
        else torch.float16
    ),
    "another rank": lambda b: b[None],
    "not contiguous": lambda b: torch.stack([b, b], dim=-1)[..., 0],
    "another device": lambda b: b.to("meta"),
    "one shorter": lambda b: b[:-1].clone(),
}


def damaged() -> Iterator[Any]:
    for name, sample in SAMPLES.items():
        for place in range(len(sample().buffers)):
            for damage in DAMAGES:
                if damage == "another device" and len(sample().buffers) == 1:
                    continue  # then that device is where it is decoded
                yield pytest.param(name, place, damage, id=f"{name}-{place}-{damage}")


def other(encoded: Encoded, place: int, buffer: Tensor) -> Encoded:
    buffers = list(encoded.buffers)
    buffers[place] = buffer
    return replace(encoded, buffers=tuple(buffers))


@pytest.mark.parametrize(("name", "place", "damage"), list(damaged()))
def test_a_damaged_buffer_is_refused(name, place, damage):
    encoded = SAMPLES[name]()
    hurt = other(encoded, place, DAMAGES[damage](encoded.buffers[place]))
    with pytest.raises(
        CodecError, match=rf"codec '{encoded.codec.id}' cannot decode this .* of shape \(5, 700\)"
    ):
        hurt.decode()
    encoded.decode()


@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize(("name", "place"), [("dither zeros", 0), ("sided", 2)])
def test_a_bitmap_that_does_not_belong_to_its_codes(name, place, byte):
    encoded = SAMPLES[name]()
    with pytest.raises(CodecError, match=r"expected \d+ bytes of payload, as the bitmap says; got"):
        other(encoded, place, torch.full_like(encoded.buffers[place], byte)).decode()


@pytest.mark.parametrize("byte", [0, 255])
def test_a_bitmap_that_does_not_belong_to_its_values(byte):
    encoded = SAMPLES["sparse_lossless"]()
    with pytest.raises(CodecError, match=r"expected \d+ non-zeros, as the bitmap says; got \d+"):
        other(encoded, 0, torch.full_like(encoded.buffers[0], byte)).decode()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_missing_or_extra_buffer_is_refused(name):
    encoded = SAMPLES[name]()
    for buffers in ((), encoded.buffers[:-1], encoded.buffers + encoded.buffers[:1]):
        with pytest.raises(
            CodecError, match=rf"expected {len(encoded.buffers)} buffers; got {len(buffers)}"
        ):
            replace(encoded, buffers=buffers).decode()


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("shape", [(5, 701), (6, 700), (70,), (5, 700, 3), (0,), (2**31, 2**20)])
def test_a_wrong_shape_is_refused(name, shape):
    with pytest.raises(CodecError, match="cannot decode"):
        replace(
            SAMPLES[name](), shape=shape, stride=torch.empty(shape, device="meta").stride()
        ).decode()


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    "stride", [(700, 2), (1, 1), (700, 0), (701, 1), (1,), (-700, 1), (2**40, 1), ()]
)
def test_strides_with_gaps_or_overlaps_are_refused(name, stride):
    encoded = SAMPLES[name]()
    arena = torch.zeros(
        10_000, dtype=encoded.dtype
    )  # here a stride too large would read a neighbour
    for out in (None, arena[:3500]):
        with pytest.raises(
            CodecError, match=r"expected strides that order the elements of \(5, 700\)"
        ):
            replace(encoded, stride=stride).decode(out=out)


@pytest.mark.parametrize("name", SAMPLES)
def test_another_codec_cannot_decode_it(name):
    encoded = SAMPLES[name]()
    for stranger in (
        codec("dither", bits=8),
        codec("group", bits=7),
        codec("cast", to="fp8_e5m2", group_size=32),
    ):
        if not encoded.raw:
            with pytest.raises(CodecError, match=f"codec '{stranger.id}' cannot decode"):
                replace(encoded, codec=stranger, dtype=torch.float32, facts=Facts()).decode()


@pytest.mark.parametrize("name", SAMPLES)
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**32), where=st.integers(0, 2))
def test_altered_bytes_of_the_right_size_decode_to_something(name, seed, where):
    """Nothing tells them from good ones (there is no checksum), but the memory is ours."""
    encoded = SAMPLES[name]()
    place = where % len(encoded.buffers)
    if name in ("sparse_lossless", "dither zeros") and place == 0:
        place = 1  # an altered bitmap: see above
    if name == "sided" and place == 2:
        place = 0
    buffer = encoded.buffers[place]
    draw = torch.Generator().manual_seed(seed)
    random = torch.randint(0, 256, (buffer.numel() * buffer.element_size(),), generator=draw).to(
        torch.uint8
    )
    room = torch.zeros(3700, dtype=encoded.dtype)
    hurt = other(encoded, place, random.view(buffer.dtype).view(buffer.shape))
    try:
        assert hurt.decode(out=room[100:3600]).shape == (5, 700)
    except CodecError:
        assert name.startswith("comet")  # whose headers, sizes and payload know of each other
    assert not bool(room[:100].any() | room[3600:].any())
