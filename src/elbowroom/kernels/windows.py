"""Windows of max-pooling as plain ints, shared by all backends.

    index = (oy * stride_y - padding_y + dy * dilation_y) * columns + (the same of x)
    place = dy * kernel_x + dx                       below kernel_y * kernel_x

The output's own coordinates oy, ox are known, so only the place has to be held: 4 bits for a window
of 3 x 3, 2 for 2 x 2. Places lie in bytes one after the other, low bits first.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """Windows in an input of so many columns: each setting for rows, then columns."""

    columns: int
    kernel_y: int
    kernel_x: int
    stride_y: int
    stride_x: int
    padding_y: int
    padding_x: int
    dilation_y: int
    dilation_x: int

    @property
    def step_y(self) -> int:
        """Distance, in indices, between two neighbors in a column of a window."""
        return self.dilation_y * self.columns

    @property
    def bits(self) -> int:
        """Bits of a place: 1, 2, 4 or 8; 0 if places are ambiguous, or need more bits.

        They are ambiguous if one row of a window reaches as far as the beginning of its next row.
        """
        if (self.kernel_x - 1) * self.dilation_x >= self.step_y:
            return 0
        return next((b for b in (1, 2, 4, 8) if self.kernel_y * self.kernel_x <= 1 << b), 0)

    def nbytes(self, n: int) -> int:
        """Bytes of n packed places."""
        return -(-n * self.bits // 8)


def window_of(settings: Sequence[int]) -> Window:
    """Returns a `Window` of the settings that an op is given."""
    return Window(*settings)
