"""Milder codes where an op is not linear in what it saves: an error there does not average out.

Attention runs again in backward, on what is held of q, k and v (`runtime/direct/attention.py`). An
error of variance s^2 in a logit changes the gradient's square by s^2 of it where weights are spread
over many keys, by half of that where they are sharp; the codes of k and v, in which it is linear,
add what they add to a linear op (16 levels: 0.8 % each). s^2 grows with the product of the squares
of |q| and |k|, so what q and k need follows from them (`levels_for`): 16 levels where they have a
standard deviation of 1, 64 at 2, 256 up to nearly 5.5, and beyond that there is no code. v gets 16.
Measured (docs/log.md, "attention"), gErr2 of q at standard deviations of 1, 3, 6:

                    1        3        6
    16 levels       0.029    0.44     1.3
    64 levels       0.010    0.04     0.35
    256 levels      0.008    0.011    0.035

GELU and SiLU have bounded derivatives, and are biased a little: with s^2 the variance of the error,
by half of s^2 times a second or third derivative. Where a norm and the activation behind it share a
code, their errors multiply besides. So the square of the bias falls with (levels - 1)^4 where the
variance falls with (levels - 1)^2. Of the gradient's square, at random weights (docs/log.md):

                    4 levels               8 levels
    linear, GELU    0.27 % beside 18 %     0.009 % beside 3.2 %
    BN, GELU        1.1 %  beside 13 %     0.04 %  beside 2.0 %
    GN, SiLU        1.6 %  beside 3.5 %    0.06 %  beside 0.4 %

GELU and SiLU get at least 8. A ReLU is linear in what is decoded, and needs nothing of this.
"""

from dataclasses import replace
from typing import NamedTuple

from elbowroom.codecs import Cast, Codec, Comet, Dither, Division, Group
from elbowroom.plan.site import NORMS, Rebuildable, Site


class _Mildest(NamedTuple):
    """The bits that a code must have, and the bound of `comet` that has about their error."""

    bits: int
    bound: float


ATTENTION = "scaled_dot_product_attention"
CURVED = ("gelu", "silu")
MOST_LEVELS = 256
_CURVED = _Mildest(3, 0.07)
_LEVELS = 16, 32, 64, 128, MOST_LEVELS
_GROUP = 64  # elements that share a step
_DIFFUSE, _SHARP = 0.025, 0.05  # variance of a logit: of what 256 levels meet, weights are sharp
_BOUND = 0.3  # of `comet`, times (levels - 1): half a step, as a share of a larger range
_MOST_BITS = 8


def levels_for(spread: float) -> int | None:
    """The fewest levels for q and k where a logit's error has the variance spread / (levels - 1)^2.

    None: no code is fine enough; also of a NaN.
    """
    for levels in _LEVELS:
        if spread <= (_SHARP if levels == MOST_LEVELS else _DIFFUSE) * (levels - 1) ** 2:
            return levels
    return None


def gentle(codec: Codec, site: Site) -> Codec:
    """The codec itself, or a milder setting of it."""
    if site.consumer == ATTENTION:
        return at_least(codec, site.least_levels)
    if site.consumer in CURVED or site.curved:
        return _at_least(codec, _CURVED)
    return codec


def if_curved(codec: Codec, site: Site) -> Codec | None:
    """What to take for a norm's input if a GELU or SiLU turns out to read the norm's output.

    None: the same, or that is known already.
    """
    if site.consumer not in NORMS or site.curved is not None:
        return None
    found = gentle(codec, replace(site, curved=True))
    return None if found == gentle(codec, site) else found


def may_rebuild(codec: Codec, site: Site) -> bool:
    """Whether an op may read what is made again from a code that was chosen before it was known."""
    if site.consumer == ATTENTION:  # what it reads has levels by its logits
        return site.rebuildable is not Rebuildable.LOSSY
    known = site.rebuildable is not Rebuildable.LOSSY or site.curved
    return site.consumer not in CURVED or bool(known) or gentle(codec, site) == codec


def at_least(codec: Codec, levels: int) -> Codec:
    """The codec, or a setting of it with about the error of so many levels of dither.

    What rounds stochastically has twice the variance or more: it gets a bit more. Above 16 levels,
    the values that share a step are at most what a row of q or k bounds, and `dither` takes the
    place of what has no setting that is fine enough.
    """
    bits = (levels - 1).bit_length() + 1
    if levels > _LEVELS[0]:
        match codec:
            case Dither() if codec.group_size > _GROUP:
                codec = replace(codec, group_size=_GROUP)
            case Group() | Division() if bits > _MOST_BITS:
                return Dither(levels=levels)
            case Cast() if codec.to.startswith("fp8"):
                return Dither(levels=levels)
    if isinstance(codec, Dither):
        return replace(codec, levels=max(codec.levels, levels))
    return _at_least(codec, _Mildest(bits, _BOUND / (levels - 1)))


def _at_least(codec: Codec, mildest: _Mildest) -> Codec:
    match codec:
        case Dither() if codec.levels < 1 << mildest.bits:
            return replace(codec, levels=1 << mildest.bits)
        case Group() | Division() if codec.bits < mildest.bits:
            return replace(codec, bits=mildest.bits)
        case Comet() if codec.relative and codec.bound > mildest.bound:
            return replace(codec, bound=mildest.bound)
    return codec
