"""Plans that were followed, what they took, and which of the smallest are left to be tried.

What one plan was wrong by says little of another. So if corrections leave none, the plans of the
least predicted peak are measured: for each profile that the step is known or estimated by, one in
which modules run again and one in which none does.
These do not depend on the budget. So the least that they took is a budget that does if it is given.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from elbowroom.fitting.chosen import Chosen
    from elbowroom.plan.plan import Plan
    from elbowroom.plan.profile import Profile
    from elbowroom.plan.site import SiteName


_NEAR_LEAST = 1.1  # times the least predicted peak of those left


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
    """Plan of the least predicted peak. rehearsed: whether the profile is, that it was made by."""

    chosen: "Chosen"
    rehearsed: bool


@dataclass(frozen=True)
class Attempts:
    """The plans of one kind of forward, since it last began to learn.

    known     what plans may be made by, and no smallest one is made by yet
    taken     the plans that were measured, in order
    smallest  the plans of the least predicted peak that were made
    """

    known: tuple[KnownStep, ...] = ()
    taken: tuple[Taken, ...] = ()
    smallest: tuple[Smallest, ...] = ()

    def knowing(self, profile: "Profile") -> Self:
        """Returns the attempts with a step that was written down. Its smallest plan comes first."""
        return replace(self, known=(KnownStep(profile, rehearsed=False), *self.known))

    def after(self, chosen: "Chosen", peak_nbytes: int) -> Self:
        """Returns the attempts with what a measured step under this plan took."""
        return replace(self, taken=(*self.taken, Taken(peak_nbytes, chosen)))

    @property
    def least(self) -> Taken | None:
        """Plan that took least; None: none was measured."""
        return min(self.taken, default=None, key=_peak_nbytes)

    @property
    def least_of_smallest(self) -> Taken | None:
        """Plan that took least of those of the least predicted peak."""
        plans = [chosen for chosen, _ in self.smallest]
        known = (one for one in self.taken if any(map(one.is_of, plans)))
        return min(known, default=None, key=_peak_nbytes)

    def next_smallest(
        self, make: "Callable[[Profile, bool], Chosen | None]"
    ) -> tuple[Self, Smallest | None]:
        """Makes the smallest plans of what is known; returns one that was not measured yet.

        make: the smallest plan of a profile, if it is found; the flag says whether modules may run
        again. One in which none does can be written down, so it comes first of those by an
        estimate; once that has been done, no estimate knows a smaller one. What is predicted to
        take much more than another waits: its forward would be refused before that was tried.
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
        left = [one for one in made if not any(t.is_of(one.chosen) for t in self.taken)]
        least = min((one.chosen.plan.peak for one in left), default=0)
        near = (one for one in left if one.chosen.plan.peak <= _NEAR_LEAST * least)
        return replace(self, known=(), smallest=tuple(made)), next(near, None)


def _peak_nbytes(one: Taken) -> int:
    return one.peak_nbytes


def _actions(plan: "Plan") -> tuple[frozenset[str], dict["SiteName", str]]:
    return plan.recompute, {name: known.preset for name, known in plan.sites.items()}
