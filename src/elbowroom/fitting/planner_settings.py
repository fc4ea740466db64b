"""A plan of one profile under the terms of a fit, for calls larger than the profiled one, too."""

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Self

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.options import FitOptions
from elbowroom.plan.make import AT_LEAST, LOSSY_HELPS, make_plan
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile

_CAREFUL = 0.03  # of what is not static is left free by a plan that was not measured, if it can be


@dataclass(frozen=True)
class PlannerSettings:
    """Settings by which plans are made.

    ratio          how much larger than the profiled call the largest is
    margin_nbytes  by which plans in which no module runs again have been too optimistic
    again_nbytes   by which those have been in which some do
    lossy_helps    what a refusal under exact=True tells to type
    least_is       what a refusal says of the budget that it names
    finest         bytes to within which that budget is searched for
    """

    options: FitOptions
    ratio: float = 1.0
    margin_nbytes: int = 0
    again_nbytes: int = 0
    lossy_helps: str = LOSSY_HELPS
    least_is: str = AT_LEAST
    finest: float = 1

    def exact_plan(self, profile: Profile) -> Plan | None:
        """Returns an exact plan, if need be with less left free: it is preferred to a lossy one."""
        return self._found(profile, exact=True)

    def best_plan(self, profile: Profile) -> Plan:
        """Returns the best plan that the options allow, with a little room left free if possible.

        Raises BudgetTooSmall.
        """
        exact = self.options.exact
        return (
            (exact is None and self.exact_plan(profile))
            or self._found(profile, exact=exact)
            or self._cheaper(profile, 0, exact=exact)
        )

    def _found(self, profile: Profile, *, exact: bool | None) -> Plan | None:
        """Returns a plan that leaves a little memory free, or one that leaves none, or None."""
        careful, hasty = (
            int(_CAREFUL * (self.options.budget_nbytes - profile.static)),
            self._without_least_budget,
        )
        for more in (careful, 0):
            try:
                return hasty._cheaper(profile, more, exact=exact)
            except BudgetTooSmall:
                continue
        return None

    def _cheaper(self, profile: Profile, more: int, *, exact: bool | None) -> Plan:
        """The cheaper of a plan in which modules may run again and one in which none does.

        Each has its own margin: what one kind was wrong by says little of the other. Raises
        BudgetTooSmall.
        """
        found: list[Plan] = []
        refusals: list[BudgetTooSmall] = []
        again, once = self.again_nbytes + more, self.margin_nbytes + more
        ways = [(True, again), (False, once)] if again > once else [(True, again)]
        for recompute, margin in ways:
            try:
                plan = self.make(profile, margin, exact=exact, recompute=recompute)
                if margin < once and not plan.recompute:  # then it has the other margin
                    plan = self.make(profile, once, exact=exact)
                found.append(plan)
            except BudgetTooSmall as error:
                refusals.append(error)
        if not found:
            raise min(refusals, key=lambda error: error.least_nbytes)
        return min(found, key=lambda one: one.seconds + one.noise * profile.seconds)

    def plan_for(
        self, profile: Profile, margin: int, *, exact: bool | None, recompute: bool = True
    ) -> Plan | None:
        """Returns a plan; None if nothing fits. margin: bytes that are left free."""
        try:
            return self._without_least_budget.make(
                profile, margin, exact=exact, recompute=recompute
            )
        except BudgetTooSmall:
            return None

    @property
    def _without_least_budget(self) -> Self:
        """The same for who does not ask which budget would do."""
        return replace(self, finest=inf)

    def make(
        self, profile: Profile, margin: int, *, exact: bool | None, recompute: bool = True
    ) -> Plan:
        """Returns a plan that leaves `margin` bytes free. Raises BudgetTooSmall."""
        budget_nbytes, static = self.options.budget_nbytes, profile.static
        noise = None if profile.noise is None else self.options.noise  # no ground to refuse before
        make = partial(
            make_plan,
            profile,
            exact=exact,
            recompute=recompute,
            offload=self.options.offload,
            noise=noise,
            solver=self.options.solver,
            codecs=self.options.codecs,
            lossy_helps=self.lossy_helps,
            least_is=self.least_is,
            finest=self.finest,
        )
        if self.ratio == 1:
            return make(budget_nbytes, margin=margin)
        smaller = static + int((budget_nbytes - margin - static) / self.ratio)
        plan = make(smaller)
        return plan.grown(self.ratio, static, budget_nbytes)
