"""Predicts the gradient variance that codes add where no memory is left to measure it.

    share(site, levels) = 3 * reach / sampling / (levels - 1) ** 2
    reach      |dW|^2 / |g|^2, of the weights whose gradients the error of the tensor comes to
    sampling   the variance of mini-batches / |g|^2 (`gradient_variance.py`)

An error of x adds sum_t |dY_t|^2 |e_t|^2 to dW = sum_t dY_t x_t^T (`sensitivity.py`). Where the
gradients of tokens or places do not cancel, |dW|^2 is the same sum with x in the place of e. So the
variance is |dW|^2 times the squared error relative to x, which is 1.9 / (levels - 1)^2 for a code
of a normal. Any other op passes the error on to the weights below it. Of these, the nearest stand
for all; a norm passes on a tenth, and adds what its own weights get.

Measured over that, where there was room (docs/log.md, "noise that is predicted"): 0.8 to 1.6 where
a linear layer reads what is held, 2.5 to 3 where a convolution reads a ReLU of it, 0.6 to 1.4 for
attention and GELU. The largest of these is the factor 3.

No tensor is held for it: a few elements of each weight's gradient are, from step to step.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from torch import Tensor

from elbowroom.codecs import Codec
from elbowroom.measure.gradient_variance import GradientVariance, Key
from elbowroom.measure.sensitivity import form_of, is_weight
from elbowroom.measure.watching import call_values, one_by_one
from elbowroom.plan import Site, SiteName
from elbowroom.plan.menu import levels_of
from elbowroom.plan.shares import PREDICTED, NoiseShares, SiteShares
from elbowroom.plan.site import NORMS
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.observer import Use
from elbowroom.runtime.slot import Slot

_LEAST = 1e-6  # of |g|^2
_BELOW_NORM = 0.1  # of what reaches the weights below a norm


@dataclass
class _Op:
    """An op that reads tensors which may carry errors. sources: by the sites that hold them."""

    below: float  # how much of the error goes on to the weights below
    sources: set[SiteName] = field(default_factory=set)
    own: tuple[Key, ...] = ()
    before: tuple[Key, ...] = ()


class ReachWatch:
    """One forward: which weights the errors of which tensors come to."""

    def __init__(self, gradient: GradientVariance) -> None:
        self._gradient = gradient
        self._before: tuple[Key, ...] = ()  # of the last weights that an op has read
        self._ops: list[_Op] = []
        self._current: tuple[Call, _Op] | None = None  # until the call has ended
        self._waiting: weakref.WeakKeyDictionary[Slot, list[_Op]] = weakref.WeakKeyDictionary()
        self._codes: dict[SiteName, float] = {}

    def saved(self, use: Use, x: Tensor) -> None:
        if self._current is None or self._current[0] is not use.call:
            is_norm = use.call.name in NORMS
            below = 0.0 if form_of(use.call) is not None else _BELOW_NORM if is_norm else 1.0
            self._current = use.call, _Op(below, before=self._before)
            self._ops.append(self._current[1])
        self._waiting.setdefault(use.view.slot, []).append(self._current[1])

    def held(self, slot: Slot, whole: Tensor, site: Site, codec: Codec | None) -> None:
        if codec is not None and not codec.lossless:
            self._codes[site.name] = (levels_of(codec, site) - 1) ** -2

    def curved(self, slot: Slot) -> None:
        pass

    def ended(self, call: Call, out: Any) -> None:
        given = list(one_by_one(call_values(call)))
        for arg in given:
            self._gradient.reads(arg)
        weights = filter(is_weight, given)
        own = tuple(map(self._gradient.listen, weights))
        if self._current is not None and self._current[0] is call:
            self._current[1].own, self._current = own, None
        self._before = own or self._before
        self._find_sources()

    def _find_sources(self) -> None:
        """Names the tensors of which it is decided by now what holds them."""
        for slot, ops in list(self._waiting.items()):
            root = slot.root()
            if root.sites and not root.waits:
                for op in self._waiting.pop(slot, ops):
                    op.sources.update(site.name for site in root.sites)

    def reached(self) -> tuple[dict[SiteName, float], float]:
        """Returns the reach of each site in this step, and what codes are predicted to add to it.

        That is a share of |g|^2, too. Call this when backward is over.
        """
        self._find_sources()
        sizes = self._gradient.sizes_now
        total = sum(sizes.values())
        found: Counter[SiteName] = Counter()
        for op in self._ops if total > 0 and isfinite(total) else ():
            reach = _sum(sizes, op.own) + op.below * _sum(sizes, op.before)
            found.update(dict.fromkeys(op.sources, reach / total))
        return dict(found), sum(PREDICTED * found[name] * one for name, one in self._codes.items())


def _sum(sizes: dict[Key, float], keys: Iterable[Key]) -> float:
    return sum(sizes.get(key, 0.0) for key in keys)


class ReachMeter:
    """The observer of the steps in which the reach of errors is found. step: steps so far."""

    def __init__(self, steps: int) -> None:
        """steps: in which gradients are read."""
        self.step, self._steps = 0, steps
        self._gradient = GradientVariance()
        self._reach: Counter[SiteName] = Counter()
        self._added = 0.0
        self._heard = 0  # steps in which there was a gradient
        self._watch: ReachWatch | None = None

    def begin(self) -> ReachWatch | None:
        self.harvest()
        self._watch = ReachWatch(self._gradient) if self.step < self._steps else None
        self.step += 1
        return self._watch

    def harvest(self) -> None:
        """Takes in what the last step has shown. Its backward must be over."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        found, added = watch.reached()
        self._heard += bool(found)
        self._reach.update(found)
        self._added += added
        self._gradient.end_step(last=self.step >= self._steps)

    def shares(self, saved_nbytes: int) -> NoiseShares:
        """Returns what codes are predicted to add, as a share of the variance of mini-batches.

        If this is not known, or all batches were the same, |g|^2 takes its place, which is larger.

        saved_nbytes: what plain training saves; by it goes what no op was seen to read
        """
        heard = max(self._heard, 1)
        # What codes add is part of the variance over steps. The prediction of it may be too large.
        is_known = self._gradient.draws and not self._gradient.is_one_batch
        varies = min(self._gradient.share, 1.0) if is_known else 1.0
        sampling = max(varies - self._added / heard, varies / 2, _LEAST) if is_known else 1.0
        each = PREDICTED / sampling / heard
        sites = tuple(
            SiteShares(name, (2,), (each * reach,)) for name, reach in self._reach.items()
        )
        return NoiseShares(0, sites, PREDICTED / sampling / max(saved_nbytes, 1))

    def error_report(self) -> str:
        return "what codes add is predicted, and not measured"
