"""Milder codes where an op is not linear in what it saves: an error there does not average out.

Backward of fused attention computes exp(q k - logsumexp) again from the saved q and k. An error of
standard deviation s in a logit makes that larger by exp(s^2 / 2) on average: a bias, and beyond a
few bits no gradient at all. A GPT of 64 steps, one code for all (gErr2; docs/log.md): 16 levels
0.0026, 4 levels 0.073, 2 levels 4e10, and 1-bit `division` 1e74. So attention gets at least 16
levels, whatever the rest has.

GELU and SiLU have bounded derivatives, and are biased a little: with s^2 the variance of the error,
by half of s^2 times a second or third derivative. Where a norm and the activation behind it share a
code, their errors multiply besides. So the square of the bias falls with (levels - 1)^4 where the
variance falls with (levels - 1)^2. Of the gradient's square, at random weights (docs/log.md):

                    4 levels               8 levels
    linear, GELU    0.27 % beside 18 %     0.009 % beside 3.2 %
    BN, GELU        1.1 %  beside 13 %     0.04 %  beside 2.0 %
    GN, SiLU        1.6 %  beside 3.5 %    0.06 %  beside 0.4 %

They get at least 8. A ReLU is linear in what is decoded, and needs nothing of this.
"""

from dataclasses import replace
from math import prod
from typing import NamedTuple

from elbowroom.codecs import Cast, Codec, Comet, Dither, Division, Group
from elbowroom.plan.site import NORMS, Formula, Site


class _Mildest(NamedTuple):
    """The levels that a code must have; bits and the bound of `comet` that have about their error."""

    levels: int

    @property
    def bits(self) -> int:
        return (self.levels - 1).bit_length()

    @property
    def bound(self) -> float:
        return 0.5 / self.levels


ATTENTION = "scaled_dot_product_attention"
CURVED = ("gelu", "silu")
_FEW = 512
_ATTENTION, _FINE, _SHARED = _Mildest(16), _Mildest(16), _Mildest(32)
_FLOORS = {
    Formula.PRODUCT: _FINE,
    Formula.CURVED: _FINE,
    Formula.EXPONENTIAL: _Mildest(256),
}
_PROBABILITIES = Cast("fp8_e4m3")


def gentle(codec: Codec, site: Site) -> Codec:
    """The codec itself, or a milder setting of it."""
    if site.consumer == ATTENTION:
        return _at_least(codec, _ATTENTION)
    if site.formula is Formula.PROBABILITY:
        return codec if codec.lossless or isinstance(codec, Cast) else _PROBABILITIES
    floor = _FLOORS.get(site.formula)
    if site.formula is Formula.SUMMED or site.formula is Formula.UNKNOWN:
        floor = _SHARED if site.curved else _FINE if _sums_few(site) else None
    return codec if floor is None else _at_least(codec, floor)


def _sums_few(site: Site) -> bool:
    """Whether so few elements are summed that their errors do not average out."""
    if site.formula is not Formula.SUMMED or len(site.shape) < 2:
        return False
    by_channel = site.consumer.startswith("conv") or site.consumer == "batch_norm"
    channels = site.shape[1] if by_channel else site.shape[-1]
    return prod(site.shape) < _FEW * channels


def if_curved(codec: Codec, site: Site) -> Codec | None:
    """What to take for a norm's input if a GELU or SiLU turns out to read the norm's output.

    None: the same, or that is known already.
    """
    if site.consumer not in NORMS or site.curved is not None:
        return None
    found = gentle(codec, replace(site, curved=True))
    return None if found == gentle(codec, site) else found


def _at_least(codec: Codec, mildest: _Mildest) -> Codec:
    match codec:
        case Dither() if codec.levels < mildest.levels:
            return replace(codec, levels=mildest.levels)
        case Group() | Division() if codec.bits < mildest.bits:
            return replace(codec, bits=mildest.bits)
        case Comet() if codec.relative and codec.bound > mildest.bound:
            return replace(codec, bound=mildest.bound)
    return codec
