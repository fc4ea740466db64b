"""Memory that is needed to measure the noise of a plan's codes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elbowroom.plan.plan import Plan

_LARGEST_TENSORS = 5  # upper estimate of the additional memory of a watched step


def room_nbytes(plan: "Plan") -> int:
    """Returns the bytes that a watched step may need beyond this plan's peak.

    Probing copies a tensor, and runs its op a second time in backward.
    """
    return _LARGEST_TENSORS * plan.largest_nbytes
