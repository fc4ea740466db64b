"""What a forward may hold for backward: the budget, without what stands and what passes.

    budget - static - transients (+ what the plan lets pass)

Transients are workspaces, restored tensors and fresh gradients: guessed before the first step, then
measured, or as a plan predicts them.
"""

from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.plan.plan import Plan


class Headroom:
    """transient_nbytes: of the largest call; None: neither measured nor planned yet."""

    def __init__(self) -> None:
        self.transient_nbytes: int | None = None
        self._guess_nbytes: int | None = None
        self._seen_nbytes = 0

    def inherit(self, larger: "Headroom") -> None:
        """Until its own are measured, transients are at most those of a larger kind."""
        self._guess_nbytes = larger.transient_nbytes

    def grow(self, growth: float) -> None:
        """The largest call is so much larger."""
        assert self.transient_nbytes is not None
        self.transient_nbytes = int(growth * self.transient_nbytes)
        self._seen_nbytes = 0

    def forget(self) -> None:
        self.transient_nbytes = None
        self._seen_nbytes = 0

    def learn(self, rest_nbytes: float) -> None:
        """What a step takes beside what stands and what it holds."""
        self.transient_nbytes = int(max(0, rest_nbytes))
        self._seen_nbytes = 0

    def fits(self, most_nbytes: int) -> None:
        """Allow what a measured forward held: it was within the budget.

        most_nbytes: what stood before it, the most that it held, and what was left of the budget
        """
        self._seen_nbytes = most_nbytes

    def allowed_nbytes(
        self, terms: FitOptions, stock: MemoryState, plan: Plan | None, guessed_nbytes: int
    ) -> int:
        """As long as nothing is measured, transients are guessed."""
        free = terms.budget_nbytes - stock.static_nbytes
        if self.transient_nbytes is None:
            return free - min(guessed_nbytes, self._guess_nbytes or guessed_nbytes)
        allowed = free - self.transient_nbytes + _passing_nbytes(plan)
        return max(allowed, self._seen_nbytes - stock.static_nbytes)

    def surely_allowed_nbytes(
        self, terms: FitOptions, stock: MemoryState, plan: Plan | None
    ) -> int:
        """The same without guesses.

        More than this cannot be held, or the optimizer's states would not fit.
        """
        free = terms.budget_nbytes - stock.static_nbytes
        if stock.unborn_nbytes > free:
            return -1
        allowed = free - (self.transient_nbytes or 0) + _passing_nbytes(plan)
        return max(allowed, self._seen_nbytes - stock.static_nbytes)


def _passing_nbytes(plan: Plan | None) -> int:
    """Forward may hold so much more for a moment: a norm's input until its ReLU has run.

    The plan knows; the ledger, which is asked here, does not.
    """
    return 0 if plan is None else plan.largest_nbytes
