"""Parts of the state of a fit: facts that are learned, and forgotten, together."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from elbowroom.fitting.phase import Phase

if TYPE_CHECKING:
    from elbowroom.plan.shares import AddedVariance


@dataclass(frozen=True)
class UnexpectedSteps:
    """Steps that held more than those before.

    count    how many there were
    is_last  the current step is one, and is learned from
    nbytes   bytes that the last one saved, in plain autograd
    smaller  measured steps since then that saved less, and were not learned from
    varies   one step was within the budget, and another one, unlike it, was not
    """

    count: int = 0
    is_last: bool = False
    nbytes: int = 0
    smaller: int = 0
    varies: bool = False


@dataclass(frozen=True)
class HigherSteps:
    """Settled steps that held more than the measured ones, or ran other modules again in backward.

    ran_again    modules that ran again in measured steps of the plan within the budget, and the
                 most tensors that each saved
    count        how many higher steps there were
    held_nbytes  what the last one held, with what was resident before it; 0: no step like it is
                 waited for
    others       modules that ran again in it, and in measured steps did not, or saved fewer tensors
    lower        measured steps since then that held less, and were not learned from
    """

    ran_again: Counter[str] = field(default_factory=Counter)
    count: int = 0
    held_nbytes: int = 0
    others: Counter[str] = field(default_factory=Counter)
    lower: int = 0

    def forgotten(self) -> Self:
        """Returns what holds under any plan: how many there were."""
        return type(self)(count=self.count)


@dataclass(frozen=True)
class Margins:
    """Bytes by which measured plans were too optimistic, which later ones leave free.

    plain_nbytes      of plans without recomputed modules
    recompute_nbytes  of plans with them
    """

    plain_nbytes: int = 0
    recompute_nbytes: int = 0


@dataclass(frozen=True)
class Watched:
    """Holds what is known of the noise of a plan's codes.

    is_done   it was measured, or there was no memory to measure it
    predicts  there was no memory to measure it, and the profile has a prediction
    added     what the codes are predicted to add; None: not known, or it was measured
    resumes   the phase in which a plan that is watched now was verified
    """

    is_done: bool = False
    predicts: bool = False
    added: "AddedVariance | None" = None
    resumes: Phase = Phase.VERIFYING
