"""Geometries of tensors that have another number of rows in each forward.

A mixture of experts gives an expert as many rows as there are tokens that chose it. Two forwards of
it differ in these numbers alone. A script of both has a `Size` in their place, which the first
tensor that is compared in a forward sets, and by which all later ones are measured. What a tensor
is a view of is not compared, but its storage tells how many elements it has.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain
from math import prod
from sys import maxsize
from typing import Any, NamedTuple

from torch import Tensor

from elbowroom.runtime.slot import Geometry

UNSET = -1  # a size that no tensor of this forward has set so far
FEWEST = 2  # rows: of a dimension of one element the stride is any number


class Size(NamedTuple):
    """Number of rows that differs from forward to forward.

    nth      index among the sizes of the script
    minimum  fewest rows that the script is valid for
    maximum  most rows that it is valid for: a small tensor that is kept may be worth a code where
             it has more rows
    """

    nth: int
    minimum: int = FEWEST
    maximum: int = maxsize


class Varying(Geometry):
    """Geometry in which some numbers are a `Size`."""

    __slots__ = ()

    @property
    def sizes(self) -> set[int]:
        """Sizes that it has, by number."""
        return {one.nth for one in self.numbers if isinstance(one, Size)}

    @property
    def numbers(self) -> Sequence[Any]:
        """Shape, strides and offset in a row."""
        return (*self.shape, *self.stride, self.offset)

    def fits(self, sizes: list[int], x: Tensor) -> bool:
        """Returns whether x has this geometry. It tells those of the sizes that are not set."""
        if x.dim() != len(self.shape):
            return False
        for want, got in zip(self.shape, x.shape, strict=True):
            if isinstance(want, Size) and not want.minimum <= got <= want.maximum:
                return False
        found: Any = chain(x.shape, x.stride(), (x.storage_offset(),))
        for want, got in zip(self.numbers, found, strict=True):
            if not isinstance(want, Size):
                if want != got:
                    return False
            elif sizes[want.nth] != got:
                if sizes[want.nth] != UNSET:
                    return False
                sizes[want.nth] = got
        return True

    def unknown(self, known: Container[int]) -> Size | None:
        """Returns the size that is not known, where there is one, which a number of elements tells.

        None: all are known, or there are more than one, or it is (part of) a stride, too.
        """
        unknown = [one for one in self.numbers if isinstance(one, Size) and one.nth not in known]
        shape: tuple[Any, ...] = self.shape
        return unknown[0] if len(unknown) == 1 and unknown[0] in shape else None

    def covers(self, sizes: list[int], numel: int) -> bool:
        """Returns whether it has so many elements. It tells the size that is not set."""
        numbers: list[Any] = list(self.shape)
        for unset in numbers:
            if number_now(unset, sizes) == UNSET:
                others = [number_now(one, sizes) for one in numbers if one is not unset]
                rows = numel // max(prod(others), 1)
                if not unset.minimum <= rows <= unset.maximum:
                    return False
                sizes[unset.nth] = rows
        return numel == prod(number_now(one, sizes) for one in numbers)

    def now(self, sizes: list[int]) -> Geometry:
        """Returns the geometry that it is in a forward with these sizes, all of which are set."""
        return Geometry(
            tuple([number_now(one, sizes) for one in self.shape]),
            tuple([number_now(one, sizes) for one in self.stride]),
            number_now(self.offset, sizes),
        )


def number_now(number: Any, sizes: list[int]) -> int:
    """Returns what a number, or a `Size`, is in a forward with these sizes."""
    return sizes[number.nth] if isinstance(number, Size) else number


def now(geometry: Geometry, sizes: list[int]) -> Geometry:
    """Returns the geometry that this one is in a forward with these sizes."""
    return geometry.now(sizes) if isinstance(geometry, Varying) else geometry
