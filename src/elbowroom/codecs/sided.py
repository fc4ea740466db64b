"""Two dithered codes, one for each side of a threshold; a bitmap says which side a value is on.

Made for the input of a norm that a ReLU follows. One tensor then serves three readers:

    ReLU's backward           its mask, one bit an element, exact
    the norm's backward       x~, decoded from the codes of both sides
    the next convolution      mask * norm(x~), with the norm's saved mean and rstd

The mask is held anyway, so which side a value lies on costs nothing; and each side spans about half
of the whole range, so equal levels have half the step. What ReLU lets pass reaches the next
convolution and deserves more levels (`upper`); the rest serves only the norm (`lower`).
Bits an element beside the mask, at density d: d log2 upper + (1 - d) log2 lower + 16 / group_size.

With fold > 1 so many of the lower values share a code, that of their sum with random signs: it is
unbiased, and its error is larger than their spread. That is enough where all of the gradient has
passed the mask, and is 0 below it: backward then reads what lies there only in the term
xhat * mean(grad * xhat), summed over whole maps (`runtime/deferred.py`). Bits, beside the mask:
d (log2 upper + 16 / group_size) + (1 - d) (log2 lower + 16 / group_size) / fold.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs._checks import finite, one_of, within
from elbowroom.codecs.affine import ABSENT, Affine
from elbowroom.codecs.base import (
    FLOATS,
    PART,
    Buffers,
    Codec,
    Encoded,
    Expected,
    Layout,
    Seed,
    show,
)
from elbowroom.codecs.facts import Facts
from elbowroom.codecs.room import Space
from elbowroom.errors import CodecError
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.kernels.layout import FOLDS, GROUP_SIZES, groups, packed_nbytes, runs, tiles


@dataclass(frozen=True)
class Sided(Codec):
    """Lossy: dither with `upper` levels where a mask is set, `lower` elsewhere (2 to 256).

    `fold` (1, 4, 8 or 16) of the elements elsewhere share a code.

    The mask is `facts.mask`, which the caller keeps, or x > 0, which is stored. A tensor with a
    NaN, an Inf or a value beyond 2^125 is stored raw on the CPU. On a GPU, where the check would be
    a sync, that side of its tile of 2048 elements decodes to NaN.
    """

    id: ClassVar[str] = "sided"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS
    has_parts: ClassVar[bool] = True
    takes_room: ClassVar[bool] = True

    upper: int = 4
    lower: int = 2
    group_size: int = 64
    fold: int = 1

    def __post_init__(self) -> None:
        within(self.id, "upper", self.upper, 2, 256)
        within(self.id, "lower", self.lower, 2, 256)
        one_of(self.id, "group_size", self.group_size, GROUP_SIZES)
        one_of(self.id, "fold", self.fold, FOLDS)

    @classmethod
    def settings(cls) -> tuple[Codec, ...]:
        return cls(16, 4), cls(8, 4), cls(4, 2)

    @property
    def is_rough_elsewhere(self) -> bool:
        return self.fold > 1

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        # Two sides cut in two what one would hold in a row: so many bytes a tile more at most, by
        # trying all splits of all tiles (tests/unit/test_sided.py).
        cuts = max(runs(self.upper), runs(self.lower)) * tiles(n)
        codes = packed_nbytes(max(self.upper, self.lower), n) + cuts
        ranges = 2 * (groups(n, self.group_size) + tiles(n) * (1 if self.fold == 1 else 2))
        payload = Expected(torch.uint8, (codes + ranges,), at_most=True)
        bounds = Expected(torch.bfloat16, (2 * tiles(n), 2))
        return (payload, bounds) if facts.mask is not None else (payload, bounds, _bits(n))

    def _encode(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine | None = None
    ) -> Buffers | None:
        bits = _mask_of(flat, facts)
        payload, bounds = ops.sided_quantize(flat, bits, seed, *self._settings, *(affine or ()))
        if not would_wait(flat) and not finite(bounds):
            return None
        return (payload, bounds) if facts.mask is not None else (payload, bounds, bits)

    def _encode_into(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine | None, space: Space
    ) -> Buffers | None:
        bits = _mask_of(flat, facts)
        there = space.payload, space.spill.memory, space.used
        args = flat, bits, seed, *self._settings, *there, *(affine or ())
        bounds = ops.sided_quantize_into(*args)
        held = space.payload, bounds
        return held if facts.mask is not None else (*held, bits)

    def _decode_into(
        self,
        encoded: Encoded,
        out: Tensor,
        affine: Affine | None = None,
        bits: Tensor | None = None,
        start: int = 0,
    ) -> None:
        payload, bounds, *own = encoded.buffers
        sides = encoded.facts.mask if encoded.facts.mask is not None else own[0]
        n, device = encoded.numel, out.device
        if not _belongs(sides, n, device):
            expected = f"a mask in its facts to be {_bits(n)}, contiguous, on {device}"
            raise encoded.damaged(expected, f"{show(sides)} on {sides.device}")
        try:
            ops.sided_dequantize(
                *(sides, payload, bounds, encoded.seed, *self._settings),
                *(out, *(affine or ABSENT), bits, start // PART, *encoded.beyond),
            )
        except ValueError as error:
            raise encoded.damaged(*str(error).removeprefix("expected ").split("; got ")) from None

    # Its kernels do an affine in the same pass.
    _encode_mapped = _encode
    _decode_mapped = _decode_into

    def _decode_part(
        self, encoded: Encoded, start: int, out: Tensor, affine: Affine | None, bits: Tensor | None
    ) -> None:
        self._decode_into(encoded, out, affine, bits, start)

    @property
    def _settings(self) -> tuple[int, int, int, int]:
        return self.upper, self.lower, self.group_size, self.fold


def _mask_of(flat: Tensor, facts: Facts) -> Tensor:
    """Returns the mask that splits flat. Raises CodecError if it belongs to another tensor."""
    bits = ops.pack_bits(flat > 0) if facts.mask is None else facts.mask
    if not _belongs(bits, flat.numel(), flat.device):
        raise CodecError(
            f"codec 'sided' was given a mask for {show(flat)} on {flat.device}: expected "
            f"{_bits(flat.numel())}, contiguous, there; got {show(bits)} on {bits.device}. "
            "Pack it with codec('bitmask'), or pass facts without a mask."
        )
    return bits


def _bits(n: int) -> Expected:
    """The mask of n elements."""
    return Expected(torch.uint8, (-(-n // 8),))


def _belongs(mask: Tensor, n: int, device: torch.device) -> bool:
    return _bits(n).fits(mask) and mask.device == device
