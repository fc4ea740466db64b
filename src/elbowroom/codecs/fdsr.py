"""Frequency division and similarity reuse: a transform code of maps, 0.3 to 4.3 bits an element.

    map -> tiles of 8 x 8, 7 x 7 or 4 x 4 -> DCT -> bands, each with its own number of bits -> codes
    reuse: the bands without bits (the residual) of a tile -> its entry in a codebook, and a length

There are two kinds of codes. `rounding="nearest"` drops high bands or gives them few levels: it is
biased, and has the smallest error for its bits. `rounding="dither"` with bits for all bands is
*unbiased*, with the variance step^2 / 12 for every x; at 1.8 to 2.3 bits an element that is a
smaller variance than `dither` has at the same bits.

The size is a function of the shape and the fields alone. FDSR is known to us by its abstract only:
this is a re-design, not a copy (docs/codecs/fdsr.md).
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs._checks import finite, one_of, within
from elbowroom.codecs.base import FLOATS, Buffers, Codec, Encoded, Expected, Layout, Seed
from elbowroom.codecs.facts import Facts, Maps
from elbowroom.errors import UnknownField
from elbowroom.kernels import ops
from elbowroom.kernels.bands import BLOCKS, WORDS, bands_of, best_block, tiles_of
from elbowroom.kernels.fakes import would_wait

SMALLEST_SIDE = 4  # a map with fewer rows or columns is stored raw: it has too few bands
WIDTHS = {"0": 0, "1.6": 3, "2.67": 6} | {str(bits): 1 << bits for bits in range(1, 9)}


@dataclass(frozen=True)
class Fdsr(Codec):
    """Lossy: a banded DCT of maps, with reuse of similar residuals; unbiased with dither.

    These are stored raw, exactly: tensors of fewer than `min_numel` elements; maps of fewer than 4
    rows or columns, and so all tensors of fewer than four dimensions; and, on the CPU, tensors with
    a NaN, an Inf or a coefficient beyond 2^120. On a GPU, where this check would be a sync, the
    group of 16 to 128 tiles decodes to NaN. No float16 decodes beyond 65504. VARIANTS has settings
    in the order of their bits.
    """

    id: ClassVar[str] = "fdsr"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS

    bands: str = "6/4/3/1.6/1.6/1.6/0"
    rounding: str = "nearest"
    reuse: bool = False
    rho: float = 1.0
    block: int = 0
    min_numel: int = 1 << 14

    def __post_init__(self) -> None:
        one_of(self.id, "rounding", self.rounding, ("nearest", "dither"))
        one_of(self.id, "reuse", self.reuse, (False, True))
        one_of(self.id, "block", self.block, (0, *BLOCKS))
        within(self.id, "min_numel", self.min_numel, 0, 2**62)
        if isinstance(self.rho, bool) or not isinstance(self.rho, float) or not 0 < self.rho <= 1:
            self._refuse("rho", self.rho, "rho is a float above 0 and at most 1, e.g. 0.5")
        levels = self._levels(self.bands)
        if self.reuse and levels[-1]:
            self._refuse("reuse", True, f"bands {self.bands!r} leave nothing; end them with '/0'")
        if self.rho < 1 and not self.reuse:
            self._refuse("rho", self.rho, "it is the share of tiles with reuse; set reuse=True")

    @classmethod
    def settings(cls) -> tuple[Codec, ...]:
        return VARIANTS

    def ladder(self) -> tuple[Codec, ...]:
        """Returns the settings of this rounding, with `block` and `min_numel` as they are.

        Above the biased settings stand the unbiased ones of less error, so that the default has
        milder ones to go to: from 2.3 bits on. An unbiased codec stays unbiased.
        """
        finer = VARIANTS[_LESS_THAN_BIASED:] if self.rounding == "nearest" else ()
        return tuple(
            replace(one, block=self.block, min_numel=self.min_numel)
            for one in reversed(VARIANTS)
            if one.reuse == self.reuse and (one.rounding == self.rounding or one in finer)
        )

    def _levels(self, bands: str) -> list[int]:
        """Levels by band, the last one repeated."""
        words = bands.split("/") if isinstance(bands, str) else [""]
        if not set(words) <= set(WIDTHS):
            self._refuse("bands", bands, f"bands are widths joined by '/': {', '.join(WIDTHS)}")
        levels = [WIDTHS[word] for word in words]
        if not levels[0] or 0 in levels[:-1]:
            self._refuse("bands", bands, "only the last width may be 0")
        if self.rounding == "nearest":
            # odd, so that one level is 0: what is small becomes exactly 0, not half a step
            levels = [n - 1 if n % 2 == 0 and n else n for n in levels]
            if 1 in levels:
                self._refuse("bands", bands, "one bit has no level at 0: 1.6, or rounding='dither'")
        return levels

    def _refuse(self, name: str, value: object, why: str) -> None:
        raise UnknownField(f"codec 'fdsr': {name}={value!r} is not possible; {why}")

    def _seen(self, shape: tuple[int, ...], stride: tuple[int, ...], facts: Facts) -> Facts:
        return replace(facts, maps=Maps.of(shape, stride))

    def _settings(self, maps: Maps) -> tuple[list[int], int, list[int], int, bool]:
        """The arguments of the ops after the seed."""
        block, levels = self.block or best_block(maps.rows, maps.columns), self._levels(self.bands)
        b = bands_of(block, tuple(levels))
        kept = ceil(self.rho * b.lanes) if self.reuse and b.rest else 0
        return list(maps), block, levels, kept, self.rounding == "dither"

    def _maps(self, n: int, facts: Facts) -> Maps | None:
        """Returns how the elements lie; None: they are held raw."""
        maps = Maps(*facts.maps) if facts.maps else None  # from JSON it is a list
        if not maps or n < max(self.min_numel, 1) or min(maps.rows, maps.columns) < SMALLEST_SIDE:
            return None
        return maps

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        maps = self._maps(n, facts)
        if not maps:
            return (Expected(dtype, (n,)),)
        places, block, levels, kept, _ = self._settings(maps)
        b = bands_of(block, tuple(levels))
        groups = -(-tiles_of(places, block) // b.lanes)
        return (
            Expected(torch.uint8, (groups, b.nbytes(kept))),
            Expected(torch.bfloat16, (groups, b.scales(kept))),
            Expected(torch.int8, (WORDS if kept else 0, b.rest)),
        )

    def _encode(self, flat: Tensor, seed: Seed, facts: Facts) -> Buffers | None:
        maps = self._maps(flat.numel(), facts)
        if not maps:
            return None
        buffers = ops.fdsr_quantize(flat, seed, *self._settings(maps))
        return None if not would_wait(flat) and not finite(buffers[1]) else buffers

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        maps = self._maps(encoded.numel, encoded.facts)
        if not maps or maps != Maps.of(encoded.shape, encoded.stride):
            raise encoded.damaged(f"the maps of {encoded.shape}", str(maps))
        ops.fdsr_dequantize(*encoded.buffers, encoded.seed, *self._settings(maps), out)


# Settings in the order of their bits, lowest first, for controllers that change them in training.
# On 28 x 28 maps, metadata included: 0.44, 0.67, 0.86, 1.19 bits an element (biased), then 1.65,
# 1.91, 2.32, 2.97, 4.30 (unbiased). None reuses tiles: that takes twice the time, and its error at
# these bits is no smaller (docs/codecs/fdsr.md). The first unbiased one has a larger squared error
# than the last biased one; averaged over steps, it is smaller.
VARIANTS: tuple[Fdsr, ...] = (
    *(Fdsr(bands) for bands in ("6/3/0", "6/4/3/0", "6/3/1.6/1.6/1.6/0", "6/4/3/1.6/1.6/1.6/0")),
    Fdsr("4/1.6/1.6/1.6/1.6/1.6/1.6/1", rounding="dither"),
    *(Fdsr(bands, rounding="dither") for bands in ("4/1.6", "5/2", "5/2.67", "6/4")),
)
_LESS_THAN_BIASED = 6  # of these, the first unbiased one of less error than all biased ones
