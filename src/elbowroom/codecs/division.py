"""DIVISION: block averages in bf16 and a low-bit code of what is left.

Per map, one channel of one sample, with blocks of `block` x `block` elements:

    mean  average of a block, bf16
    h     x - mean                                          the mean as it is stored
    code  clamp(floor((h - low) / scale + u), 0, 2^bits - 1)
    x~    mean + low + scale * code                         rounding="stochastic"
    x~    mean + low + scale * (code - u + 1/2)             rounding="dither": u drawn again

low and scale come from min and max of h over the map, as in the paper, or over squares of
`range_blocks` x `range_blocks` blocks. Below four dimensions a block is a run of block^2 elements,
along the sequence where the op that reads the tensor tells which dimension that is (a block is
then of one channel), else along the last dimension. There a range is RUN elements, because the
range of a whole row is so wide that a two-bit code would have a larger error than zeros.

Unbiased; variance scale^2 / 6 on average, with dither scale^2 / 12. It takes bits + 16 / block^2 +
32 / (elements of a range) bits an element. The paper is arXiv 2208.04187;
kernels/reference/division.py says where this differs from its code.
"""

from dataclasses import dataclass, replace
from math import isqrt, prod
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs._checks import finite, one_of, within
from elbowroom.codecs.base import FLOATS, Buffers, Codec, Encoded, Expected, Layout, Seed
from elbowroom.codecs.facts import Facts, Maps
from elbowroom.codecs.graph_form import GraphForm
from elbowroom.kernels import aten, maps, ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.kernels.layout import packed_nbytes

RUN = 256  # elements of a range in a map of one row


@dataclass(frozen=True)
class Division(Codec):
    """Lossy: block averages, and `bits` (1 to 8) per element for the differences.

    H and W may be any size, and channels_last is read without a copy. A tensor of fewer than four
    dimensions, or with a sequence (`Facts.sequence`), is treated as maps of one row, with block^2
    elements per block. A tensor with a NaN, an Inf or a value beyond 2^125 is stored raw on the
    CPU. On a GPU, where the check would be a sync, its ranges decode to NaN.
    """

    id: ClassVar[str] = "division"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS

    bits: int = 2
    block: int = 8
    rounding: str = "stochastic"
    range_blocks: int = 0

    def __post_init__(self) -> None:
        within(self.id, "bits", self.bits, 1, 8)
        one_of(self.id, "block", self.block, (4, 8, 16))
        one_of(self.id, "rounding", self.rounding, ("stochastic", "dither"))
        within(self.id, "range_blocks", self.range_blocks, 0, 64)

    @classmethod
    def settings(cls) -> tuple[Codec, ...]:
        # Not 1: its error is 7 to 12 times the tensor's own square.
        return tuple(
            cls(bits=bits, rounding=rounding)
            for rounding in ("stochastic", "dither")
            for bits in (8, 6, 4, 3, 2)
        )

    def ladder(self) -> tuple[Codec, ...]:
        return tuple(replace(self, bits=bits) for bits in (8, 6, 4, 3, 2, 1))

    def _seen(self, shape: tuple[int, ...], stride: tuple[int, ...], facts: Facts) -> Facts:
        # The size follows from the shape: the strides tell only in which order the maps lie.
        # A sequence shorter than a block would cost more for means and ranges than for codes.
        along = facts.sequence
        is_named = along is not None and -len(shape) <= along < 0
        if along is not None and is_named and shape[along] >= self.block**2:
            return replace(facts, maps=Maps.along(shape, stride, along))
        last = shape[-1] if shape else 1
        rows = Maps(prod(shape) // max(last, 1), 1, last, 1)
        return replace(facts, maps=rows if len(shape) < 4 else Maps.of(shape, stride))

    def _how(self, n: int, facts: Facts) -> tuple[int, int, list[int]]:
        """The block, the reach of a range, and the maps, as the kernels take them."""
        found = _maps(n, facts)
        in_a_row = RUN // self.block**2  # blocks; a reach is its square root: 1, 2 or 4
        reach = self.range_blocks or (isqrt(in_a_row) if found[1] == 1 else 0)
        return self.block, reach, found

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        block, reach, found = self._how(n, facts)
        means = maps.blocks(found, block).entries
        ranges = maps.ranges(found, block, reach).entries
        each = Expected(torch.bfloat16, (ranges,))
        codes = Expected(torch.uint8, (packed_nbytes(1 << self.bits, n),))
        return codes, Expected(torch.bfloat16, (means,)), each, each

    def graph_form(self, facts: Facts) -> GraphForm:
        """See `Codec.graph_form`."""
        levels, dither = 1 << self.bits, self.rounding == "dither"

        def how(n: int) -> tuple[int, int, int, list[int]]:
            return levels, *self._how(n, facts)

        return GraphForm(
            lambda x, seed: ops.division_quantize(x, seed, *how(x.numel())),
            lambda buffers, seed, out: ops.division_dequantize(
                *buffers, seed, *how(out.numel()), dither, out
            ),
            (
                lambda x, seed: aten.division_quantize(x, seed, *how(x.numel())),
                lambda buffers, seed, n, dtype: aten.division_dequantize(
                    buffers, seed, *how(n), dither, n, dtype
                ),
            ),
            any_size=False,
        )

    def _encode(self, flat: Tensor, seed: Seed, facts: Facts) -> Buffers | None:
        how = 1 << self.bits, *self._how(flat.numel(), facts)
        codes, mean, scale, low = ops.division_quantize(flat, seed, *how)
        if not would_wait(flat) and not finite(scale):
            return None
        return codes, mean, scale, low

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        how = 1 << self.bits, *self._how(out.numel(), encoded.facts)
        dither = self.rounding == "dither"
        ops.division_dequantize(*encoded.buffers, encoded.seed, *how, dither, out)


def _maps(n: int, facts: Facts) -> list[int]:
    """Returns the maps as the kernels take them; one row of n elements if none are known.

    A map of one column is taken as a row. Of maps of a single element, the channels are the row.
    """
    outer, rows, columns, inner = facts.maps or (1, 1, n, 1)
    if outer * rows * columns * inner != n:
        return [1, 1, n, 1]
    if rows * columns == 1:
        return [outer, 1, inner, 1] if inner > 1 else [1, 1, n, 1]
    return [outer, 1, rows, inner] if columns == 1 else [outer, rows, columns, inner]
