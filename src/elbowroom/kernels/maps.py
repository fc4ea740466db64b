"""Division of maps into blocks and ranges: arithmetic that all backends share, on plain ints.

A tensor of maps is [outer, rows, columns, inner] in memory order (`codecs/facts.py`: Maps). Each
map is cut into cells of high x wide elements from its upper left corner; cells at the right and
lower edge may be smaller. A table of cells is [outer, down, across, inner] in memory order too.

A *block* has a mean: block x block elements. A *range* has a scale and a low: reach x reach
blocks or, at reach 0, the whole map. In a map of one row, a block is a run of block^2 elements and
a range a run of reach^2 blocks, so that they take as many bytes.
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
