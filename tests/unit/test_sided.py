"""The sided codec: a mask that is given, the size it promises, how much better two sides are."""

import copy
import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elbowroom.codecs import Facts, Sided, codec
from elbowroom.codecs.base import memory_order
from elbowroom.errors import CodecError, UnknownField
from elbowroom.kernels import ops
from elbowroom.kernels.layout import TILE, codes_nbytes, groups, runs


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def given_mask(x, above):
    """Facts with the bits of `above`, in memory order of x."""
    flat = memory_order(x)[0]
    return Facts(mask=ops.pack_bits(memory_order(above)[0])), flat


# --- the promised size ---

KINDS_OF_LEVELS = (2, 3, 4, 5, 8, 16, 32, 64, 128, 256)  # the others are packed like one of these


@pytest.mark.parametrize("upper", KINDS_OF_LEVELS)
def test_no_split_of_a_tile_takes_more_bytes_than_promised(upper):
    """All splits of short tiles, of all sizes near a whole one, and of some between."""
    sizes = [*range(1, 130), *range(TILE - 40, TILE + 1), *range(131, TILE - 40, 97)]
    held = {k: np.array([codes_nbytes(k, n) for n in range(TILE + 1)]) for k in KINDS_OF_LEVELS}
    for lower in KINDS_OF_LEVELS:
        cuts, found = max(runs(upper), runs(lower)), 0
        for n in sizes:
            p = np.arange(n + 1)
            more = held[upper][p] + held[lower][n - p] - held[max(upper, lower)][n]
            found = max(found, int(more.max()))
        assert found <= cuts, (upper, lower)
        assert found >= cuts - 1 or upper != lower  # not lax: a byte less would be broken


@pytest.mark.parametrize("group_size", [32, 256])
def test_no_split_takes_more_groups_than_promised(group_size):
    for n in (1, 31, 32, 33, 500, TILE - 1, TILE):
        most = max(groups(p, group_size) + groups(n - p, group_size) for p in range(n + 1))
        assert most <= groups(n, group_size) + 1


@pytest.mark.parametrize(("upper", "lower"), [(4, 2), (2, 4), (3, 8), (128, 128), (256, 5)])
@pytest.mark.parametrize("n", [1, 8, 63, 2049, 5000])
def test_the_bound_holds_for_real_masks(upper, lower, n):
    x, made = noise(n), Sided(upper, lower, 32)
    for density in (0.0, 0.01, 0.5, 0.99, 1.0):
        above = torch.rand(n, generator=torch.Generator().manual_seed(n)) < density
        facts, _ = given_mask(x, above)
        encoded = made.encode(x, facts=facts)
        assert encoded.nbytes <= made.encoded_nbytes((n,), x.dtype, facts)
        alone = made.encode(torch.where(above, x.abs(), -x.abs()))
        assert alone.nbytes <= made.encoded_nbytes((n,), x.dtype)
        assert alone.nbytes == encoded.nbytes + -(-n // 8)  # the mask that it had to make itself


def test_bits_a_value():
    """d log2 upper + (1 - d) log2 lower + 16 / group_size, and 64 bits for 2048 elements."""
    x = noise(100 * TILE)
    facts, _ = given_mask(x, x > 0)
    encoded = codec("sided").encode(x, facts=facts)
    bits = 8 * encoded.nbytes / x.numel()
    assert bits == pytest.approx(1.5 + 16 / 64 + 64 / TILE, abs=0.02)  # groups that are cut short


# --- a mask that is given ---


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_mask_of_any_tensor(data):
    shape = data.draw(st.lists(st.integers(1, 9), max_size=4)) + data.draw(
        st.sampled_from([[], [64], [300]])
    )
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    x = torch.randn(shape, generator=draw).to(dtype)
    x = x.permute(data.draw(st.permutations(range(x.dim()))))
    if x.dim() and data.draw(st.booleans()):
        x = x[:: data.draw(st.integers(1, 3))]
    above = torch.rand(x.shape, generator=draw) < data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    flat, stride = memory_order(x)
    in_order = torch.empty_like(flat, dtype=torch.bool).as_strided(x.shape, stride).copy_(above)
    mask = ops.pack_bits(memory_order(in_order)[0])
    levels = st.sampled_from([2, 3, 4, 6, 8, 17, 256])
    made = Sided(data.draw(levels), data.draw(levels), data.draw(st.sampled_from([32, 128])))
    seed = data.draw(st.integers(-(2**63), 2**64 - 1))
    encoded = made.encode(x, seed=seed, facts=Facts(mask=mask))
    y = encoded.decode()
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert encoded.nbytes <= made.encoded_nbytes(tuple(x.shape), dtype, Facts(mask=mask))
    for side, levels_there in ((above, made.upper), (~above, made.lower)):
        if bool(side.any()):
            held = x[side].double()
            reach = float(held.max() - held.min()) + 0.02 * float(held.abs().max())
            slack = 2.0**-7 * float(held.abs().max() + reach)
            worst = float((y - x)[side].double().abs().max())
            assert worst <= 0.51 * reach * (1 + 2 / 255) / (levels_there - 1) + slack


def test_a_mask_that_is_given_is_neither_copied_nor_counted():
    x = noise(4, 3, 20, 20)
    facts, _ = given_mask(x, x > 0.3)
    before = facts.mask.clone()
    encoded = codec("sided").encode(x, facts=facts)
    assert encoded.facts.mask is facts.mask
    assert len(encoded.buffers) == 2
    assert torch.equal(facts.mask, before)
    y = encoded.decode()
    for twin in (copy.deepcopy(encoded), pickle.loads(pickle.dumps(encoded))):
        assert torch.equal(twin.decode(), y)


def test_it_is_the_sign_that_it_takes_by_itself():
    x = noise(3000)
    facts, _ = given_mask(x, x > 0)
    alone = codec("sided").encode(x, seed=5)
    assert torch.equal(alone.buffers[2], facts.mask)
    assert torch.equal(alone.decode(), codec("sided").encode(x, seed=5, facts=facts).decode())


WRONG = {
    "one byte less": lambda mask: mask[:-1].clone(),
    "one byte more": lambda mask: torch.cat([mask, mask[:1]]),
    "flags": lambda mask: mask.bool(),
    "int32": lambda mask: mask.int(),
    "two dimensions": lambda mask: mask[None],
    "not contiguous": lambda mask: torch.stack([mask, mask], dim=-1)[..., 0],
    "another device": lambda mask: mask.to("meta"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_mask_of_another_tensor_is_refused(wrong):
    x = noise(30, 100)
    facts, _ = given_mask(x, x > 0)
    made = codec("sided")
    bad = Facts(mask=wrong(facts.mask))
    with pytest.raises(
        CodecError,
        match=r"'sided' was given a mask for float32 .* on cpu: expected uint8 of shape \(375,\)",
    ):
        made.encode(x, facts=bad)
    encoded = made.encode(x, facts=facts)
    with pytest.raises(CodecError, match=r"cannot decode .* \(30, 100\): expected a mask in its"):
        replace(encoded, facts=bad).decode()
    with pytest.raises(CodecError, match="expected 3 buffers; got 2"):
        replace(encoded, facts=Facts()).decode()
    encoded.decode()


@pytest.mark.parametrize("byte", [0, 255])
def test_a_mask_that_was_changed_since_is_noticed_where_it_changes_the_size(byte):
    x = noise(5000)
    facts, _ = given_mask(x, x > 0)
    encoded = codec("sided").encode(x, facts=facts)
    facts.mask.fill_(byte)
    with pytest.raises(CodecError, match="bytes of payload, as the bitmap says"):
        encoded.decode()


def test_facts_show_and_compare_without_reading_the_mask():
    mask = torch.zeros(3, dtype=torch.uint8)
    assert Facts(mask=mask) == Facts()
    assert hash(Facts(mask=mask)) == hash(Facts())
    assert "tensor" not in repr(Facts(mask=mask))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_held_raw_on_either_side(bad):
    x = noise(5000)
    x[3] = bad
    for chosen in (x > 0, x <= 0, x == x, x != x):
        facts, _ = given_mask(x, chosen)
        encoded = codec("sided").encode(x, facts=facts)
        assert encoded.raw
        assert torch.equal(encoded.decode().nan_to_num(7), x.nan_to_num(7))


# --- fields ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"upper": 1}, r"upper=1 is not possible; upper is an int from 2 to 256"),
        ({"lower": 257}, r"lower=257 is not possible; lower is an int from 2 to 256"),
        ({"lower": 2.0}, r"lower=2.0 is not possible"),
        ({"group_size": 48}, r"group_size=48 is not possible; group_size is one of 32, 64, 128"),
    ],
)
def test_fields_out_of_range(fields, message):
    with pytest.raises(UnknownField, match=message):
        codec("sided", **fields)


# --- what it is for ---


def test_fewer_bits_for_a_smaller_error_where_it_is_read():
    """Against 3 plain levels: fewer bits beside the mask, a fifth of the error above it."""
    x = noise(200 * TILE)
    facts, _ = given_mask(x, x > 0)
    sided, plain = codec("sided").encode(x, facts=facts), codec("dither", levels=3).encode(x)
    assert sided.nbytes < plain.nbytes
    errors = {}
    for name, y in (("sided", sided.decode()), ("plain", plain.decode())):
        errors[name] = [float((y - x)[side].square().mean()) for side in (x > 0, x <= 0)]
    assert errors["sided"][0] < 0.2 * errors["plain"][0]
    assert errors["sided"][1] < 1.3 * errors["plain"][1]  # 2 levels over half the range


def test_upper_and_lower_are_not_mixed_up():
    x = noise(5000)
    for upper, lower in itertools.permutations((2, 256)):
        y = Sided(upper, lower).encode(x).decode()
        fine, coarse = (x > 0, x <= 0) if upper > lower else (x <= 0, x > 0)
        assert float((y - x)[fine].abs().max()) < 0.02
        assert float((y - x)[coarse].abs().max()) > 0.5
