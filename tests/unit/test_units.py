"""Sizes and times, read and shown."""

import pytest

from elbowroom.units import parse_nbytes, show_nbytes, show_seconds


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
    ],
)
def test_sizes_that_people_write(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "wrong",
    ["", "much", "-1 GiB", "0", "0.9", "6 GiBs", "1e999", "nan", "inf", 0, -5, True, 0.9, None],
)
def test_what_is_no_size_is_refused(wrong):
    with pytest.raises(ValueError, match=r"size"):
        parse_nbytes(wrong)


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
