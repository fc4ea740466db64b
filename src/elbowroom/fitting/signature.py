"""Signature of a forward that begins; forwards of one kind share a plan.

    structure  how the arguments nest; of each tensor dtype, dimensions and requires_grad; flags,
               names and None by value, but no other numbers (a step count makes no new kind);
               training or not, how many parameters are trained, autocast
    shapes     of the tensors; those far smaller than the largest have one together: their size
    bucket     structure, and of each dimension the power of 2 above it

Boxes and labels of images, say, differ in number with each batch, and hardly matter to its memory:
each on its own would make new kinds without end.

A plan is never used for another structure. Inside a bucket shapes differ by less than a factor of 2
in each dimension, and a plan made for the largest is safe for all: each tensor is known by name and
dtype, in no more bytes. A wrong guess costs time or memory, but changes no bit: tensors that are
not in the plan are held exactly.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
_SMALL = 64  # times smaller than the largest tensor


@dataclass(frozen=True)
class Signature:
    """Structure and element count of the inputs of one call of a model."""

    structure: Hashable
    shapes: tuple[Shape, ...] = ()

    @cached_property
    def bucket(self) -> Hashable:
        """Key of the plan cache: calls with the same bucket share a plan."""
        above = tuple(tuple(max(size - 1, 0).bit_length() for size in s) for s in self.shapes)
        return self.structure, above

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors, at least 1."""
        return max(sum(prod(shape) for shape in self.shapes), 1)

    def covers(self, other: "Signature") -> bool:
        """Returns whether the structures agree and no dimension of `other` is larger."""
        return self.structure == other.structure and all(
            mine >= theirs
            for one, two in zip(self.shapes, other.shapes, strict=True)
            for mine, theirs in zip(one, two, strict=True)
        )

    def joined(self, other: "Signature") -> Self:
        """Returns the least signature that covers both."""
        shapes = tuple(
            tuple(map(max, one, two)) for one, two in zip(self.shapes, other.shapes, strict=True)
        )
        return type(self)(self.structure, shapes)


def signature_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: Iterable[nn.Parameter] | None = None,
    *,
    joins_small: bool = True,
) -> Signature:
    """Returns the signature of model(*args, **kwargs).

    parameters   the model's, if they are known
    joins_small  small tensors have one shape together; otherwise each has its own
    """
    shapes: list[Shape] = []
    structure: list[Hashable] = []
    _describe((args, kwargs), structure, shapes)
    if joins_small:
        shapes = _with_small_joined(shapes, structure)
    known = model.parameters() if parameters is None else parameters
    trained = [p.requires_grad for p in known].count(True)
    mode = model.training, trained, torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")
    return Signature((tuple(structure), mode), tuple(shapes))


def _with_small_joined(shapes: list[Shape], structure: list[Hashable]) -> list[Shape]:
    """Returns the shapes of large tensors, and the size of all small ones, if there are any.

    Which ones are small becomes part of the structure.
    """
    sizes = [prod(shape) for shape in shapes]
    most = max(sizes, default=0)
    small = tuple(_SMALL * size < most for size in sizes)
    if not any(small):
        return shapes
    structure.append(small)
    large = [shape for shape, is_small in zip(shapes, small, strict=True) if not is_small]
    return [*large, (sum(compress(sizes, small)),)]


def _describe(x: Any, structure: list[Hashable], shapes: list[Shape]) -> None:
    """Appends what describes the structure of x, and the shapes of its tensors."""
    if isinstance(x, Tensor):
        shape = (x.numel(),) if x.is_nested else tuple(x.shape)
        shapes.append(shape)
        structure.append((x.dtype, len(shape), x.requires_grad))
    elif isinstance(x, (list, tuple)):
        structure.append("[")
        for value in x:
            _describe(value, structure, shapes)
        structure.append("]")
    elif x is None or isinstance(x, (bool, str)):
        structure.append(x)
    elif isinstance(x, Mapping):
        structure.append("{")
        for key, value in x.items():
            structure.append(str(key))
            _describe(value, structure, shapes)
        structure.append("}")
    else:
        structure.append(type(x).__qualname__)
