"""When constants of a program, and what objects contain, count as the same."""

import pytest

from elbowroom.runtime.contents import are_equal


@pytest.mark.parametrize(
    ("x", "y"),
    [
        *((0.0, -0.0), (1, 1.0), (1, True), (0, False), (0.0, False), ("1", 1)),
        *((complex(0.0, 1.0), complex(-0.0, 1.0)), (complex(1.0, 0.0), complex(1.0, -0.0))),
    ],
)
def test_constants_that_compute_another_result_are_not_equal(x, y):
    assert not are_equal(x, y)
    assert are_equal(x, x)
    assert are_equal(y, y)


def test_a_constant_that_is_no_number_equals_itself():
    assert are_equal(float("nan"), float("nan"))
    assert are_equal(complex("nan"), complex("nan"))
