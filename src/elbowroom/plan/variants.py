"""The settings that one codec can take at a tensor, from the mildest to the smallest."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elbowroom.codecs import Codec, Comet, Dither, Division, Fdsr, Group
from elbowroom.codecs.fdsr import VARIANTS
from elbowroom.codecs.quality import MAPS
from elbowroom.errors import PlanError

_LESS_THAN_BIASED = 6  # of VARIANTS, the first unbiased one of less error than all biased ones
_LEVELS = (256, 64, 32, 16, 12, 8, 6, 4, 3, 2)
_OF: dict[type[Codec], Callable[[Any], tuple[Codec, ...]]] = {
    Dither: lambda c: tuple(replace(c, levels=levels) for levels in _LEVELS),
    Group: lambda c: tuple(replace(c, bits=bits) for bits in (8, 6, 5, 4, 3, 2, 1)),
    Division: lambda c: tuple(replace(c, bits=bits) for bits in (8, 6, 4, 3, 2, 1)),
    Comet: lambda c: tuple(replace(c, bound=c.bound * 2.0**k) for k in range(-6, 5)),
    Fdsr: lambda c: tuple(
        replace(variant, block=c.block, min_numel=c.min_numel)
        for variant in reversed(VARIANTS)
        if _is_step(variant, c)
    ),
}


def variants_of(codec: Codec) -> tuple[Codec, ...]:
    """The settings of this codec, with its other fields as they are.

    Raises PlanError for a codec that has only one.
    """
    settings = _OF.get(type(codec))
    if settings is None:
        known = ", ".join(kind.id for kind in _OF)
        raise PlanError(
            f"codec '{codec.id}' has no ladder of settings to move along; these have: {known}"
        )
    return settings(codec)


def ladder_of(codec: Codec) -> tuple[Codec, ...]:
    """`variants_of` with the codec itself among them, by its size.

    Raises PlanError for a codec that has only one setting.
    """
    variants = variants_of(codec)
    if codec in variants:
        return variants
    own = _nbytes(codec)
    milder = sum(_nbytes(variant) >= own for variant in variants)
    return (*variants[:milder], codec, *variants[milder:])


def _nbytes(codec: Codec) -> int:
    return codec.encoded_nbytes(MAPS, codec.dtypes[0])


def _is_step(variant: Fdsr, codec: Fdsr) -> bool:
    """Returns whether a variant is one on the ladder of a codec.

    An unbiased codec stays so. Above the biased settings stand the unbiased ones of less error, so
    that the default has milder ones to go to: from 2.3 bits on.
    """
    if variant.reuse != codec.reuse:
        return False
    if variant.rounding == codec.rounding:
        return True
    return variant in VARIANTS[_LESS_THAN_BIASED:] and codec.rounding == "nearest"
