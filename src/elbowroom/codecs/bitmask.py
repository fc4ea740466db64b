"""Encodes tensors that hold 0 and one other value in one bit an element.

    x [N] --> bits [ceil(N / 8)] uint8        element i is bit i % 8 of byte i // 8

Such tensors are masks, and the factors of dropout. Lossless: 8x smaller than a bool mask, 32x
smaller than dropout's float32 {0, 1 / (1 - p)}.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs.base import FLOATS, Buffers, Codec, Encoded, Expected, Layout, Seed
from elbowroom.codecs.facts import Facts
from elbowroom.codecs.graph_form import GraphForm
from elbowroom.errors import UnsupportedTensor
from elbowroom.kernels import aten, ops

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class BitMask(Codec):
    """Lossless: 1 bit per element, for bool masks, 0/1 tensors and dropout's {0, c}.

    `facts.value` is the value that is not 0. Without it, x is scanned, which costs a pass and, on a
    GPU, a sync. A tensor with a third value (or a -0.0) is then refused.
    """

    id: ClassVar[str] = "bitmask"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bool, *_INTEGERS, *FLOATS, torch.float64)

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        return (Expected(torch.uint8, (-(-n // 8),)),)

    def _complete(self, flat: Tensor, facts: Facts) -> Facts:
        if facts.value is not None:
            return facts
        facts = Facts(value=1.0 if flat.dtype is torch.bool else _scan(flat))
        again = torch.empty_like(flat)
        ops.unpack_bits(ops.pack_bits(flat), facts.value, again)
        if not torch.equal(again.view(torch.uint8), flat.view(torch.uint8)):
            raise UnsupportedTensor(
                "codec 'bitmask' takes tensors with one value besides 0; this one of shape "
                f"{tuple(flat.shape)} has others. Use 'sparse_lossless' or 'narrow' to stay exact."
            )
        return facts

    def graph_form(self, facts: Facts) -> GraphForm | None:
        """See `Codec.graph_form`. None where the value that is not 0 is not known."""
        value = facts.value
        if value is None:
            return None
        return GraphForm(
            lambda x, seed: (ops.pack_bits(x),),
            lambda buffers, seed, out: ops.unpack_bits(buffers[0], value, out),
            (
                lambda x, seed: (aten.pack_bits(x),),
                lambda buffers, seed, n, dtype: aten.unpack_bits(buffers[0], value, n, dtype),
            ),
        )

    def _encode(self, flat: Tensor, seed: Seed, facts: Facts) -> Buffers | None:
        return (ops.pack_bits(flat),)

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        ops.unpack_bits(encoded.buffers[0], encoded.facts.value, out)


def _scan(flat: Tensor) -> float:
    """Returns the value of the first element that is not 0; 1 if there is none."""
    first = int((flat != 0).to(torch.uint8).argmax())
    return float(flat[first]) or 1.0
