"""Handles memory that runs out within a budget: later steps get a smaller budget.

The available memory is unknown, except that it is less than the predicted peak of that step. So the
smaller budget is a guess, and is raised to the budget that a refusal names, if that is still below
the predicted peak.
"""

from elbowroom.fitting.messages import say_exhausted
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.planner import Planner

_LESS = 0.85  # of a budget that exceeded the device's memory


class Shortage:
    """Record of how one model ran out of memory, and of the smaller budget that followed.

    less            the options from the next step on; None: unchanged
    ran_out_nbytes  predicted bytes of a step for which there was no memory
    """

    def __init__(self) -> None:
        self.less: FitOptions | None = None
        self.ran_out_nbytes: int | None = None
        self._was_said = False

    def note(self, options: FitOptions, planner: Planner, held_nbytes: int) -> None:
        """Records that memory ran out in a step. held_nbytes: of its last forward."""
        plan, budget = planner.plan, options.budget_nbytes
        knows = plan is not None and not planner.calls.grew  # all forwards of the step
        self.ran_out_nbytes = min(budget, plan.peak) if plan is not None and knows else budget
        self.less = options.within(_smaller_nbytes(budget, planner, held_nbytes))
        say_exhausted(options, self.less, again=self._was_said)
        self._was_said = True

    def relents(self, options: FitOptions, least_nbytes: int) -> bool:
        """Returns to a budget that a refusal has named, if it may fit; returns whether it did.

        The smaller budget was a guess, made after memory ran out.

        Nothing changes if memory ran out within as much.
        """
        known = self.ran_out_nbytes
        if known is None or not options.budget_nbytes < least_nbytes < known:
            return False
        self.less = options.within(least_nbytes)
        return True

    def taken(self) -> FitOptions | None:
        """Returns the options that take effect with this step, if there are any."""
        less, self.less = self.less, None
        return less


def _smaller_nbytes(budget: int, planner: Planner, held_nbytes: int) -> int:
    """Returns a smaller budget: below the memory that the device had, but at least half of it."""
    if planner.plan is not None:
        return int(_LESS * min(budget, planner.plan.peak))
    stands = planner.memory.static_nbytes + held_nbytes
    return min(int(_LESS * budget), max(budget // 2, stands))
