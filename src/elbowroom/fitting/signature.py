"""What kind of forward begins: forwards of one kind share a plan.

    structure  how the arguments nest; of each tensor dtype, dimensions and requires_grad; flags,
               names and None by value, other numbers not (a step count is no other kind);
               training or not, how many parameters are trained, autocast
    shapes     of the tensors
    bucket     structure, and of each dimension the power of 2 above it

The structure is never guessed across. Inside a bucket shapes differ by less than a factor of 2 in
each dimension, and a plan made for the largest is safe for all: each tensor is known by name and
dtype, in no more bytes. A wrong guess costs time or room, never a bit: what a plan does not know is
held exactly.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """Structure and element count of the inputs of one call of a model."""

    structure: Hashable
    shapes: tuple[Shape, ...] = ()

    @cached_property
    def bucket(self) -> Hashable:
        """Calls with the same one share a plan."""
        above = tuple(tuple(max(size - 1, 0).bit_length() for size in s) for s in self.shapes)
        return self.structure, above

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors, at least 1."""
        return max(sum(prod(shape) for shape in self.shapes), 1)

    def covers(self, other: "Signature") -> bool:
        """Whether this is the same structure, and no dimension of it is smaller."""
        return self.structure == other.structure and all(
            mine >= theirs
            for one, two in zip(self.shapes, other.shapes, strict=True)
            for mine, theirs in zip(one, two, strict=True)
        )

    def joined(self, other: "Signature") -> Self:
        """The least that covers both."""
        shapes = tuple(
            tuple(map(max, one, two)) for one, two in zip(self.shapes, other.shapes, strict=True)
        )
        return type(self)(self.structure, shapes)


def signature_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: Iterable[nn.Parameter] | None = None,
) -> Signature:
    """Of model(*args, **kwargs). parameters: the model's, if they are known."""
    shapes: list[Shape] = []
    arguments = tuple(_walk((args, kwargs), shapes))
    known = model.parameters() if parameters is None else parameters
    trained = sum(p.requires_grad for p in known)
    mode = model.training, trained, torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")
    return Signature((arguments, mode), tuple(shapes))


def _walk(x: Any, shapes: list[Shape]) -> Iterator[Hashable]:
    """What describes the structure of x; the shapes of its tensors go to `shapes`."""
    if isinstance(x, Tensor):
        shape = (x.numel(),) if x.is_nested else tuple(x.shape)
        shapes.append(shape)
        yield x.dtype, len(shape), x.requires_grad
    elif isinstance(x, Mapping):
        yield "{"
        for key, value in x.items():
            yield str(key)
            yield from _walk(value, shapes)
        yield "}"
    elif isinstance(x, list | tuple):
        yield "["
        for value in x:
            yield from _walk(value, shapes)
        yield "]"
    elif isinstance(x, bool | str | None):
        yield x
    else:
        yield type(x).__qualname__
