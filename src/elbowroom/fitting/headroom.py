"""The headroom is what a forward may hold: the budget, less static and transient bytes.

    budget - static - transients (+ what the plan lets pass)

Transients are workspaces, restored tensors and fresh gradients: guessed before the first step, then
measured, or as a plan predicts them.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from elbowroom.fitting.options import FitOptions, MemoryState
    from elbowroom.plan.plan import Plan

_VARIES = 1 / 64  # of the budget: what codes take, and what stands beside the model, may vary


@dataclass(frozen=True)
class Headroom:
    """Bytes that a step needs besides resident and held bytes, as far as they are known.

    transient_nbytes  of the largest call; None: neither measured nor planned yet; negative where
                      what it holds was there before, and is no part of its peak (its inputs)
    guess_nbytes      at most so many, as long as that is None; None: there is no such guess
    seen_nbytes       what a measured step within the budget has left room for; 0: none has
    held_nbytes       the most that this step held, and the bytes that were resident before it
    """

    transient_nbytes: int | None = None
    guess_nbytes: int | None = None
    seen_nbytes: int = 0
    held_nbytes: int = 0

    def inherited(self, larger: Self) -> Self:
        """Returns a bound: transients are at most those of a larger kind of forward."""
        return replace(self, guess_nbytes=larger.transient_nbytes)

    def grown(self, growth: float) -> Self:
        """Returns the headroom if the largest call has `growth` times as many elements."""
        assert self.transient_nbytes is not None
        return self.learned(growth * self.transient_nbytes)

    def forgotten(self) -> Self:
        """Returns the headroom without measurements; a guess is kept."""
        return replace(self, transient_nbytes=None, seen_nbytes=0, held_nbytes=0)

    def learned(self, rest_nbytes: float) -> Self:
        """Returns the headroom with so many bytes for the transients."""
        return replace(self, transient_nbytes=int(rest_nbytes), seen_nbytes=0, held_nbytes=0)

    def fitting(self, held_nbytes: int, left_nbytes: int) -> Self:
        """Returns the headroom that allows what a measured forward held: it was within the budget.

        held_nbytes: the bytes resident before it, and the most that it held; left_nbytes: the rest
        of the budget
        """
        return replace(self, seen_nbytes=held_nbytes + left_nbytes, held_nbytes=held_nbytes)

    def allowed_nbytes(
        self, options: "FitOptions", memory: "MemoryState", plan: "Plan | None", guessed_nbytes: int
    ) -> int:
        """Returns the bytes that may be held for backward.

        Until a step was measured, transients are guessed.
        """
        free = options.budget_nbytes - memory.static_nbytes
        if self.transient_nbytes is None:
            return free - min(guessed_nbytes, self.guess_nbytes or guessed_nbytes)
        allowed = free - self.transient_nbytes + _passing_nbytes(plan)
        return max(allowed, self.seen_nbytes - memory.static_nbytes)

    def is_exceeded(self, options: "FitOptions", memory: "MemoryState", max_nbytes: int) -> bool:
        """Returns whether what a forward held at most exceeds the budget by itself.

        `allowed_nbytes` does not tell: with what passes, it may be more than the budget.
        """
        if self.transient_nbytes is None:
            return False
        inputs_nbytes = max(-self.transient_nbytes, 0)
        most = max(options.budget_nbytes + inputs_nbytes, self.seen_nbytes)
        return memory.static_nbytes + max_nbytes > most + _VARIES * options.budget_nbytes

    def is_surpassed(self, options: "FitOptions", memory: "MemoryState", max_nbytes: int) -> bool:
        """Returns whether a forward held so much more than the measured one that it may not fit.

        That is where it holds half as much more as the measured step has left: what stands beside
        held tensors may be more, too.
        """
        if not self.held_nbytes:
            return False
        more = memory.static_nbytes + max_nbytes - self.held_nbytes
        left = self.seen_nbytes - self.held_nbytes
        return more > max(left // 2, _VARIES * options.budget_nbytes)

    def surely_allowed_nbytes(
        self, options: "FitOptions", memory: "MemoryState", plan: "Plan | None"
    ) -> int:
        """Returns the bytes that may be held for backward, without guesses.

        More than this cannot be held, or the optimizer's states would not fit.
        """
        free = options.budget_nbytes - memory.static_nbytes
        if memory.unallocated_state_nbytes > free:
            return -1
        allowed = free - (self.transient_nbytes or 0) + _passing_nbytes(plan)
        return max(allowed, self.seen_nbytes - memory.static_nbytes)


def _passing_nbytes(plan: "Plan | None") -> int:
    """Returns bytes that forward may hold temporarily: a norm's input until its ReLU has run.

    The plan accounts for them; the ledger, which is read here, does not.
    """
    return 0 if plan is None else plan.largest_nbytes
