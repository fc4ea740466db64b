"""Sources of rows that are not made yet, read in parts (`gathered.py`, `computed_rows.py`)."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from elbowroom.errors import RestoreError

PART_NUMEL = 1 << 18  # of rows that are made at once
_VECTOR = 64  # elements: a multiple of what a vectorized loop of torch takes at once


class RowSources(NamedTuple):
    """Tensors that rows are gathered from, with the versions that they had then.

    at: the index, [E], or [E, ...] as in `torch.gather`
    """

    x: Tensor
    at: Tensor
    factor: Tensor | None
    versions: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that the rows are made of."""
        x, at, factor, _ = self
        return (x, at) if factor is None else (x, at, factor)

    def check(self) -> None:
        """Raises RestoreError if a source was changed in place since."""
        check_versions(self.tensors, self.versions)

    def part(self, part: slice = slice(None)) -> Tensor:
        """Returns a new copy of some of the rows, outside of the graph.

        Raises RestoreError if a source was changed in place since.
        """
        self.check()
        x, at, factor, _ = self
        with torch.inference_mode(False), torch.no_grad():
            at = at[part]
            rows = x.index_select(0, at) if at.dim() == 1 else x.gather(0, at)
            return rows if factor is None else factor[part] * rows

    def of(self, tensors: Iterator[Tensor]) -> "RowSources":
        """Returns the same of other tensors, such as those that backward restores."""
        return sources_of(*(None if one is None else next(tensors) for one in self[:3]))

    def with_graph(self) -> Tensor:
        """Returns all rows, with a graph, to differentiate a gradient."""
        x, at, factor, _ = self
        rows = x.index_select(0, at) if at.dim() == 1 else x.gather(0, at)
        return rows if factor is None else factor * rows


class GradientSum(NamedTuple):
    """The sum of two gradients of the same rows."""

    one: "WaitingRows"
    other: "WaitingRows"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it is made of."""
        return (*self.one.tensors, *self.other.tensors)

    def check(self) -> None:
        """Raises RestoreError if one of these was changed in place since."""
        self.one.check()
        self.other.check()

    def part(self, part: slice = slice(None)) -> Tensor:
        """Returns a part of it; raises RestoreError as `check` does."""
        return self.one.part(part) + self.other.part(part)


class WaitingRows(Protocol):
    """Interface of what makes rows that wait (`RowSources`, and those of `computed_rows.py`)."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that the rows are made of."""

    def check(self) -> None:
        """Raises RestoreError if one of these was changed in place since."""

    def part(self, part: slice = ...) -> Tensor:
        """Returns a new copy of some of the rows, outside of the graph."""


def sources_of(x: Tensor | None, at: Tensor | None, factor: Tensor | None = None) -> RowSources:
    """Returns the sources of rows, as they are now."""
    assert x is not None
    assert at is not None
    found = RowSources(x, at, factor, ())
    return found._replace(versions=versions_of(*found.tensors))


def versions_of(*tensors: Tensor) -> tuple[int, ...]:
    """Returns how often each was changed in place; -1: it does not count."""
    return tuple(-1 if x.is_inference() else x._version for x in tensors)


def check_versions(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    """Raises RestoreError if a tensor was changed in place since it had its version."""
    if versions_of(*tensors) != versions:
        raise RestoreError(
            "rows of a tensor were to be gathered when they are read, and it was changed in "
            "place before that, by code that elbowroom does not see. Change it after they are "
            "read, or copy it first (x.clone())"
        )


def parts(index: Tensor, of: torch.Size) -> Iterator[slice]:
    """The places of an index into a tensor of this shape, some at a time, all of like sizes.

    A part ends where vectors of a CPU do, whatever a row has: kernels of the elements that are left
    may round in another way, and so no more are left than of the whole.
    """
    rows = _rows_of_part(len(index), of)
    return (slice(start, start + rows) for start in range(0, len(index), rows))


def part_nbytes(rows: torch.Size, itemsize: int) -> int:
    """The bytes of the largest part of rows, whose shape is this as a whole."""
    return min(_rows_of_part(rows[0], rows), rows[0]) * rows[1:].numel() * itemsize


def _rows_of_part(count: int, of: torch.Size) -> int:
    most = max(PART_NUMEL // max(of[1:].numel(), 1), 1)
    rows = -(-count // max(-(-count // most), 1))
    return max(-(-rows // _VECTOR), 1) * _VECTOR


def assembled(rows: WaitingRows, shape: torch.Size, widest: torch.Size) -> Tensor:
    """Returns all rows in one tensor of this shape, made in parts.

    widest: the shape of the largest rows on the way
    """
    first = rows.tensors[0]
    if isinstance(rows, RowSources):
        return rows.part()
    made = torch.empty(shape, dtype=first.dtype, device=first.device)
    for part in parts(made, widest):
        made[part] = rows.part(part)
    return made
