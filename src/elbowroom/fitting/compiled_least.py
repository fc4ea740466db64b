"""The least budget of a compiled model of several regions, by trying what its refusals name.

The first region that is refused knows of no other one: in a loop of blocks with a graph break, one
graph runs for each block, and all hold their saved tensors at the same time. So what a refusal
names is tried by a forward, which is undone, and what that one is refused with is tried next:

    asked 1 MiB  -->  a region needs 3.0  -->  three runs of it 4.8  -->  with what is between 5.5

The refusal that the program gets names the last of these, which holds when it is given back.
"""

from collections.abc import Callable
from typing import Any, Protocol

from elbowroom.compiled import in_whole
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.why_eager import failures
from elbowroom.runtime.undo import Undo

_MAX_TRIALS = 6


class Replannable(Protocol):
    """Compiled model that can be planned within other budgets."""

    options: FitOptions

    def limit(self, options: FitOptions) -> None:
        """Plans within these options from now on."""

    def forget(self) -> None:
        """Forgets all that was compiled in a trial."""


def refusal_that_holds(
    error: BudgetTooSmall, tried: Replannable, run: Callable[[], Any], undo: Undo
) -> BudgetTooSmall:
    """Returns the refusal of the least budget that is known to hold.

    run: a forward, as it begins; undo: it can be undone
    """
    asked = tried.options
    least, parts = error.least_nbytes, dict(error.parts)
    for _ in range(_MAX_TRIALS):
        undo.back()
        tried.limit(asked.within(least))
        higher = _refused(run)
        tried.forget()
        if higher is None or higher[0] <= least:
            break
        least, parts = higher
        if undo.is_lost or undo.changed:
            break
    undo.back()
    tried.limit(asked)
    found = BudgetTooSmall("", least_nbytes=least, parts=parts)
    return in_whole(found, asked.budget_nbytes, {}, None if asked.exact else asked.noise)


def _refused(run: Callable[[], Any]) -> tuple[int, dict[str, int]] | None:
    """Returns what a refused forward needs; None: it has run, or nothing is known.

    Nothing else is kept of the error, whose traceback holds tensors.
    """
    try:
        run()
    except BudgetTooSmall as error:
        return error.least_nbytes, dict(error.parts)
    except failures():
        return None
    return None
