"""Parts of logits: some rows, or some places of maps, with all of their classes.

    rows  [rows, classes]                 a part has some rows
    maps  [samples, classes, places]      a part has some places of one sample, or some samples

Maps of any number of dimensions are taken as these.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MIN_NBYTES = 1 << 16  # of logits: fewer are not worth two nodes of ours
_PARTS = 16  # of the rows, within these bytes of one
_PART_NBYTES = 1 << 16, 1 << 20  # what a processor's cache holds
_LAUNCHED_PART_NBYTES = 1 << 24, 1 << 62
_PLACES = 64  # of which a part has a multiple, so that its vectors are those of a whole map
_MOST_PLACES = 1 << 14  # of a part, on a CPU: its labels stay in the cache, too


class Part(NamedTuple):
    """Some rows of logits [rows, classes], or some places of some samples of maps.

    All that is cut has one dimension of places, or none: [samples, classes, places].
    """

    rows: slice
    places: slice | None = None

    def of(self, x: Tensor) -> Tensor:
        """Returns the part of logits, or of what has as many dimensions."""
        return x[self.rows] if self.places is None else x[self.rows, :, self.places]

    def of_labels(self, target: Tensor) -> Tensor:
        """Returns the part of labels, or of what has one number for each of them."""
        return target[self.rows] if self.places is None else target[self.rows, self.places]


def flattened(x: Tensor) -> Tensor:
    """Returns logits, or what has their shape, with at most one dimension of places."""
    return x if x.dim() == 2 else x.reshape(*x.shape[:2], -1)


def flattened_labels(target: Tensor) -> Tensor:
    """Returns labels, or one number for each, with at most one dimension of places."""
    return target if target.dim() <= 1 else target.reshape(len(target), -1)


class Reused:
    """Memory of one part after the other: no page of it is new after the first.

    An allocator that gives pages back (glibc) would have each part fault its pages in again.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def like(self, part: Tensor, dtype: torch.dtype | None = None, use: str = "result") -> Tensor:
        """Returns contiguous memory for a part and a use, whose values are undefined."""
        room = self._rooms.get(use)
        if room is None or len(room) < part.numel():
            room = torch.empty(part.numel(), dtype=dtype or part.dtype, device=part.device)
            self._rooms[use] = room
        return room[: part.numel()].view(part.shape)


def parts_of(x: Tensor) -> Iterator[Part]:
    """All of x, a few rows or places at a time."""
    return _cut(x, _rows(x))


def coded_parts(x: Tensor, dtype: torch.dtype) -> Iterator[Part]:
    """All of x in parts, about `_PARTS` at most: equal ones, and the rest.

    Their number does not depend on that of the rows, if these are many, so that one script serves
    them all. A part has as many bytes as a tensor that is worth a code.
    """
    least = -(-MIN_NBYTES // (x.shape[1] * dtype.itemsize))
    return _cut(x, max(-(-x.numel() // (x.shape[1] * _PARTS)), least))


def _cut(x: Tensor, most: int) -> Iterator[Part]:
    """Returns parts of about so many rows, or places."""
    if x.dim() == 2:
        return map(Part, _slices(len(x), most))
    samples, _, places = x.shape
    if most >= places:
        return (Part(rows, slice(places)) for rows in _slices(samples, most // places))
    if x.device.type == "cpu":
        most = min(most, _MOST_PLACES)
    each = -(-places // -(-places // most))
    pieces = [*_slices(places, -(-each // _PLACES) * _PLACES)]
    return (Part(one, some) for one in _slices(samples, 1) for some in pieces)


def _slices(length: int, part: int) -> Iterator[slice]:
    starts = range(0, length, part)
    return (slice(start, min(start + part, length)) for start in starts)


def _rows(x: Tensor) -> int:
    """The rows, or places, of a part."""
    least, most = _PART_NBYTES if x.device.type == "cpu" else _LAUNCHED_PART_NBYTES
    nbytes = min(max(x.nbytes // _PARTS, least), most)
    return max(nbytes // (x.shape[1] * x.element_size()), 1)
