"""Group quantization with stochastic rounding, our baseline.

It is what ActNN (arXiv 2104.14129) and GACT (arXiv 2206.11357) do. Per group of `group_size`, with
low and step in bf16:

    code = floor((x - low) / step + u)
    x~   = low + step * code

Unbiased; variance step^2 f (1 - f) at remainder f, step^2 / 6 on average. Exact zeros become
noisy zeros: a tensor that also serves ReLU's backward needs a bitmap beside it. It takes
bits + 32 / group_size bits an element.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs._checks import finite, one_of, within
from elbowroom.codecs.affine import ABSENT, Affine
from elbowroom.codecs.base import FLOATS, PART, Buffers, Codec, Encoded, Expected, Layout, Seed
from elbowroom.codecs.facts import Facts
from elbowroom.codecs.graph_form import GraphForm
from elbowroom.kernels import aten, ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.kernels.layout import GROUP_SIZES, groups, packed_nbytes


@dataclass(frozen=True)
class Group(Codec):
    """Lossy: `bits` (1 to 8) per element, min and max per group, stochastic rounding.

    This is the baseline of ActNN and GACT. A tensor with a NaN, an Inf or a value beyond 2^125 is
    stored raw on the CPU. On a GPU, where the check would be a sync, its groups decode to NaN.
    """

    id: ClassVar[str] = "group"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS
    has_parts: ClassVar[bool] = True

    bits: int = 2
    group_size: int = 256

    def __post_init__(self) -> None:
        within(self.id, "bits", self.bits, 1, 8)
        one_of(self.id, "group_size", self.group_size, GROUP_SIZES)

    @classmethod
    def settings(cls) -> tuple[Codec, ...]:
        # Not 1: its error is 7 to 12 times the tensor's own square.
        return tuple(cls(bits=bits) for bits in (8, 6, 4, 3, 2))

    def ladder(self) -> tuple[Codec, ...]:
        return tuple(replace(self, bits=bits) for bits in (8, 6, 5, 4, 3, 2, 1))

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        codes = Expected(torch.uint8, (packed_nbytes(1 << self.bits, n),))
        each = Expected(torch.bfloat16, (groups(n, self.group_size),))
        return codes, each, each

    def _encode(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine | None = None
    ) -> Buffers | None:
        levels = 1 << self.bits
        codes, step, low = ops.group_quantize(flat, seed, levels, self.group_size, *(affine or ()))
        if not would_wait(flat) and not finite(step):
            return None
        return codes, step, low

    def graph_form(self, facts: Facts) -> GraphForm:
        """See `Codec.graph_form`."""
        how = 1 << self.bits, self.group_size
        return GraphForm(
            lambda x, seed: ops.group_quantize(x, seed, *how),
            lambda buffers, seed, out: ops.group_dequantize(*buffers, *how, out),
            (
                lambda x, seed: aten.group_quantize(x, seed, *how),
                lambda buffers, seed, n, dtype: aten.group_dequantize(buffers, *how, n, dtype),
            ),
        )

    def _decode_into(
        self,
        encoded: Encoded,
        out: Tensor,
        affine: Affine | None = None,
        bits: Tensor | None = None,
        start: int = 0,
    ) -> None:
        by = *(affine or ABSENT), bits, start // PART
        ops.group_dequantize(*encoded.buffers, 1 << self.bits, self.group_size, out, *by)

    # Its kernels do an affine in the same pass.
    _encode_mapped = _encode
    _decode_mapped = _decode_into

    def _decode_part(
        self, encoded: Encoded, start: int, out: Tensor, affine: Affine | None, bits: Tensor | None
    ) -> None:
        self._decode_into(encoded, out, affine, bits, start)
