"""Subtractive dither: any number of levels, half the variance of stochastic rounding.

    code = floor((x - low) / step + u)
    x~   = low + step * (code - u + 1/2)        the decoder draws the same u again

The error is independent of the data: uniform in +-step/2, unbiased, of variance step^2 / 12 for
every x (stochastic rounding: step^2 / 6 on average), so its effect on a gradient can be predicted.
16 bits of metadata a group and 32 for 2048 elements: at 4 levels and groups of 64, 2.27 bits an
element.

Zero-aware: where the site knows of exact zeros (`facts.has_zeros`), a bitmap holds them and only
the other values are coded: 1 + density * (log2 levels + 16 / group_size) bits, zeros exact, and the
bitmap is ReLU's mask. Why the size may depend on the data here: docs/log.md, "compaction".
"""

from dataclasses import InitVar, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs._checks import finite, one_of, within
from elbowroom.codecs.affine import ABSENT, Affine
from elbowroom.codecs.base import FLOATS, PART, Buffers, Codec, Encoded, Expected, Layout, Seed
from elbowroom.codecs.facts import Facts
from elbowroom.codecs.graph_form import GraphForm
from elbowroom.codecs.room import Space
from elbowroom.errors import UnknownField
from elbowroom.kernels import aten, ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.kernels.layout import GROUP_SIZES, groups, packed_nbytes, tiles

LEVELS = (256, 64, 16, 8, 6, 4, 3, 2)  # the settings that a planner considers


class _Default(int):
    """Default of a field: an int that can be told from the same number given by the caller."""


@dataclass(frozen=True)
class Dither(Codec):
    """Lossy: 2 to 256 `levels` (or `bits`), with subtractive dither; known zeros stay exact.

    This is elbowroom's main codec. A tensor with a NaN, an Inf or a value beyond 2^125 is stored
    raw on the CPU. On a GPU, where the check would be a sync, its tiles of 2048 elements decode to
    NaN. Differences below about 1e-36 are not encoded, and no float16 decodes beyond 65504.
    """

    id: ClassVar[str] = "dither"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS
    has_parts: ClassVar[bool] = True
    takes_room: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True

    levels: int = _Default(4)
    group_size: int = 64
    bits: InitVar[int | None] = None

    def __post_init__(self, bits: int | None) -> None:
        if bits is not None:
            within(self.id, "bits", bits, 1, 8)
            if not isinstance(self.levels, _Default) and self.levels != 1 << bits:
                raise UnknownField(
                    f"codec 'dither': bits={bits} means levels={1 << bits}; "
                    f"got levels={self.levels} too. Give one of the two."
                )
            object.__setattr__(self, "levels", 1 << bits)
        elif isinstance(self.levels, _Default):
            object.__setattr__(self, "levels", int(self.levels))
        within(self.id, "levels", self.levels, 2, 256)
        one_of(self.id, "group_size", self.group_size, GROUP_SIZES)

    @classmethod
    def settings(cls) -> tuple[Codec, ...]:
        return tuple(cls(levels=levels) for levels in LEVELS)

    def ladder(self) -> tuple[Codec, ...]:
        return tuple(replace(self, levels=n) for n in (256, 64, 32, 16, 12, 8, 6, 4, 3, 2))

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        codes, each = packed_nbytes(self.levels, n), groups(n, self.group_size)
        bounds = Expected(torch.bfloat16, (tiles(n), 2))
        if facts.has_zeros:
            bits, payload = (-(-n // 8),), (codes + 2 * each,)
            return Expected(torch.uint8, bits), Expected(torch.uint8, payload, at_most=True), bounds
        return Expected(torch.uint8, (codes,)), Expected(torch.uint8, (each, 2)), bounds

    def _encode(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine | None = None
    ) -> Buffers | None:
        quantize = ops.nonzero_quantize if facts.has_zeros else ops.dither_quantize
        buffers = quantize(flat, seed, self.levels, self.group_size, *(affine or ()))
        bounds = buffers[2]
        return None if not would_wait(flat) and not finite(bounds) else buffers

    def graph_form(self, facts: Facts) -> GraphForm | None:
        """See `Codec.graph_form`. None where zeros are known: the size depends on them."""
        if facts.has_zeros:
            return None
        how = self.levels, self.group_size
        return GraphForm(
            lambda x, seed: ops.dither_quantize(x, seed, *how),
            lambda buffers, seed, out: ops.dither_dequantize(*buffers, seed, *how, out),
            (
                lambda x, seed: aten.dither_quantize(x, seed, *how),
                lambda buffers, seed, n, dtype: aten.dither_dequantize(
                    buffers, seed, *how, n, dtype
                ),
            ),
        )

    def _encode_into(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine | None, space: Space
    ) -> Buffers | None:
        there = space.payload, space.spill.memory, space.used
        settings = seed, self.levels, self.group_size
        bits, bounds = ops.nonzero_quantize_into(flat, *settings, *there, *(affine or ()))
        return bits, space.payload, bounds

    def _decode_into(
        self,
        encoded: Encoded,
        out: Tensor,
        affine: Affine | None = None,
        bits: Tensor | None = None,
        start: int = 0,
    ) -> None:
        dequantize = ops.nonzero_dequantize if encoded.facts.has_zeros else ops.dither_dequantize
        settings = encoded.seed, self.levels, self.group_size, out
        by = *(affine or ABSENT), bits, start // PART, *encoded.beyond
        try:
            dequantize(*encoded.buffers, *settings, *by)
        except ValueError as error:
            raise encoded.damaged(*str(error).removeprefix("expected ").split("; got ")) from None

    # Its kernels do an affine in the same pass.
    _encode_mapped = _encode
    _decode_mapped = _decode_into

    def _decode_part(
        self, encoded: Encoded, start: int, out: Tensor, affine: Affine | None, bits: Tensor | None
    ) -> None:
        self._decode_into(encoded, out, affine, bits, start)

    def _bitmap(self, encoded: Encoded) -> Tensor | None:
        return encoded.buffers[0] if encoded.facts.has_zeros else None
