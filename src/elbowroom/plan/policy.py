"""A policy maps site facts to an action.

These are uniform: one rule for all sites, no budget.

    KeepAll     measures, changes nothing
    Exact       masks, indices and rebuilding only: no bit of any gradient changes
    Lossy       Exact first; then one codec wherever the consumer tolerates an error
    Lean        Lossy with the fewest bits: one code for norm, ReLU and the next convolution

A policy may assume nothing beyond the site, so that it can be saved, compared and tested without a
model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch

from elbowroom.codecs import BitMask, Codec, Dither, Facts, Narrow, Sided
from elbowroom.errors import UnknownField
from elbowroom.kernels.layout import FOLDS, GROUP_SIZES
from elbowroom.plan.action import Action, Encode, Keep, Rebuild
from elbowroom.plan.precision_floor import at_precision_floor, if_curved
from elbowroom.plan.site import Need, Rebuildable, Site

Policy = Callable[[Site], Action]

_MASK = Encode(BitMask(), Facts(value=1.0))
_SHARED = 4  # levels of a code that several values share
_EACH = 128  # elements of a channel for each value that shares a code: an error of 0.3 % at most


@dataclass(frozen=True)
class KeepAll:
    """Policy that changes nothing; the ledger shows what plain autograd stores."""

    def __call__(self, site: Site) -> Action:
        return Keep("the policy keeps everything")


@dataclass(frozen=True)
class Exact:
    """Policy of exact actions only."""

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
    """Policy that uses exact actions where they apply, and `codec` wherever an error is tolerated.

    Attention, GELU and SiLU get a more precise setting of the codec (`precision_floor.py`).

    rebuild  outputs may be rebuilt from encoded tensors
    again    ops may run forward again, instead of saving intermediate results
    """

    codec: Codec
    rebuild: bool = True
    again: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        """True if no bit of any gradient changes."""
        return self.codec.lossless

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
        curved = if_curved(self.codec, site) if self.rebuild else None
        return Encode(at_precision_floor(self.codec, site), site.facts, curved=curved)


@dataclass(frozen=True)
class Lean:
    """Policy that uses exact actions where they apply, and dither elsewhere.

    The number of levels depends on what reads the values.

    upper       levels of values that the ReLU passes on, which the next convolution reads
    lower       levels of values that the ReLU sets to zero, which only the norm's backward reads
    fold        the number of such values that share one code of 4 levels, where all of the norm's
                gradient comes through the ReLU, and channels have 128 elements for each; 1: none
    plain       levels for inputs of norms that no ReLU follows, and for tensors without exact zeros
    group_size  the number of elements that share a step
    rebuild     outputs may be rebuilt from encoded tensors; otherwise no code serves two readers,
                and `lower` is not used
    """

    upper: int = 4
    lower: int = 2
    plain: int = 4
    group_size: int = 64
    fold: int = 8
    rebuild: bool = True
    exact: ClassVar[bool] = False
    again: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("upper", "lower", "plain"):
            levels = getattr(self, name)
            if type(levels) is not int or not 2 <= levels <= 256:
                raise UnknownField(
                    f"policy 'lean': {name}={levels!r} is not possible; "
                    f"{name} is an int from 2 to 256, how many levels a code has"
                )
        for name, possible in (("group_size", GROUP_SIZES), ("fold", FOLDS)):
            size = getattr(self, name)
            if type(size) is not int or size not in possible:
                raise UnknownField(
                    f"policy 'lean': {name}={size!r} is not possible; "
                    f"{name} is one of {', '.join(map(str, possible))}"
                )

    def __call__(self, site: Site) -> Action:
        exact = Exact(self.rebuild)(site)
        if not isinstance(exact, Keep) or site.need is not Need.LOSSY:
            return exact
        levels = Dither(levels=self.plain, group_size=self.group_size)
        if self.rebuild and site.rebuildable is not Rebuildable.NO:
            return Rebuild()
        if site.dtype not in Dither.dtypes:
            return Keep(f"dither does not take {str(site.dtype).removeprefix('torch.')}")
        if site.facts.has_zeros:
            zeros = Dither(levels=self.upper, group_size=self.group_size)
            return Encode(at_precision_floor(zeros, site), site.facts)
        plain, curved = (
            at_precision_floor(levels, site),
            if_curved(levels, site) if self.rebuild else None,
        )
        if not self.rebuild or site.consumer != "batch_norm" or site.curved:
            return Encode(plain, site.facts, curved=curved)
        with_mask = Sided(self.upper, self.lower, self.group_size)
        fold = self._fold(site)
        if fold == 1:
            return Encode(plain, site.facts, with_mask, curved=curved)
        gated = replace(with_mask, lower=_SHARED, fold=fold)
        behind_sum = replace(gated, upper=self.plain)
        return Encode(plain, site.facts, with_mask, gated, behind_sum, curved)

    def _fold(self, site: Site) -> int:
        """Returns the largest fold that a channel's elements bear: it adds fold / elements."""
        each = prod(site.shape) // site.shape[1]
        possible = (fold for fold in FOLDS if fold <= min(self.fold, each // _EACH))
        return max(possible, default=1)
