"""Seconds of settled steps: which plan is the fastest of those that were tried, and what to try.

A plan is the cheapest by what single actions were measured to take, each by itself. So once it is
settled, and its steps are long enough to be worth it, some are timed. They correct the prices
(`plan/factors.py`), and what is the cheapest by these, of all that may be done and of single ways,
is tried, too; the fastest of the plans that were timed stays.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from elbowroom.fitting.attempts import Taken

if TYPE_CHECKING:
    from elbowroom.fitting.chosen import Chosen
    from elbowroom.fitting.headroom import Headroom

WORTH_S = 0.05  # of a step that is shorter, what is won is less than what looking costs
_PLANS = 3  # that are timed
_FASTER = 0.97  # times the seconds of one before: a difference that is no chance
_NEAR = 1.05  # times the least that was timed: predicted to take no more, it is worth a try


class Timing(NamedTuple):
    """A plan, and the seconds that a settled step under it has taken. headroom: as it was then."""

    chosen: "Chosen"
    seconds: float
    headroom: "Headroom"

    def cost_s(self, plain_s: float) -> float:
        """Returns its seconds, and those that its noise is worth in steps of `plain_s`."""
        return self.seconds + self.chosen.plan.noise * plain_s


def fastest(timings: tuple[Timing, ...]) -> Timing:
    """Returns the best of those that were timed: an earlier one, if another is hardly better."""
    plain_s, best = timings[0].chosen.plan.plain_seconds, timings[0]
    for one in timings[1:]:
        if one.cost_s(plain_s) < _FASTER * best.cost_s(plain_s):
            best = one
    return best


def next_tried(timings: tuple[Timing, ...], plans: "Iterable[Chosen]") -> "Chosen | None":
    """Returns the plan that is worth a try, of these by corrected prices; None: none is."""
    if len(timings) >= _PLANS:
        return None
    plain_s = timings[0].chosen.plan.plain_seconds
    most_s = _NEAR * fastest(timings).cost_s(plain_s)
    left = [one for one in plans if not any(Taken(0, t.chosen).is_of(one) for t in timings)]
    best = min(left, key=lambda one: _predicted_s(one, plain_s), default=None)
    return None if best is None or _predicted_s(best, plain_s) > most_s else best


def _predicted_s(one: "Chosen", plain_s: float) -> float:
    return one.plan.seconds + one.plan.noise * plain_s
