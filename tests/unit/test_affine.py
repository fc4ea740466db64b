"""Two affines by channel as one: where the channels of one split those of the other."""

import pytest
import torch

from elbowroom.codecs import Affine


def affine(channels, inner, seed=0):
    draw = torch.Generator().manual_seed(seed)
    scale, shift = torch.randn(2, channels, generator=draw)
    return Affine(scale, shift, inner)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((6, 10), (6, 10)),
        ((6, 1), (6, 1)),
        ((3, 20), (6, 10)),
        ((6, 10), (2, 30)),
        ((1, 1), (6, 10)),
        ((6, 10), (1, 1)),
        ((1, 7), (6, 1)),
        ((1, 1), (1, 5)),
        ((1, 60), (60, 1)),
    ],
)
def test_one_after_the_other_is_one(one, other):
    one, other = affine(*one), affine(*other, seed=1)
    x = torch.randn(300)
    both = one.then(other)
    torch.testing.assert_close(both.of(x), other.of(one.of(x)))
    bits = torch.full((38,), 0b01010101, dtype=torch.uint8)
    expected = torch.where(torch.arange(300) % 2 == 0, both.of(x), 0.0)
    both.in_place(x, bits)
    assert torch.equal(x, expected)


@pytest.mark.parametrize(
    ("one", "other"), [((6, 10), (60, 10)), ((2, 3), (3, 2)), ((6, 10), (10, 6)), ((4, 1), (6, 1))]
)
def test_channels_that_do_not_split_each_other(one, other):
    assert affine(*one).then(affine(*other)) is None
    assert affine(*other).then(affine(*one)) is None


def test_the_identity_changes_nothing():
    x, one = torch.randn(100), affine(5, 4)
    identity = Affine.identity(x.device)
    assert torch.equal(identity.of(x), x)
    for both in (one.then(identity), identity.then(one)):
        assert all(torch.equal(a, b) for a, b in zip(both[:2], one[:2], strict=True))
        assert both.inner == one.inner
