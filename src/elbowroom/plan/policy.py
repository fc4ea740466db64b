"""A policy maps site facts to an action.

These three are uniform: one rule for all sites, no budget.

    KeepAll     measures, changes nothing
    Exact       masks, indices and rebuilding only: no bit of any gradient changes
    Lossy       Exact first; then one codec wherever the consumer tolerates an error

A policy may assume nothing beyond the site, so that it can be saved, compared and tested without a
model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from elbowroom.codecs import BitMask, Codec, Facts, Narrow
from elbowroom.plan.action import Action, Encode, Keep, Rebuild
from elbowroom.plan.site import Need, Rebuildable, Site

Policy = Callable[[Site], Action]

_MASK = Encode(BitMask(), Facts(value=1.0))


@dataclass(frozen=True)
class KeepAll:
    """Nothing is touched: what plain autograd holds, seen through the same ledger."""

    def __call__(self, site: Site) -> Action:
        return Keep("the policy keeps everything")


@dataclass(frozen=True)
class Exact:
    """Exact actions only."""

    rebuild: bool = True

    def __call__(self, site: Site) -> Action:
        if site.need is Need.SHAPE:
            return Rebuild()
        if site.need is Need.MASK:
            return _MASK
        if site.dtype is torch.bool:
            return Encode(BitMask(), Facts(value=1.0))
        if site.facts.value is not None and site.dtype in BitMask.dtypes:
            return Encode(BitMask(), site.facts)
        if site.facts.largest is not None and site.dtype in Narrow.dtypes:
            return Encode(Narrow(), site.facts)
        if self.rebuild and site.rebuildable is Rebuildable.EXACT:
            return Rebuild()
        return Keep(site.why or "no exact action applies")


@dataclass(frozen=True)
class Lossy:
    """Exact actions where they apply, and `codec` for the rest that tolerates an error.

    rebuild  outputs may be made again from encoded sources
    """

    codec: Codec
    rebuild: bool = True

    def __call__(self, site: Site) -> Action:
        exact = Exact(self.rebuild)(site)
        if not isinstance(exact, Keep) or site.need is not Need.LOSSY:
            return exact
        if self.rebuild and site.rebuildable is not Rebuildable.NO:
            return Rebuild()
        if site.dtype not in self.codec.dtypes:
            return Keep(
                f"codec '{self.codec.id}' does not take {str(site.dtype).removeprefix('torch.')}"
            )
        return Encode(self.codec, site.facts)
