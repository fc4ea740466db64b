"""Fewer bits in each float: bf16, fp16, or an 8-bit float with a scale for each group.

    to            bits an element       relative error of a normal value, at most
    bf16          16                    2^-8
    fp16          16                    2^-11, up to 65504
    fp8_e4m3      8 + 16 / group_size   2^-4, down to 2^-14 of its group's largest
    fp8_e5m2      8 + 16 / group_size   2^-3, down to 2^-29 of its group's largest

Rounding to nearest, ties to even: biased for one value, by at most half a step. What an 8-bit float
decodes to is rounded once more where x itself is bf16 or fp16.

sparse=True: beside a bitmap, only the 8-bit codes that are not zero are held. That is
1 + 8 * density + 16 / group_size bits an element: of attention weights behind a causal mask, half
are exactly 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs._checks import finite, one_of
from elbowroom.codecs.affine import Affine
from elbowroom.codecs.base import FLOATS, Buffers, Codec, Encoded, Expected, Layout, Seed
from elbowroom.codecs.facts import Facts
from elbowroom.codecs.graph_form import GraphForm, converted
from elbowroom.codecs.room import Space
from elbowroom.codecs.sparse_lossless import packed_into, unpack
from elbowroom.errors import UnknownField
from elbowroom.kernels import aten, ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.kernels.layout import GROUP_SIZES, groups

_TARGETS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(Codec):
    """Lossy: bf16, fp16, or fp8 with a scale per group (`to` is bf16, fp16, fp8_e4m3 or fp8_e5m2).

    A tensor with a NaN, an Inf or a value that would decode to one is stored raw on the CPU. On a
    GPU, where the check would be a sync, its group (fp8) or element (bf16, fp16) decodes to NaN or
    Inf.
    """

    id: ClassVar[str] = "cast"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS
    is_relative: ClassVar[bool] = True
    takes_room: ClassVar[bool] = True

    to: str = "bf16"
    group_size: int = 128
    sparse: bool = False

    def __post_init__(self) -> None:
        one_of(self.id, "to", self.to, _TARGETS)
        one_of(self.id, "group_size", self.group_size, GROUP_SIZES)
        if type(self.sparse) is not bool or (self.sparse and self.to in _HALVES):
            raise UnknownField(
                f"codec 'cast': sparse={self.sparse!r} is not possible with to={self.to!r}. "
                "It is True or False, and True with an 8-bit float alone"
            )

    @classmethod
    def settings(cls) -> tuple[Codec, ...]:
        # Not fp16: what is beyond 65504 would be held raw, or on a GPU decode to Inf.
        return tuple(cls(to) for to in ("bf16", "fp8_e4m3", "fp8_e5m2"))

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        if self.to in _HALVES:
            return (Expected(_HALVES[self.to], (n,)),)
        scale = Expected(torch.bfloat16, (groups(n, self.group_size),))
        if self.sparse:
            kept = Expected(torch.uint8, (n,), at_most=True)
            return Expected(torch.uint8, (-(-n // 8),)), kept, scale
        return Expected(torch.uint8, (n,)), scale

    def graph_form(self, facts: Facts) -> GraphForm | None:
        """See `Codec.graph_form`. None where its size depends on the values."""
        if self.sparse:
            return None
        if self.to in _HALVES:
            return converted(_HALVES[self.to])
        how = self.group_size, self.to.removeprefix("fp8_")
        return GraphForm(
            lambda x, seed: ops.fp8_quantize(x, *how),
            lambda buffers, seed, out: ops.fp8_dequantize(*buffers, *how, out),
            (
                lambda x, seed: aten.fp8_quantize(x, *how),
                lambda buffers, seed, n, dtype: aten.fp8_dequantize(buffers, *how, n, dtype),
            )
            if aten.has_fp8()
            else None,
        )

    def _encode(self, flat: Tensor, seed: Seed, facts: Facts) -> Buffers | None:
        on_cpu = not would_wait(flat)
        if self.to in _HALVES:
            half = flat.to(_HALVES[self.to], copy=True)
            return None if on_cpu and not finite(half, flat.dtype) else (half,)
        codes, scale = ops.fp8_quantize(flat, self.group_size, self.to.removeprefix("fp8_"))
        if on_cpu and not finite(scale):
            return None
        return (*ops.sparse_pack(codes), scale) if self.sparse else (codes, scale)

    def _encode_into(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine | None, space: Space
    ) -> Buffers | None:
        flat = flat if affine is None else affine.of(flat)
        codes, scale = ops.fp8_quantize(flat, self.group_size, self.to.removeprefix("fp8_"))
        return (*packed_into(codes, space), scale)

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        if self.to in _HALVES:
            out.copy_(encoded.buffers[0])
        else:
            codes, scale = encoded.buffers[-2:]
            if self.sparse:
                codes = torch.empty(out.numel(), dtype=torch.uint8, device=out.device)
                unpack(encoded, codes)
            ops.fp8_dequantize(codes, scale, self.group_size, self.to.removeprefix("fp8_"), out)
