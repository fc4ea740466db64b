"""How many samples a convolution's backward takes at once."""

import pytest

from elbowroom.plan.restored import samples_at_once


@pytest.mark.parametrize(
    ("shape", "samples"),
    [
        ((128, 64, 8, 8), 128),  # 2 MiB: small enough as it is
        ((128, 128, 8, 8), 64),  # 4 MiB: two turns
        ((128, 64, 16, 16), 32),  # 8 MiB: in four turns, of 2 MiB
        ((128, 128, 16, 16), 32),  # 16 MiB: in four turns, of 4 MiB
        ((128, 256, 16, 16), 24),  # 32 MiB: 6 MiB at once, whatever there is
        ((4, 256, 64, 64), 1),  # a sample is 4 MiB
        ((1, 256, 64, 64), 1),
    ],
)
def test_a_turn_is_a_fourth_of_what_is_not_large(shape, samples):
    assert samples_at_once(shape, 4) == samples


@pytest.mark.parametrize(
    ("made", "samples"),
    [
        (0, 128),  # 2 MiB of input alone: at once
        (16 * 256, 128),  # of a result of 2 MiB, too
        (64 * 256, 32),  # 8 MiB: in four turns
        (256 * 256, 24),  # 32 MiB
    ],
)
def test_the_result_counts_where_it_is_larger(made, samples):
    assert samples_at_once((128, 16, 16, 16), 4, made) == samples
