"""Plans that were followed, what they took, and which of the smallest are left to be tried.

What one plan was wrong by says little of another. So if corrections leave none, the plans of the
least predicted peak are measured: for each profile that the step is known or estimated by, one in
which modules run again and one in which none does.
These do not depend on the budget. So the least that they took is a budget that does if it is given.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from elbowroom.fitting.state_formats import Chosen
from elbowroom.plan.plan import difference
from elbowroom.plan.profile import Profile


class KnownStep(NamedTuple):
    """What a step is planned by. rehearsed: its backward is an estimate."""

    profile: Profile
    rehearsed: bool


class Taken(NamedTuple):
    """What a step under a plan took."""

    peak_nbytes: int
    chosen: Chosen

    def is_of(self, chosen: Chosen) -> bool:
        """Whether it did the same, whatever budget or profile that was made for."""
        one = self.chosen
        same = one.candidate.state == chosen.candidate.state
        return same and not difference(one.plan, chosen.plan)


class Smallest(NamedTuple):
    """A plan of the least predicted peak. rehearsed: the profile that it was made by is."""

    chosen: Chosen
    rehearsed: bool


class Attempts:
    """The plans of one planning, since it last began to learn.

    is_smallest  one of the least predicted peak is followed
    """

    def __init__(self, known: Iterable[KnownStep] = ()) -> None:
        self.is_smallest = False
        self._known = list(known)  # of whose smallest plans none is made yet
        self._taken: list[Taken] = []
        self._smallest: list[Smallest] = []

    def knows(self, profile: Profile) -> None:
        """The step has been written down: its smallest plan comes first."""
        self._known.insert(0, KnownStep(profile, rehearsed=False))

    def took(self, chosen: Chosen, peak_nbytes: int) -> None:
        """A step under this plan was measured."""
        self._taken.append(Taken(peak_nbytes, chosen))

    @property
    def least(self) -> Taken | None:
        """The plan that took least; None: none was measured."""
        return min(self._taken, default=None, key=_peak_nbytes)

    @property
    def least_of_smallest(self) -> Taken | None:
        """The same of those of the least predicted peak."""
        plans = [chosen for chosen, _ in self._smallest]
        known = (one for one in self._taken if any(map(one.is_of, plans)))
        return min(known, default=None, key=_peak_nbytes)

    def next_smallest(self, make: Callable[[Profile, bool], Chosen | None]) -> Smallest | None:
        """One that was not measured yet.

        make: the smallest plan of a profile, if it is found; the flag says whether modules may run
        again. One in which none does can be written down, so it comes first of those by an
        estimate; once that has been done, no estimate knows a smaller one.
        """
        known = [
            *(one.rehearsed for one in self._known),
            *(one.rehearsed for one in self._smallest),
        ]
        is_written = not all(known)
        for profile, rehearsed in self._known:
            for again in (True, False) if not rehearsed else (False, True):
                chosen = make(profile, again)
                if chosen is None or (not again and rehearsed and is_written):
                    continue
                self._smallest.append(Smallest(chosen, rehearsed))
        self._known.clear()
        left = (one for one in self._smallest if not any(t.is_of(one.chosen) for t in self._taken))
        return next(left, None)


def _peak_nbytes(one: Taken) -> int:
    return one.peak_nbytes
