"""Rows whose own size a backward divides by: RMSNorm and LayerNorm written out, for two.

    y = x * rsqrt(mean(x^2) + eps)        over each row of x

Its gradient multiplies what a code adds to a row by 1 / rms of that row: harmless where the error
is small against the row, and a row of zeros (a padding token's embedding) has an rms of sqrt(eps).
Codes know nothing of rows. A group of 64 reaches from a row of 96 into the next one, whose size
then sets the step (gErr2 4e13 by rows of zeros), and `dither` rounds the lowest value of a group by
the range of its tile of 2048. So such rows are coded as what a norm would make of them,
(x - mean) / std, each by its own (`runtime/normal.py`), at 6 bytes a row.

Other readers meet the large gradients that such a norm makes: of them it is enough that a step
belongs to one row, by groups that fill whole rows where there are any.
"""

from dataclasses import replace
from math import prod
from typing import NamedTuple

from elbowroom.codecs import Cast, Codec, Group
from elbowroom.kernels.layout import GROUP_SIZES

LEAST_WIDTH = 8  # elements: what is shorter is no row of a norm, and 6 bytes for each cost too much
LEAST_FEATURES = 32  # ... of readers that do not divide by the size themselves
_LEAST_GROUP = min(GROUP_SIZES)
_NBYTES = 6  # of a row: a mean in float32, 1 / std in bfloat16


class Rows(NamedTuple):
    """The layout of rows: all of them as a dense tensor whose last dimension is one row."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what the rows are normalized by."""
        return _NBYTES * prod(self.shape[:-1])

    def are_kept_apart(self, codec: Codec) -> bool:
        """Returns whether what the codec adds to a row depends on this row alone."""
        if codec.lossless or (isinstance(codec, Cast) and not codec.to.startswith("fp8")):
            return True
        return isinstance(codec, Cast | Group) and self._are_filled(codec.group_size)

    def coded(self, codec: Codec, *, by_size: bool) -> "tuple[Codec, Rows | None]":
        """The codec to take for these rows, and they themselves if they are to be normalized.

        by_size: the reader divides by the size of each row
        """
        if self.are_kept_apart(codec):
            return codec, None
        size = getattr(codec, "group_size", 0)
        if by_size or not size:
            return codec, self
        if self._are_filled(size):
            return codec, None
        if self._are_filled(_LEAST_GROUP):
            return replace(codec, group_size=_LEAST_GROUP), None  # type: ignore[call-arg]
        return codec, self

    def _are_filled(self, group_size: int) -> bool:
        """Returns whether each row has whole groups."""
        return self.stride[-1] == 1 and self.shape[-1] % group_size == 0
