"""A step at another batch, from its profiles at two.

    level(t, n) = fixed(t) + n slope(t)         fixed, slope from the profiles at n1 < n2

A batch of n2 r in B bytes is a batch of n2 in B / r bytes, beside fixed / r that is held anyway: so
the profile at n2 is only made to shrink what does not grow with the batch, and every storage keeps
its shape. A storage that does not grow with the batch counts as if it did. Error: what is not
linear, such as a workspace, or a loss over all pairs of a batch.
"""

from dataclasses import dataclass, replace
from math import ceil

from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.plan.make import AT_LEAST, LOSSY_HELPS, make_plan, too_small
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.plan.site import SiteName


@dataclass(frozen=True)
class TwoBatches:
    """Profiles of one step at batches `one` < `two`. Raises PlanError if they are not alike."""

    one: int
    two: int
    at_one: Profile
    at_two: Profile

    def __post_init__(self) -> None:
        if _outline(self.at_one) != _outline(self.at_two):
            raise PlanError(
                f"a step with batch {self.one} saves other tensors than one with batch {self.two}, "
                "so a larger batch cannot be predicted; use a loss and a make_batch that run the "
                "same ops for every batch size"
            )

    def profile(self, batch: int) -> Profile:
        """Returns the profile at `batch`, in units of batch / two.

        All bytes are to be multiplied by that.
        """
        ratio = batch / self.two

        def level(one: int, two: int) -> int:
            slope = (two - one) / (self.two - self.one)
            fixed = two - slope * self.two
            return int(fixed / ratio + slope * self.two)

        def levels(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(map(level, one, two))

        return replace(
            self.at_two,
            static=int(self.at_two.static / ratio),
            level=levels(self.at_one.level, self.at_two.level),
            floor=levels(self.at_one.floor, self.at_two.floor),
        )

    def plan(self, batch: int, budget: int, *, exact: bool | None) -> Plan:
        """Returns a plan for `batch` within `budget` bytes. Raises BudgetTooSmall."""
        ratio = batch / self.two
        try:
            plan = make_plan(self.profile(batch), int(budget / ratio), exact=exact)
        except BudgetTooSmall as error:
            parts = {name: ceil(nbytes * ratio) for name, nbytes in error.parts.items()}
            ways = (LOSSY_HELPS,) if exact else ()
            least, within = ceil(error.least_nbytes * ratio), f" with a batch of {batch}"
            raise too_small(budget, least, parts, AT_LEAST.format(within=within), *ways) from None
        return plan.grown(ratio, 0, budget)


def _outline(profile: Profile) -> tuple[int, int, list[list[SiteName]]]:
    """Returns what is saved, in order, and the moments, without sizes."""
    saves = [[save.site.name for save in storage.saves] for storage in profile.storages]
    return len(profile.level), profile.backward, saves
