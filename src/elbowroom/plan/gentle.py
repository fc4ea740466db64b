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

They get at least 8, and so does the input of a recurrent layer, whose gates are as smooth. A ReLU
is linear in what is decoded, and needs nothing of this.

A piece of forward that the user's checkpoint runs again from a decoded input is curved all over,
and its ReLUs pass what they did not: what that adds to gErr2 (`dither`; public models, docs/log.md)

    levels      4        16       64
    Llama       0.005    0.0002   0.00001
    ViT         0.12     0.006    0.0003
    ResNet-50   0.13     0.03     0.005

So the inputs of a checkpoint get at least 32.
"""

from dataclasses import replace
from typing import NamedTuple

from elbowroom.codecs import Codec, Comet, Dither, Division, Group
from elbowroom.plan.site import CHECKPOINT, NORMS, RECURRENT, Rebuildable, Site


class _Mildest(NamedTuple):
    """The bits that a code must have, and the bound of `comet` that has about their error."""

    bits: int
    bound: float


ATTENTION = "scaled_dot_product_attention"
CURVED = ("gelu", "silu")
_ATTENTION, _CURVED = _Mildest(4, 0.03), _Mildest(3, 0.07)
_CHECKPOINT = _Mildest(5, 0.02)


def gentle(codec: Codec, site: Site) -> Codec:
    """The codec itself, or a milder setting of it."""
    if site.consumer == ATTENTION:
        return _at_least(codec, _ATTENTION)
    if site.consumer == CHECKPOINT:
        return _at_least(codec, _CHECKPOINT)
    if site.consumer in (*CURVED, *RECURRENT) or site.curved:
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
    known = site.rebuildable is not Rebuildable.LOSSY or site.curved
    return site.consumer not in CURVED or bool(known) or gentle(codec, site) == codec


def _at_least(codec: Codec, mildest: _Mildest) -> Codec:
    match codec:
        case Dither() if codec.levels < 1 << mildest.bits:
            return replace(codec, levels=1 << mildest.bits)
        case Group() | Division() if codec.bits < mildest.bits:
            return replace(codec, bits=mildest.bits)
        case Comet() if codec.relative and codec.bound > mildest.bound:
            return replace(codec, bound=mildest.bound)
    return codec
