"""Division of maps into blocks and ranges: arithmetic that all backends share, on plain ints.

A tensor of maps is [outer, rows, columns, inner] in memory order (`codecs/facts.py`: Maps). Cells
of high x wide elements are laid over each map from its upper left corner; those at the right and
lower edge hold what is left. A table of cells is [outer, down, across, inner] in memory order too.

A *block* has a mean: block x block elements. A *range* has a scale and a low: reach x reach
blocks, or, at reach 0, the map. In a map of one row both are as many elements in a run (block^2,
reach^2 blocks), so that they cost the same.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Cells(NamedTuple):
    """Cells of high x wide elements over every map."""

    outer: int
    rows: int
    columns: int
    inner: int
    high: int
    wide: int

    @property
    def table(self) -> tuple[int, int, int, int]:
        """The shape of a table with one entry a cell."""
        return self.outer, -(-self.rows // self.high), -(-self.columns // self.wide), self.inner

    @property
    def entries(self) -> int:
        outer, down, across, inner = self.table
        return outer * down * across * inner


def blocks(maps: Sequence[int], block: int) -> Cells:
    """maps (outer, rows, columns, inner) -> the blocks that have a mean each."""
    outer, rows, columns, inner = maps
    high, wide = (1, block * block) if rows == 1 else (block, block)
    return Cells(outer, rows, columns, inner, high, wide)


def ranges(maps: Sequence[int], block: int, reach: int) -> Cells:
    """The ranges that have a scale and a low each; a range holds whole blocks."""
    cells = blocks(maps, block)
    if reach == 0:
        return cells._replace(high=max(cells.rows, 1), wide=max(cells.columns, 1))
    if cells.rows == 1:
        return cells._replace(wide=cells.wide * reach * reach)
    return cells._replace(high=cells.high * reach, wide=cells.wide * reach)
