"""Plans that were followed, the peaks they reached, and the smallest plans still to be measured.

The error of one plan's prediction says little about another plan. So if no corrected plan fits, the
plans with the lowest predicted peak are measured: for each measured or estimated profile of the
step, one in which modules are recomputed and one in which none is. These plans do not depend on the
budget. So a budget as large as the lowest of their peaks is certain to suffice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from elbowroom.plan.plan import Plan
    from elbowroom.plan.profile import Profile
    from elbowroom.plan.site import SiteName


@dataclass(frozen=True)
class Candidate:
    """Profile of the step if all auto states had one format.

    state: the format, "" if none is chosen.
    """

    state: str
    profile: "Profile"
    noise: float = 0.0


@dataclass(frozen=True)
class Chosen:
    """Plan, and the candidate that it was made for."""

    candidate: Candidate
    plan: "Plan"


_NEAR_LEAST = 1.1  # factor of the least predicted peak among the plans that are left


class KnownStep(NamedTuple):
    """Profile that a step is planned from.

    from_rehearsal: its backward is an estimate (`rehearse.py`)
    """

    profile: "Profile"
    from_rehearsal: bool

    @property
    def unmade(self) -> tuple["Unmade", ...]:
        """The smallest plans of the profile, in the order in which they are tried.

        A step without recomputed modules can be profiled, so its plan comes first of an estimate.
        """
        again = Unmade(self, recompute=True)
        once = Unmade(self, recompute=False)
        return (once, again) if self.from_rehearsal else (again, once)


class Unmade(NamedTuple):
    """Request for a smallest plan that was not made yet. recompute: modules may be recomputed."""

    step: KnownStep
    recompute: bool


class Taken(NamedTuple):
    """Peak of a step that was measured under a plan, and that plan.

    was_profiled: it ran as steps are profiled, so that others of this plan may take more
    """

    peak_nbytes: int
    chosen: "Chosen"
    was_profiled: bool = False

    def is_of(self, chosen: "Chosen") -> bool:
        """Returns whether the measured plan takes the same actions and state format as `chosen`.

        The budgets and profiles that the two were made for may differ.
        """
        one, other = self.chosen, chosen
        same = one.candidate.state == other.candidate.state
        return same and _actions(one.plan) == _actions(other.plan)


class Smallest(NamedTuple):
    """Plan with the lowest predicted peak.

    from_rehearsal: its profile is an estimate (`rehearse.py`)
    """

    chosen: "Chosen"
    from_rehearsal: bool

    @property
    def would_be_written(self) -> bool:
        """True if its step would be profiled: its profile is an estimate, and no module reruns."""
        return self.from_rehearsal and not self.chosen.plan.recompute


@dataclass(frozen=True)
class Attempts:
    """The plans of one kind of forward since its learning last began.

    known     profiles that are new since a smallest plan was asked for
    unmade    smallest plans of the others that were not made yet, in order
    taken     the plans that were measured, in order
    smallest  the plans with the lowest predicted peak that were made
    """

    known: tuple[KnownStep, ...] = ()
    unmade: tuple[Unmade, ...] = ()
    taken: tuple[Taken, ...] = ()
    smallest: tuple[Smallest, ...] = ()

    def knowing(self, profile: "Profile") -> Self:
        """Returns the attempts with a profiled step. Its smallest plan comes first."""
        return replace(self, known=(KnownStep(profile, from_rehearsal=False), *self.known))

    def after(self, chosen: "Chosen", peak_nbytes: int, *, was_profiled: bool = False) -> Self:
        """Returns the attempts with the measured peak of a step under this plan."""
        return replace(self, taken=(*self.taken, Taken(peak_nbytes, chosen, was_profiled)))

    @property
    def least(self) -> Taken | None:
        """Measured plan with the lowest peak; None: none was measured.

        Of a plan that was measured again after its profiled step, the later steps count.
        """
        again = [one.chosen for one in self.taken if not one.was_profiled]
        known = (one for one in self.taken if not (one.was_profiled and any(map(one.is_of, again))))
        return min(known, default=None, key=_peak_nbytes)

    @property
    def least_of_smallest(self) -> Taken | None:
        """Measured plan with the lowest peak, among the plans with the lowest predicted peak."""
        plans = [chosen for chosen, _ in self.smallest]
        known = (one for one in self.taken if any(map(one.is_of, plans)))
        return min(known, default=None, key=_peak_nbytes)

    def next_smallest(
        self,
        make: "Callable[[Profile, bool], Chosen]",
        bound: "Callable[[Profile, bool], float]",
    ) -> tuple[Self, Smallest | None]:
        """Returns a smallest plan that was not measured yet; none is made that is not needed.

        make: returns the smallest plan of a profile; its flag says whether modules may be
        recomputed. bound: returns a peak in bytes below which that plan hardly comes.

        Once a step was profiled, estimates without recomputed modules are no longer used. A plan
        that is predicted to need much more memory than another is tried later, because its forward
        would be refused before the other one was measured. Where all were measured, and none was
        profiled, since its step created the optimizer's states, one is followed once more for that.
        """
        unmade = [*self.unmade, *(one for step in self.known for one in step.unmade)]
        from_rehearsal = [one.step.from_rehearsal for one in unmade]
        is_written = not all(from_rehearsal + [one.from_rehearsal for one in self.smallest])
        if is_written:
            unmade = [one for one in unmade if one.recompute or not one.step.from_rehearsal]
        bounds = [bound(one.step.profile, one.recompute) for one in unmade]
        made = list(self.smallest)
        while True:
            left = [
                one
                for one in made
                if not (is_written and one.would_be_written) and not self._times_taken(one)
            ]
            enough = _NEAR_LEAST * min([*(one.chosen.plan.peak for one in left), *bounds, inf])
            near = next((one for one in left if one.chosen.plan.peak <= enough), None)
            if near is None and not unmade and not is_written:
                only_measured = (one for one in made if one.would_be_written)
                near = next((one for one in only_measured if self._times_taken(one) == 1), None)
            if near is not None or not unmade:
                return replace(self, known=(), unmade=tuple(unmade), smallest=tuple(made)), near
            at = next(n for n, nbytes in enumerate(bounds) if nbytes <= enough)
            step, again = unmade.pop(at)
            del bounds[at]
            made.append(Smallest(make(step.profile, again), step.from_rehearsal))

    def _times_taken(self, one: Smallest) -> int:
        return sum(taken.is_of(one.chosen) for taken in self.taken)


def _peak_nbytes(one: Taken) -> int:
    return one.peak_nbytes


def _actions(plan: "Plan") -> tuple[frozenset[str], dict["SiteName", str]]:
    return plan.recompute, {name: known.preset for name, known in plan.sites.items()}
