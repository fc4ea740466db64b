"""Drop: nothing is held.

For a forward that goes on only to count what a budget would have to be.
"""

from torch import Tensor

from elbowroom.errors import NothingHeld


class DropHandle:
    """Holds nothing, and cannot be restored."""

    __slots__ = ()

    nbytes = 0
    exact = True  # as far as anything that is made from it may know: nothing will be
    label = "drop"

    def restore(self, *, private: bool = False) -> Tensor:
        raise NothingHeld(
            "this forward held nothing, to find out what its budget would have to be; "
            "its graph cannot run backward"
        )
