"""Plans of one profile under the options of a fit, also for calls larger than the profiled one."""

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Self

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.refusals import without_frames
from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.make import AT_LEAST, LOSSY_HELPS, make_plan
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.plan.solve import BASELINES, Limits, least_bound

# Of non-static bytes, what an unmeasured plan leaves free, if possible. Predictions from a measured
# step are wrong by less than the second, so that no other plan has to be made and measured.
_CAREFUL = (0.03, 0.005, 0.0)


@dataclass(frozen=True)
class PlannerSettings:
    """Settings by which plans are made.

    ratio          how much larger than the profiled call the largest is
    margin_nbytes  by which plans without recomputed modules have been too optimistic
    recompute_margin_nbytes   by which plans with recomputed modules have been
    lossy_helps    remedy that a refusal under exact=True names, if codes could help
    helps_anyway   it does so whatever codes do
    least_is       remark of a refusal about the budget that it names
    finest         precision in bytes of the search for that budget
    """

    options: FitOptions
    ratio: float = 1.0
    margin_nbytes: int = 0
    recompute_margin_nbytes: int = 0
    lossy_helps: str = LOSSY_HELPS
    helps_anyway: bool = False
    least_is: str = AT_LEAST
    finest: float = 1

    def exact_plan(self, profile: Profile) -> Plan | None:
        """Returns an exact plan, preferred to a lossy one even if it leaves less memory free."""
        return self._found(profile, exact=True)

    def best_plan(self, profile: Profile) -> Plan:
        """Returns the best plan that the options allow, with a little memory left free if possible.

        Raises BudgetTooSmall.
        """
        exact = self.options.exact
        return (
            (exact is None and self.exact_plan(profile))
            or self._found(profile, exact=exact)
            or self._cheaper(profile, 0, exact=exact)
        )

    def _found(self, profile: Profile, *, exact: bool | None) -> Plan | None:
        """Returns a plan that leaves a little memory free, or one that leaves none, or None.

        Most searches that find none take long, so where the first has failed, the one that leaves
        none says whether there is a point in others.
        """
        free, hasty = self.options.budget_nbytes - profile.static, self._without_least_budget

        def leaving(share: float) -> Plan | None:
            try:
                return hasty._cheaper(profile, int(share * free), exact=exact)
            except BudgetTooSmall:
                return None

        most, *less, none = _CAREFUL
        found = leaving(most)
        if found is not None or (last := leaving(none)) is None:
            return found
        return next(filter(None, map(leaving, less)), last)

    def _cheaper(self, profile: Profile, more: int, *, exact: bool | None) -> Plan:
        """The faster of two plans, of which only the first may recompute modules.

        Each has a margin of its own, because the error of one kind says little about the other.
        Raises BudgetTooSmall.
        """
        found: list[Plan] = []
        refusals: list[BudgetTooSmall] = []
        again, once = self.recompute_margin_nbytes + more, self.margin_nbytes + more
        ways = [(True, again), (False, once)] if again > once else [(True, again)]
        for recompute, margin in ways:
            try:
                plan = self.make(profile, margin, exact=exact, recompute=recompute)
                if margin < once and not plan.recompute:  # such a plan has the other margin
                    plan = self.make(profile, once, exact=exact)
                found.append(plan)
            except BudgetTooSmall as error:
                refusals.append(without_frames(error))
        if not found:
            refusals.sort(key=lambda error: -error.least_nbytes)
            raise refusals.pop()  # of what the frame holds, none is the error that it raises
        return min(found, key=lambda one: one.seconds + one.noise * profile.seconds)

    def plan_for(
        self, profile: Profile, margin: int, *, exact: bool | None, recompute: bool = True
    ) -> Plan | None:
        """Returns a plan; None if none fits. margin: bytes that are left free."""
        try:
            return self._without_least_budget.make(
                profile, margin, exact=exact, recompute=recompute
            )
        except BudgetTooSmall:
            return None

    def least_bound(self, profile: Profile, *, recompute: bool) -> float:
        """Returns a peak in bytes below which hardly any plan comes; 0: none is known.

        It is the first part of a search for the least peak, which goes on from it.
        """
        options = self.options
        if options.offload is not None or options.solver in BASELINES or self.ratio != 1:
            return 0.0
        exact = bool(options.exact)
        built = (
            build_problem(profile, exact=True, recompute=recompute)
            if exact
            else build_problem(
                profile, exact=False, recompute=recompute, whole=False, codecs=options.codecs
            )
        )
        return least_bound(built.problem, Limits(0, exact=exact))

    @property
    def _without_least_budget(self) -> Self:
        """Returns the settings for a caller that needs no least budget."""
        return replace(self, finest=inf)

    def smallest_plan(
        self, profile: Profile, *, exact: bool | None, recompute: bool = True
    ) -> Plan:
        """Returns the plan of the least predicted peak, whatever the budget is."""
        none = replace(self, options=self.options.within(1))
        least = none.make(profile, 0, exact=exact, recompute=recompute, takes_least=True)
        # Within that peak there are faster plans, if the search comes as low again.
        enough = replace(self, options=self.options.within(least.peak))
        faster = enough.plan_for(profile, 0, exact=exact, recompute=recompute)
        return replace(faster or least, budget=self.options.budget_nbytes)

    def make(
        self,
        profile: Profile,
        margin: int,
        *,
        exact: bool | None,
        recompute: bool = True,
        takes_least: bool = False,
    ) -> Plan:
        """Returns a plan that leaves `margin` bytes free. Raises BudgetTooSmall.

        takes_least: where none does, returns the one of the least predicted peak

        A limit of noise holds for every plan, also for one that is only tried. Until the noise of
        codes is known, it is predicted from the sizes of tensors.
        """
        noise = None if exact else self.options.noise
        if noise is not None and profile.noise is None:
            profile = profile.by_size
        budget_nbytes, static = self.options.budget_nbytes, profile.static
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
            helps_anyway=self.helps_anyway,
            least_is=self.least_is,
            finest=self.finest,
            takes_least=takes_least,
        )
        if self.ratio == 1:
            return make(budget_nbytes, margin=margin)
        smaller = static + int((budget_nbytes - margin - static) / self.ratio)
        plan = make(smaller)
        return plan.grown(self.ratio, static, budget_nbytes)
