"""A plan by a rehearsal, which is a forward alone: what is tried, in the order of regret.

A rehearsed plan is an estimate (`plan/rehearsal.py`), and is made again once its step was measured.
Lossy codes are gone with the step then, while states that were encoded keep a mark: so encoded
states come after all codes, and only what is hopeful about backward comes after them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elbowroom.control.making import Making
from elbowroom.control.states import CHOICES, Chosen, States
from elbowroom.errors import BudgetTooSmall
from elbowroom.plan.profile import Profile
from elbowroom.units import show_nbytes

_SAFE, _BEST = 6, 1
_ENOUGH = 4  # where no code is decoded: plan/rehearsal.py
_HOPEFUL = 3  # what takes less than this is
# Exact or lossy, how many largest tensors backward takes beside what is held, and whether modules
# may run again. A step in which none does can be written down, which ends all guessing.
_TRIES: dict[bool | None, tuple[tuple[bool | None, int, bool], ...]] = {
    True: (
        *((True, _SAFE, False), (True, _ENOUGH, False)),
        *((True, _SAFE, True), (True, _ENOUGH, True), (True, 2, True), (True, _BEST, True)),
    ),
    None: (
        *((True, _SAFE, False), (True, _ENOUGH, False), (True, _SAFE, True), (True, 3, True)),
        *((None, _SAFE, False), (None, _SAFE, True), (None, 3, True), (None, _BEST, True)),
    ),
    False: (
        *((False, _SAFE, False), (False, _SAFE, True), (False, 3, True), (False, _BEST, True)),
    ),
}


Step = Callable[[int], Profile]  # the rehearsed step, with so many of its largest tensor beside


def plan_by_forward(step: Step, states: States, who: object, making: Making) -> Chosen:
    """The first that fits, for `who`, one planning. Raises BudgetTooSmall where none does."""
    for one in _tries(making.terms.exact):
        profile = step(one.transients)
        for candidate in states.candidates(profile, who)[one.state : one.state + 1]:
            plan = making.plan_for(candidate.profile, 0, exact=one.exact, recompute=one.recompute)
            if plan is not None:
                return Chosen(candidate, plan)
    raise _refusal(step, states, who, making)


@dataclass(frozen=True)
class _Try:
    """state: which of the formats that states may have, the mildest is 0."""

    state: int
    exact: bool | None
    transients: int
    recompute: bool


def _tries(exact: bool | None) -> Iterator[_Try]:
    """Under terms of this exactness."""
    for hopeful in (False, True):
        for state in range(1 if exact else len(CHOICES)):
            for allowed, transients, recompute in _TRIES[exact]:
                if (transients < _HOPEFUL) == hopeful:
                    yield _Try(state, allowed, transients, recompute)


def _refusal(step: Step, states: States, who: object, making: Making) -> BudgetTooSmall:
    """What is named does for sure; less may do."""
    exact = making.terms.exact

    def refused(transients: int) -> BudgetTooSmall:
        formats = states.candidates(step(transients), who)
        profile = formats[0 if exact else -1].profile
        try:
            plan = making.make(profile, 0, exact=exact)
        except BudgetTooSmall as error:
            return error
        # A solver that ran out of time before has found one now: the same budget, once more.
        return BudgetTooSmall(
            f"no plan for {show_nbytes(plan.budget)} was found in time; give it again.",
            least_nbytes=plan.budget,
        )

    sure, best = refused(_SAFE), refused(_BEST)
    return BudgetTooSmall(
        f"{sure} That does for sure; from {show_nbytes(best.least_nbytes)} on it may do.",
        least_nbytes=sure.least_nbytes,
        parts=sure.parts,
    )
