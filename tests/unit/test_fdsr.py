"""What the contract does not say of fdsr: its fields, its size, what it passes through, damage."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.codecs import codec
from elbowroom.codecs.facts import Maps
from elbowroom.codecs.fdsr import VARIANTS
from elbowroom.errors import CodecError, UnknownField


def maps(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).cumsum(-1)
    return x.to(dtype)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"bands": "8/9"}, "bands='8/9' is not possible; bands are widths joined by '/': 0, 1.6,"),
        ({"bands": ""}, "bands='' is not possible"),
        ({"bands": 8}, "bands=8 is not possible"),
        ({"bands": "0"}, "only the last width may be 0"),
        ({"bands": "8/0/4"}, "only the last width may be 0"),
        ({"bands": "8/1"}, "one bit has no level at 0: 1.6, or rounding='dither'"),
        ({"rounding": "up"}, "rounding is one of 'nearest', 'dither'"),
        ({"block": 5}, "block is one of 0, 8, 7, 4"),
        ({"bands": "8/2", "reuse": True}, "leave nothing; end them with '/0'"),
        ({"rho": 0.5}, "set reuse=True"),
        ({"reuse": True, "rho": 0.0}, "rho is a float above 0 and at most 1"),
        ({"reuse": True, "rho": 1}, "rho is a float above 0 and at most 1"),
        ({"min_numel": -1}, "min_numel is an int from 0"),
    ],
)
def test_a_wrong_field_is_refused(fields, told):
    with pytest.raises(UnknownField) as refused:
        codec("fdsr", **fields)
    assert told in str(refused.value)
    assert "codec 'fdsr'" in str(refused.value)


@pytest.mark.parametrize(
    ("shape", "raw"),
    [
        ((4, 16, 16, 16), False),
        ((4, 16, 16, 15), True),  # fewer than 2^14
        ((64, 128, 3, 3), True),
        ((64, 64, 4, 4), False),
        ((2, 4, 9, 16, 16), False),
        ((128, 1024), True),
        ((16, 16, 1024), True),
        ((20_000,), True),
    ],
)
def test_what_has_no_bands_is_held_exactly(shape, raw):
    x = maps(*shape)
    encoded = codec("fdsr").encode(x)
    assert encoded.raw is raw
    assert encoded.nbytes == codec("fdsr").encoded_nbytes(shape, x.dtype)
    assert torch.equal(encoded.decode(), x) is raw


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (3, 9, 20, 20))),
    last=st.booleans(),
    block=st.sampled_from([0, 4, 7, 8]),
    fields=st.sampled_from(
        [{}, {"bands": "4/1.6", "rounding": "dither"}, {"bands": "6/0", "reuse": True, "rho": 0.3}]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_map_comes_back_in_its_shape_at_the_size_told(shape, last, block, fields, dtype):
    x = maps(*shape, dtype=dtype)
    if last:
        x = x.to(memory_format=torch.channels_last)
    c = codec("fdsr", block=block, min_numel=0, **fields)
    encoded = c.encode(x, seed=4)
    y = encoded.decode()
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    assert bool(y.isfinite().all())
    if not last:
        assert encoded.nbytes == c.encoded_nbytes(shape, dtype)
    scale = float(x.abs().max())
    assert float((y.float() - x.float()).abs().max()) <= 8 * scale + 1e-6


def test_channels_last_costs_what_contiguous_costs_and_codes_the_same():
    """Tiles are numbered plane by plane in either format, so the noise is the same too."""
    x = maps(2, 16, 24, 32)
    c = codec("fdsr", bands="4/1.6", rounding="dither")
    a, b = c.encode(x, seed=1), c.encode(x.to(memory_format=torch.channels_last), seed=1)
    assert all(torch.equal(p, q) for p, q in zip(a.buffers, b.buffers, strict=True))
    assert torch.equal(a.decode(), b.decode())


def test_the_number_of_threads_changes_no_bit():
    x = maps(8, 32, 28, 28)
    before = torch.get_num_threads()
    try:
        for fields in ({}, {"bands": "6/0", "reuse": True, "rho": 0.5}):
            found = []
            for threads in (1, 2):
                torch.set_num_threads(threads)
                encoded = codec("fdsr", **fields).encode(x)
                found.append((*encoded.buffers, encoded.decode()))
            assert all(map(torch.equal, *found))
    finally:
        torch.set_num_threads(before)


def test_the_seed_matters_to_dither_alone():
    x = maps(4, 16, 16, 16)
    for rounding, bands in (("dither", "4/1.6"), ("nearest", "4/1.6")):
        c = codec("fdsr", rounding=rounding, bands=bands)
        y, z = (c.encode(x, seed=seed).decode() for seed in (1, 2))
        assert torch.equal(y, z) is (rounding == "nearest")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_damage_is_refused_or_stays_inside(place):
    x = maps(4, 16, 16, 16)
    c = codec("fdsr", bands="6/3/0", reuse=True, rho=0.5)
    encoded = c.encode(x)
    buffers = list(encoded.buffers)
    for hurt in (buffers[place][:-1], buffers[place].double(), buffers[place][:, :-1]):
        with pytest.raises(CodecError, match="codec 'fdsr' cannot decode this"):
            replace(encoded, buffers=(*buffers[:place], hurt, *buffers[place + 1 :])).decode()
    draw = torch.Generator().manual_seed(place)
    words = torch.randint(0, 256, (buffers[place].nbytes,), generator=draw).to(torch.uint8)
    other = words.view(buffers[place].dtype).view(buffers[place].shape)
    room = torch.zeros(x.numel() + 200)
    hurt = replace(encoded, buffers=(*buffers[:place], other, *buffers[place + 1 :]))
    hurt.decode(out=room[100:-100])
    assert not bool(room[:100].any() | room[-100:].any())


def test_maps_that_do_not_fit_the_shape_are_refused():
    encoded = codec("fdsr").encode(maps(4, 16, 16, 16))
    for wrong in (None, Maps(64, 8, 32, 1), Maps(1, 2**20, 2**20, 1)):
        with pytest.raises(CodecError):
            replace(encoded, facts=replace(encoded.facts, maps=wrong)).decode()


def test_rungs_are_fdsr_settings_that_can_be_told_apart():
    assert len(set(VARIANTS)) == len(VARIANTS) >= 8
    assert all(codec(**variant.config()) == variant for variant in VARIANTS)
