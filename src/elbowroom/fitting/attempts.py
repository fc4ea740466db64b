"""Plans that were followed, the peaks they reached, and the smallest plans still to be measured.

The error of one plan's prediction says little about another plan. So if no corrected plan fits, the
plans of the least predicted peak are measured: for each measured or estimated profile of the step,
one in which modules are recomputed and one in which none is. These plans do not depend on the
budget. So a budget as large as the lowest of their peaks is certain to suffice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from elbowroom.fitting.chosen import Chosen
    from elbowroom.plan.plan import Plan
    from elbowroom.plan.profile import Profile
    from elbowroom.plan.site import SiteName


_NEAR_LEAST = 1.1  # factor of the least predicted peak among the plans that are left


class KnownStep(NamedTuple):
    """Profile that a step is planned from. rehearsed: its backward is an estimate."""

    profile: "Profile"
    rehearsed: bool


class Taken(NamedTuple):
    """Peak of a step that was measured under a plan, and that plan."""

    peak_nbytes: int
    chosen: "Chosen"

    def is_of(self, chosen: "Chosen") -> bool:
        """Returns whether the measured plan takes the same actions and state format as `chosen`.

        The budgets and profiles that the two were made for may differ.
        """
        one, other = self.chosen, chosen
        same = one.candidate.state == other.candidate.state
        return same and _actions(one.plan) == _actions(other.plan)


class Smallest(NamedTuple):
    """Plan of the least predicted peak. rehearsed: whether its profile is an estimate."""

    chosen: "Chosen"
    rehearsed: bool

    @property
    def would_be_written(self) -> bool:
        """True if its step would be profiled: its profile is an estimate, and no module reruns."""
        return self.rehearsed and not self.chosen.plan.recompute


@dataclass(frozen=True)
class Attempts:
    """The plans of one kind of forward since its learning last began.

    known     profiles from which no smallest plan has been made yet
    taken     the plans that were measured, in order
    smallest  the plans of the least predicted peak that were made
    """

    known: tuple[KnownStep, ...] = ()
    taken: tuple[Taken, ...] = ()
    smallest: tuple[Smallest, ...] = ()

    def knowing(self, profile: "Profile") -> Self:
        """Returns the attempts with a profiled step. Its smallest plan comes first."""
        return replace(self, known=(KnownStep(profile, rehearsed=False), *self.known))

    def after(self, chosen: "Chosen", peak_nbytes: int) -> Self:
        """Returns the attempts with the measured peak of a step under this plan."""
        return replace(self, taken=(*self.taken, Taken(peak_nbytes, chosen)))

    @property
    def least(self) -> Taken | None:
        """Measured plan with the lowest peak; None: none was measured."""
        return min(self.taken, default=None, key=_peak_nbytes)

    @property
    def least_of_smallest(self) -> Taken | None:
        """Measured plan with the lowest peak, among the plans of the least predicted peak."""
        plans = [chosen for chosen, _ in self.smallest]
        known = (one for one in self.taken if any(map(one.is_of, plans)))
        return min(known, default=None, key=_peak_nbytes)

    def next_smallest(
        self, make: "Callable[[Profile, bool], Chosen | None]"
    ) -> tuple[Self, Smallest | None]:
        """Makes the smallest plans from the known profiles; returns one that was not measured yet.

        make: returns the smallest plan of a profile, if one is found; its flag says whether modules
        may be recomputed. A step without recomputed modules can be profiled, so its plan comes
        first among estimated ones; once a profile exists, estimates are no longer used. A plan that
        is predicted to need much more memory than another is tried later, because its forward would
        be refused before the other one was measured.
        """
        estimates = [one.rehearsed for one in self.known]
        is_written = not all(estimates + [one.rehearsed for one in self.smallest])
        made = list(self.smallest)
        for profile, rehearsed in self.known:
            for again in (True, False) if not rehearsed else (False, True):
                chosen = make(profile, again)
                if chosen is None or (not again and rehearsed and is_written):
                    continue
                made.append(Smallest(chosen, rehearsed))
        left = [
            one
            for one in made
            if not (is_written and one.would_be_written)
            and not any(taken.is_of(one.chosen) for taken in self.taken)
        ]
        least = min((one.chosen.plan.peak for one in left), default=0)
        near = (one for one in left if one.chosen.plan.peak <= _NEAR_LEAST * least)
        return replace(self, known=(), smallest=tuple(made)), next(near, None)


def _peak_nbytes(one: Taken) -> int:
    return one.peak_nbytes


def _actions(plan: "Plan") -> tuple[frozenset[str], dict["SiteName", str]]:
    return plan.recompute, {name: known.preset for name, known in plan.sites.items()}
