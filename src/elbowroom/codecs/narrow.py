"""Integers in as few bytes as hold them: max-pool indices, labels, embedding ids.

int64 -> int8, uint8, int16 or int32. Lossless. The width comes from `facts.smallest` and
`facts.largest`, such as the size of the indexed dimension; without them x is scanned. Indices of
max-pooling (`facts.window`) take 1 to 8 bits: their place inside the window (`kernels/windows.py`).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs.base import Buffers, Codec, Encoded, Expected, Layout, Seed
from elbowroom.codecs.facts import Facts, Maps
from elbowroom.codecs.graph_form import GraphForm, converted
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import would_wait

_TARGETS = (torch.uint8, torch.int8, torch.int16, torch.int32)


@dataclass(frozen=True)
class Narrow(Codec):
    """Lossless: integers in the smallest integer dtype that holds all of them.

    `facts.smallest` and `facts.largest` give the dtype. With `facts.window`, the indices of
    max-pooling take 1 to 8 bits. If values are outside of these facts, the tensor is stored raw on
    the CPU, where the check is free. On a GPU, where the check would be a sync, the facts are not
    checked.
    """

    id: ClassVar[str] = "narrow"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int64, torch.int32, torch.int16)

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        if facts.window is not None:
            return (Expected(torch.uint8, (facts.window.nbytes(n),)),)
        return (Expected(_target(dtype, facts) or dtype, (n,), at_most=facts.largest is None),)

    def _seen(self, shape: tuple[int, ...], stride: tuple[int, ...], facts: Facts) -> Facts:
        if facts.window is None:
            return facts
        of_maps = len(shape) == 4 and stride[-2] >= stride[-1]
        of_rows = len(shape) == 3 and facts.window.kernel_y == 1
        if not (of_maps or of_rows) or not facts.window.bits:
            return replace(facts, window=None)
        return replace(facts, maps=Maps.of(shape, stride))

    def _complete(self, flat: Tensor, facts: Facts) -> Facts:
        if facts.largest is not None or facts.window is not None:
            return facts
        smallest, largest = torch.aminmax(flat)
        return Facts(smallest=int(smallest), largest=int(largest))

    def graph_form(self, facts: Facts) -> GraphForm | None:
        """See `Codec.graph_form`. None where the range of the values is not known."""
        known = _smallest_dtype(facts) if facts.window is None else None
        return None if known is None else converted(known)

    def _encode(self, flat: Tensor, seed: Seed, facts: Facts) -> Buffers | None:
        if facts.window is not None:
            assert facts.maps is not None
            packed, lost = ops.places_pack(flat, facts.window, facts.maps)
            return None if not would_wait(flat) and int(lost) else (packed,)
        target = _target(flat.dtype, facts)
        if target is None:
            return None
        small, lost = ops.narrow(flat, target)
        if not would_wait(flat) and int(lost):
            return None
        return (small,)

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        window, maps = encoded.facts.window, encoded.facts.maps
        if window is None:
            out.copy_(encoded.buffers[0])
        else:
            assert maps is not None
            ops.places_unpack(encoded.buffers[0], window, maps, out)


def _target(dtype: torch.dtype, facts: Facts) -> torch.dtype | None:
    """The smallest dtype that holds the promised range; None if it is not smaller than `dtype`."""
    target = _smallest_dtype(facts)
    return target if target is not None and target.itemsize < dtype.itemsize else None


def _smallest_dtype(facts: Facts) -> torch.dtype | None:
    """The smallest dtype that holds the promised range; None: there is none, or it is not known."""
    if facts.largest is None:
        return None
    smallest = 0 if facts.smallest is None else facts.smallest
    for target in _TARGETS:
        info = torch.iinfo(target)
        if info.min <= smallest and facts.largest <= info.max:
            return target
    return None
