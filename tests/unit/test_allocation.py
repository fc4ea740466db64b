"""The allocation against every possible choice."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import elbowroom as er
from elbowroom.adaptive.base import ladder_of
from elbowroom.errors import PlanError
from elbowroom.plan.allocation import CodeChoice, cheapest, quietest

options = st.lists(
    st.builds(CodeChoice, st.integers(1, 40).map(float), st.integers(0, 40).map(float)),
    min_size=1,
    max_size=4,
)
tensors = st.lists(options, min_size=1, max_size=4)


def nbytes(tensors, chosen):
    return sum(options[i].nbytes for options, i in zip(tensors, chosen, strict=True))


def variance(tensors, chosen):
    return sum(options[i].variance for options, i in zip(tensors, chosen, strict=True))


def largest_move(tensors):
    return max(max(o.nbytes for o in options) for options in tensors)


@given(tensors, st.integers(0, 120))
def test_cheapest_keeps_the_limit_and_is_one_move_from_the_best(tensors, allowed):
    chosen = cheapest(tensors, allowed)
    every = list(product(*(range(len(options)) for options in tensors)))
    possible = [c for c in every if variance(tensors, c) <= allowed]
    if not possible:
        assert variance(tensors, chosen) == min(variance(tensors, c) for c in every)
        return
    assert variance(tensors, chosen) <= allowed
    best = min(nbytes(tensors, c) for c in possible)
    assert nbytes(tensors, chosen) <= best + largest_move(tensors)


@given(tensors, st.integers(0, 120))
def test_quietest_keeps_the_bytes_where_that_can_be(tensors, allowed):
    chosen = quietest(tensors, allowed)
    every = list(product(*(range(len(options)) for options in tensors)))
    possible = [c for c in every if nbytes(tensors, c) <= allowed]
    if not possible:
        assert nbytes(tensors, chosen) == min(nbytes(tensors, c) for c in every)
        return
    assert nbytes(tensors, chosen) <= allowed
    # On the path, no choice of as few bytes has less variance.
    same = [variance(tensors, c) for c in every if nbytes(tensors, c) <= nbytes(tensors, chosen)]
    assert variance(tensors, chosen) <= min(same) + 1e-9


def test_what_is_sensitive_stays_mild():
    variants = [(8.0, 1.0), (4.0, 16.0), (2.0, 64.0)]
    quiet = [CodeChoice(b, v) for b, v in variants]
    loud = [CodeChoice(b, 100 * v) for b, v in variants]
    assert cheapest([quiet, loud], 200.0) == [2, 0]
    assert quietest([quiet, loud], 12.0) == [1, 0]
    assert cheapest([], 1.0) == []


@pytest.mark.parametrize("name", ["dither", "group", "division", "comet", "fdsr"])
def test_ladders_hold_the_codec_and_run_from_mild_to_lean(name):
    codec = er.codec(name)
    ladder = codec.ladder()
    assert codec in ladder
    assert len(set(ladder)) == len(ladder) > 2
    if name != "comet":  # its size depends on the data
        sizes = [
            variant.encoded_nbytes((4, 8, 56, 56), er.codec("cast").dtypes[0]) for variant in ladder
        ]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("group", {"bits": 7}),
        ("dither", {"levels": 5}),
        ("fdsr", {"bands": "6/3/0", "min_numel": 0}),
        ("fdsr", {"bands": "6/3/1.6/0"}),
    ],
)
def test_a_setting_between_two_rungs_stands_between_them(name, fields):
    """At the front, where it seems the mildest, no alarm of a guard could help it."""
    codec = er.codec(name, **fields)
    ladder = ladder_of(codec)
    sizes = [
        variant.encoded_nbytes((4, 8, 56, 56), er.codec("cast").dtypes[0]) for variant in ladder
    ]
    assert ladder.index(codec) > 0
    assert sizes == sorted(sizes, reverse=True)


def test_a_codec_with_one_setting_has_no_ladder():
    with pytest.raises(PlanError, match="no ladder of settings"):
        ladder_of(er.codec("cast"))
