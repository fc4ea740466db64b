"""Integers in as few bytes as hold them: max-pool indices, labels, embedding ids.

int64 -> int8, uint8, int16 or int32. Lossless. The width comes from `facts.smallest` and
`facts.largest` (what the indices index has a size); without them x is scanned.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs.base import Buffers, Codec, Encoded, Expected, Layout
from elbowroom.codecs.facts import Facts
from elbowroom.kernels import ops

_TARGETS = (torch.uint8, torch.int8, torch.int16, torch.int32)


@dataclass(frozen=True)
class Narrow(Codec):
    """Exact, integers in the smallest dtype that holds `facts.smallest` to `facts.largest`.

    A tensor that breaks the promise is held raw on the CPU, where the check is free. On a GPU the
    check would be a sync, and the facts are trusted.
    """

    id: ClassVar[str] = "narrow"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int64, torch.int32, torch.int16)

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        return (Expected(_target(dtype, facts) or dtype, (n,), at_most=facts.largest is None),)

    def _complete(self, flat: Tensor, facts: Facts) -> Facts:
        if facts.largest is not None:
            return facts
        smallest, largest = torch.aminmax(flat)
        return Facts(smallest=int(smallest), largest=int(largest))

    def _encode(self, flat: Tensor, seed: int, facts: Facts) -> Buffers | None:
        target = _target(flat.dtype, facts)
        if target is None:
            return None
        small, lost = ops.narrow(flat, target)
        if flat.device.type == "cpu" and int(lost):
            return None
        return (small,)

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        out.copy_(encoded.buffers[0])


def _target(dtype: torch.dtype, facts: Facts) -> torch.dtype | None:
    """The smallest dtype that holds the promised range; None if it is not smaller than `dtype`."""
    if facts.largest is None:
        return None
    smallest = 0 if facts.smallest is None else facts.smallest
    for target in _TARGETS:
        info = torch.iinfo(target)
        if info.min <= smallest and facts.largest <= info.max and target.itemsize < dtype.itemsize:
            return target
    return None
