"""Facts about the values of a tensor that are known without reading them.

They follow from the op that made the tensor and the op that saves it.
"""

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from torch import Tensor

from elbowroom.errors import CodecError
from elbowroom.kernels.windows import Window


class Maps(NamedTuple):
    """Memory order as [outer, rows, columns, inner]: element (r, c) of a map has `inner` channels.

    NCHW is [N * C, H, W, 1]; channels_last [N, H, W, C]; volumes are stacks of maps; tensors of
    fewer than four dimensions are maps of one row. outer * rows * columns * inner is always N.
    """

    outer: int
    rows: int
    columns: int
    inner: int

    @classmethod
    def along(cls, shape: tuple[int, ...], stride: tuple[int, ...], sequence: int) -> "Maps":
        """One row for each channel of a dense tensor, along one of its dimensions."""
        length, inner = shape[sequence], stride[sequence]
        return cls(prod(shape) // max(length * inner, 1), 1, length, inner)

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...]) -> "Maps":
        """The maps of a dense tensor."""
        if len(shape) < 4:
            last = shape[-1] if shape and stride[-1] == 1 else prod(shape)
            return cls(prod(shape) // max(last, 1), 1, last, 1)
        inner = shape[1] if stride[1] == 1 else 1
        rows, columns = shape[-2:] if stride[-2] >= stride[-1] else shape[:-3:-1]
        return cls(prod(shape) // max(rows * columns * inner, 1), rows, columns, inner)


@dataclass(frozen=True)
class Facts:
    """Known properties of the values of a tensor.

    A codec relies on them. If a property does not hold, this is an error of the caller, which is
    raised where it is noticed.

    has_zeros    many elements are exactly 0, and must stay 0 (outputs of ReLU or dropout)
    value        every element is 0 or this number (a mask, or the factors of dropout)
    smallest     no integer is smaller (indices: 0)
    largest      no integer is larger (indices: the size of the indexed dimension, minus one)
    window       every element is an index into a map, inside its own window of a max-pooling
    error_bound  the absolute error that a bounded codec must keep to
    sequence     the dimension, counted from the last (-1), along which neighbors are similar: -2
                 for the input of a linear layer [B, T, C], -1 for the input of conv1d [B, C, T]
    maps         the layout of the elements in memory, for codecs of maps; `encode` derives it from
                 the shape
    mask         bits [ceil(N / 8)] that the caller keeps anyway, set where the ReLU that follows
                 passes the value on; a codec may use them, and does not count their bytes
    """

    has_zeros: bool = False
    value: float | None = None
    smallest: int | None = None
    largest: int | None = None
    window: Window | None = None
    error_bound: float | None = None
    sequence: int | None = None
    maps: Maps | None = None
    mask: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raises CodecError for facts that no tensor can have. Codecs check an error bound."""
        smallest, largest = self.smallest, self.largest
        if not isinstance(smallest, int | None) or not isinstance(largest, int | None):
            raise CodecError(
                f"facts: smallest and largest are ints; got {smallest!r} and {largest!r}"
            )
        if smallest is not None and largest is not None and smallest > largest:
            raise CodecError(f"facts: smallest={smallest} is above largest={largest}")
        if type(self.has_zeros) is not bool:
            raise CodecError(f"facts: has_zeros={self.has_zeros!r} is not True or False")


NOTHING = Facts()
