"""What a site knows of a tensor without looking at it.

It is known from the op that made the tensor and the op that saves it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Promises about the values.

    A codec trusts them; a false one is the caller's error, refused where it is noticed.

    has_zeros    many elements are exactly 0, and they matter (the output of ReLU, of dropout)
    value        every element is 0 or this number (a mask; what dropout multiplies with)
    smallest,
    largest      no integer lies outside (indices: 0 and the size of what they index, minus one)
    error_bound  an absolute error that a bounded codec must keep to
    """

    has_zeros: bool = False
    value: float | None = None
    smallest: int | None = None
    largest: int | None = None
    error_bound: float | None = None


NOTHING = Facts()
