"""Error-bounded codes: every element keeps to a bound, and the size depends on the values.

    q    = floor(x / step + u)                 integers, as many as the values need
    x~   = step * (q - u + 1/2)                |x~ - x| <= bound, after rounding to x's dtype too

A block of 32 integers takes as many bits as its largest; exact zeros are in a bitmap, stay exact,
and nothing else becomes one. What cannot keep the bound (NaN, a bound finer than the dtype) is held
as it is. Where the site knows of zeros (`facts.has_zeros`), the bitmap is a buffer of its own and
ReLU's mask.

    rounding     step       error                                       max
    dither       2 bound    uniform, independent of x: bound^2 / 3      bound
    stochastic   bound      unbiased: bound^2 / 6 on average            bound
    nearest      2 bound    depends on x, does not average out          bound

The finer step of stochastic rounding costs one bit more for each non-zero.
Why dither: an error that is independent of dy makes the error of a weight gradient predictable,
sigma_k = bound * sqrt(R / 3) * |dy_k|, R the share of non-zeros. This is what COMET (arXiv
2111.09562) needs and what rounding to nearest, which it uses, does not give.
"""

from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor

from elbowroom.codecs._checks import one_of
from elbowroom.codecs.affine import Affine
from elbowroom.codecs.base import FLOATS, Buffers, Codec, Encoded, Expected, Layout, Seed
from elbowroom.codecs.facts import Facts, Maps
from elbowroom.codecs.room import Space
from elbowroom.errors import CodecError, UnknownField
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.kernels.layout import TILE, blocks, tiles

_DIGITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}  # of a mantissa
_LARGEST = 2.0**125
PREDICTIONS = ("none", "1d", "2d")


@dataclass(frozen=True)
class Comet(Codec):
    """Lossy: no element is off by more than `bound`. The size depends on the data.

    With `relative`, the bound is a fraction of max(x) - min(x). `facts.error_bound`, which is
    absolute, overrides both. A tensor with a NaN or an Inf is stored raw on the CPU. On a GPU,
    where the check would be a sync, the blocks with such a value are stored raw.
    """

    id: ClassVar[str] = "comet"
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS
    takes_room: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True

    bound: float = 1e-2
    relative: bool = True
    rounding: str = "dither"
    prediction: str = "none"

    def __post_init__(self) -> None:
        if not _usable(self.bound):
            raise UnknownField(
                f"codec 'comet': bound={self.bound!r} is not possible; bound is a positive, finite "
                "number. For no error at all use codec('sparse_lossless')."
            )
        one_of(self.id, "relative", self.relative, (True, False))
        one_of(self.id, "rounding", self.rounding, ("dither", "stochastic", "nearest"))
        one_of(self.id, "prediction", self.prediction, PREDICTIONS)

    @classmethod
    def settings(cls) -> tuple[Codec, ...]:
        return tuple(cls(bound=bound) for bound in (1e-3, 1e-2, 5e-2))

    def ladder(self) -> tuple[Codec, ...]:
        return tuple(replace(self, bound=self.bound * 2.0**k) for k in range(-6, 5))

    def _seen(self, shape: tuple[int, ...], stride: tuple[int, ...], facts: Facts) -> Facts:
        bound, facts = facts.error_bound, replace(facts, maps=Maps.of(shape, stride))
        if bound is not None and not _usable(bound):
            raise CodecError(
                f"codec 'comet' cannot keep to facts.error_bound={bound!r}; it is a positive, "
                "finite number. Leave it out to use the codec's own bound."
            )
        return facts

    def _layout(self, n: int, dtype: torch.dtype, facts: Facts) -> Layout:
        bits = (Expected(torch.uint8, (-(-n // 8),)),) if facts.has_zeros else ()
        return (
            *bits,
            Expected(torch.uint8, (blocks(n),)),
            Expected(torch.int16, (tiles(n),)),
            Expected(torch.uint8, (n * dtype.itemsize,), at_most=True),
            Expected(torch.float32, (3,)),
        )

    def _encode(self, flat: Tensor, seed: Seed, facts: Facts) -> Buffers | None:
        least, most = (end.double() for end in torch.aminmax(flat))
        if not would_wait(flat) and not isfinite(float(least - most)):
            return None
        grid = self._grid(least, most, flat.dtype, facts)
        stored = ops.comet_quantize(
            flat, grid, seed, self.rounding, facts.has_zeros, *self._maps(facts)
        )
        return *(stored if facts.has_zeros else stored[1:]), grid

    def _encode_into(
        self, flat: Tensor, seed: Seed, facts: Facts, affine: Affine | None, space: Space
    ) -> Buffers | None:
        flat = flat if affine is None else affine.of(flat)
        least, most = (end.double() for end in torch.aminmax(flat))
        grid = self._grid(least, most, flat.dtype, facts)
        given = grid, seed, self.rounding, facts.has_zeros, *self._maps(facts)
        there = space.payload, space.spill.memory, space.used
        bits, headers, sizes = ops.comet_quantize_into(flat, *given, *there)
        held = headers, sizes, space.payload, grid
        return (bits, *held) if facts.has_zeros else held

    def _decode_into(self, encoded: Encoded, out: Tensor) -> None:
        maps = self._maps(encoded.facts)
        *bits, headers, sizes, payload, grid = encoded.buffers
        stored = bits[0] if bits else headers[:0], headers, sizes, payload
        try:
            settings = grid, encoded.seed, self.rounding, *maps
            ops.comet_dequantize(*stored, *settings, out, *encoded.beyond)
        except ValueError as error:
            raise encoded.damaged(*str(error).removeprefix("expected ").split("; got ")) from None

    def _bitmap(self, encoded: Encoded) -> Tensor | None:
        return encoded.buffers[0] if encoded.facts.has_zeros else None

    def _maps(self, facts: Facts) -> tuple[int, int, int]:
        """Rows, columns and inner of the maps to predict in; (0, 0, 0): no prediction."""
        if self.prediction == "none":
            return 0, 0, 0
        _, rows, columns, inner = facts.maps or Maps(1, 1, 1, 1)
        return (1, TILE, 1) if self.prediction == "1d" or rows == 1 else (rows, columns, inner)

    def _grid(self, least: Tensor, most: Tensor, dtype: torch.dtype, facts: Facts) -> Tensor:
        """Bound, step and 1 / step [3] float32; least and most of x are float64 of no dimension.

        Nothing is read here, so that a GPU need not wait.
        """
        if facts.error_bound is not None:
            bound = torch.full_like(most, facts.error_bound)
        else:
            bound = (most - least) * self.bound if self.relative else least * 0 + self.bound
        bound = bound.clamp(max=_LARGEST)
        reach = torch.maximum(least.abs(), most.abs()) + bound
        half = _room(bound, reach, dtype) - reach * 2.0**-21  # a few float32 roundings
        half = torch.maximum(half, bound / 2)
        step = (half if self.rounding == "stochastic" else 2 * half).float()
        # A difference taken in float32 proves this bound; below, subnormals would disturb that.
        sure = torch.where(bound < 2.0**-110, 0.0, bound * (1 - 2.0**-22)).float()
        return torch.stack([sure, step, 1 / step])


def _room(bound: Tensor, reach: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error before rounding to the dtype that cannot exceed the bound after it.

    x lies on a lattice of spacing d, so x~ is off by a multiple of it, at most floor(bound / d):
    what is nearer than that plus d / 2 rounds to it. The least over all d up to that of `reach`.
    """
    exponent = torch.frexp(reach).exponent - 1 - _DIGITS[dtype]
    spacing = torch.exp2(exponent.double() - torch.arange(12, device=reach.device))
    if dtype is torch.float16:
        spacing = spacing.clamp(min=2.0**-24)
    room = (torch.floor(bound / spacing) + 0.5) * spacing
    return torch.minimum(bound, room.amin())


def _usable(bound: object) -> bool:
    if not isinstance(bound, int | float) or isinstance(bound, bool):
        return False
    return isfinite(bound) and bound > 0
