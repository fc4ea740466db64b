"""Milder codes where an op is not linear in what it saves.

Backward of fused attention computes exp(q k - logsumexp) again from the saved q and k. An error of
standard deviation s in a logit makes that larger by exp(s^2 / 2) on average: a bias, and beyond a
few bits no gradient at all. A GPT of 64 steps, one code for all (gErr2; docs/log.md): 16 levels
0.0026, 4 levels 0.073, 2 levels 4e10, and 1-bit `division` 1e74. So attention gets at least 16
levels, whatever the rest has. GELU and SiLU, whose derivatives are bounded, are only biased a
little and take what all take.
"""

from dataclasses import replace

from elbowroom.codecs import Codec, Comet, Dither, Division, Group
from elbowroom.plan.site import Site

ATTENTION = "scaled_dot_product_attention"
_BITS, _BOUND = 4, 0.03  # 16 levels; the bound of `comet` has about their error


def gentle(codec: Codec, site: Site) -> Codec:
    """The codec itself, or a milder setting of it."""
    if site.consumer != ATTENTION:
        return codec
    match codec:
        case Dither() if codec.levels < 1 << _BITS:
            return replace(codec, levels=1 << _BITS)
        case Group() | Division() if codec.bits < _BITS:
            return replace(codec, bits=_BITS)
        case Comet() if codec.relative and codec.bound > _BOUND:
            return replace(codec, bound=_BOUND)
    return codec
