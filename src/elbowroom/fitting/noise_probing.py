"""This module says what it takes to watch the codes of a plan."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elbowroom.plan.plan import Plan

_LARGEST_TENSORS = 5  # that a watched step takes beside what it holds, or a little more


def room_nbytes(plan: "Plan") -> int:
    """Returns the bytes that a watched step may take beyond this plan's.

    Looking at a tensor takes it once more, and an op that is probed runs again in backward.
    """
    return _LARGEST_TENSORS * plan.largest_nbytes
