"""Sizes and times, read and shown."""

import numpy as np
import pytest
import torch

from elbowroom.units import (
    Share,
    parse_budget,
    parse_nbytes,
    show_at_least,
    show_nbytes,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (6442450944, 6442450944),
        ("6 GiB", 6 * 2**30),
        ("6GiB", 6 * 2**30),
        ("6gib", 6 * 2**30),
        ("  512 MB ", 512 * 10**6),
        ("1.5g", 1_500_000_000),
        ("0.5 KiB", 512),
        ("1e3", 1000),
        ("17 bytes", 17),
        ("2T", 2 * 10**12),
        (6e9, 6 * 10**9),
        (0.8 * 2**30, 858993459),  # parts of a byte are dropped
        (np.int64(7), 7),
        (np.float32(1e6), 10**6),
    ],
)
def test_sizes_that_people_write(text, nbytes):
    for parse in (parse_nbytes, parse_budget):
        assert parse(text) == nbytes
        assert type(parse(text)) is int


_WRONG = ["", "much", "6 potatoes", "-1 GiB", "0", "6 GiBs", "1e999", "nan", "inf", 0, -5, 0.0]
_WRONG += [-6e9, float("nan"), float("inf"), True, None, [], [1.0], b"6GiB", 1j, "0.5 B", "1,5 GiB"]


@pytest.mark.parametrize("wrong", [*_WRONG, 0.9, "0.9", "80%"])
def test_what_is_no_size_is_refused(wrong):
    with pytest.raises(ValueError, match=r'size.* or a string such as "6 GiB"$'):
        parse_nbytes(wrong)


@pytest.mark.parametrize("wrong", [*_WRONG, np.ones(2), torch.ones(2)])
def test_what_is_no_budget_is_refused_with_all_that_is_possible(wrong):
    with pytest.raises(ValueError, match=r'6e9.*"6 GiB"; or a share .*, as 0\.8 or "80%"$'):
        parse_budget(wrong)


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        (0.8, 0.8),
        ("0.8", 0.8),
        (" .8 ", 0.8),
        ("80%", 0.8),
        ("80 %", 0.8),
        ("12.5%", 0.125),
        ("1%", 0.01),
        ("100%", 1.0),
        (np.float64(0.5), 0.5),
    ],
)
def test_shares_that_people_write(text, fraction):
    assert parse_budget(text) == Share(pytest.approx(fraction))


@pytest.mark.parametrize("unclear", [1.0, "1", "1.0", np.float32(1)])
def test_one_byte_or_all_of_it(unclear):
    with pytest.raises(ValueError, match=r'bytes or a share of the device; write "100%" for the'):
        parse_budget(unclear)


@pytest.mark.parametrize("few", ["80", 80.0, "1.5"])
def test_a_few_bytes_are_meant_otherwise(few):
    with pytest.raises(ValueError, match="could be bytes or a share of the device"):
        parse_budget(few)


@pytest.mark.parametrize("wrong", ["0%", "101%", "1e999%"])
def test_what_is_no_share_is_refused(wrong):
    with pytest.raises(ValueError, match=r'is no share .* above 0 and up to "100%"'):
        parse_budget(wrong)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 2**20, "100 MiB"),
        (6 * 2**30, "6.00 GiB"),
        (5 * 2**40, "5120 GiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_shown_in_powers_of_1024(nbytes, text):
    assert show_nbytes(nbytes) == text


def test_what_is_shown_can_be_read_back():
    for nbytes in (1, 1000, 123_456, 10**9, 2**33 + 1):
        assert parse_nbytes(show_nbytes(nbytes)) == pytest.approx(nbytes, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3e-6, "3 us"), (0.00342, "3.4 ms"), (0.9, "900.0 ms"), (1.5, "1.50 s"), (95, "1 min 35 s")],
)
def test_seconds_for_people(seconds, text):
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (9_469_000, "9.031 MiB"),  # where "10 MiB" was named, plain training took 8.28
        (10 * 2**20, "10 MiB"),
        (10 * 2**20 + 1, "10.01 MiB"),
        (345 * 2**20 + 1, "345.1 MiB"),
        (6 * 2**30, "6 GiB"),
        (1234 * 2**30 - 1, "1234 GiB"),
        (100 * 2**20, "100 MiB"),
        (1, "0.001 KiB"),
    ],
)
def test_a_budget_that_is_named_is_short_and_no_larger_than_it_need_be(nbytes, shown):
    assert show_at_least(nbytes) == shown


def test_a_budget_that_is_named_is_enough():
    sizes = np.exp(np.random.default_rng(0).uniform(np.log(1024), np.log(2**41), 3000))
    for nbytes in map(int, sizes):
        for size in (nbytes, parse_nbytes(show_at_least(nbytes))):
            assert size <= parse_nbytes(show_at_least(size)) <= 1.001 * size + 1


@pytest.mark.parametrize("size", ["-5MiB", " -5 MiB", "-5", -5])
def test_a_negative_size_is_called_that(size):
    with pytest.raises(ValueError, match="is positive; got"):
        parse_nbytes(size)
