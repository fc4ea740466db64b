"""Plans of a compiled model, each judged by the steps that have followed it.

A measured step may have taken more than the budget, since library calls, or code outside of the
compiled regions, take more than was planned. Then all plans are made anew for as much less. Where
there are none, they are made for the least that the refusal names, if that is below what was
measured. Else, or if a step by these takes no less, those from before come back. A warning says
what a step takes.
"""

import warnings
from collections.abc import Hashable
from dataclasses import dataclass

from elbowroom.fitting.compiled_room import CompiledRoom
from elbowroom.fitting.compiled_steps import CompiledSteps, MeasuredStep
from elbowroom.fitting.region_steps import EXACTLY, FIRST
from elbowroom.fitting.twin import Twin
from elbowroom.units import show_at_least, show_nbytes

_MAX_KINDS = 4096  # of calls that are remembered
_MAX_CORRECTIONS = 2  # of plans, by measured steps


@dataclass
class _RejectedPlans:
    """Plans that a measured step has shown to be too high, and that step.

    kinds: of calls that these serve; unplanned_nbytes: of the room, as they were made
    tried_least: plans were made for the least that a refusal has named
    """

    twins: list[Twin]
    kinds: set[Hashable]
    unplanned_nbytes: int
    seen: MeasuredStep
    tried_least: bool = False


class Plans:
    """The twins of one model, with the kinds of calls that they have run.

    measured  the steps that were measured
    """

    def __init__(self, room: CompiledRoom) -> None:
        self.twins: list[Twin] = []
        self.measured = CompiledSteps(room.model_state)
        self._kinds: set[Hashable] = set()
        self._room = room
        self._before: _RejectedPlans | None = (
            None  # plans, before a correction that was not judged yet
        )
        self._corrections = 0

    @property
    def are_corrected(self) -> bool:
        """True while plans that were made for less are not known to exist and to fit."""
        return self._before is not None

    @property
    def is_one_graph(self) -> bool:
        """True if the last twin has compiled the whole model as one graph, or could not begin."""
        return not self.twins or self.twins[-1].is_one_graph

    def serve(self, kind: Hashable) -> None:
        """Notes a kind of call that has run compiled."""
        if len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        self._kinds.add(kind)

    def serves(self, kind: Hashable) -> bool:
        """Returns whether a kind of call has run compiled."""
        return kind in self._kinds

    def drop(self, kind: Hashable) -> None:
        """Forgets a kind of call."""
        self._kinds.discard(kind)

    def twin_for(self, numel: int, stands: bool) -> Twin | None:
        """Returns the first twin whose plans are valid for this many elements, if any is.

        stands: they are to be valid beside gradients
        """
        fitting = (t for t in self.twins if numel <= t.limit and t.stands >= stands)
        return next(fitting, None)

    def forget(self) -> None:
        """Has all be made anew, for another room."""
        self.twins.clear()
        self._kinds.clear()
        self._before = None

    def judge(self) -> None:
        """Compares the last step that was measured with the budget."""
        seen = self.measured.end()
        if seen is None:
            return
        budget = self._room.options.budget_nbytes
        share = seen.peak_nbytes / budget
        if not seen.is_settled:
            if share > FIRST:
                warnings.warn(_says_first(seen, budget), stacklevel=6)
        elif share <= EXACTLY:
            self.measured.settle(seen)
            self._before = None
        elif self._before is not None and self._before.tried_least:
            if seen.peak_nbytes < self._before.seen.peak_nbytes:
                self._accept(seen)
            else:
                self.take_back()
        elif seen.twin in self.twins and self._corrections < _MAX_CORRECTIONS:
            self._correct(seen)
        else:
            self._accept(seen)

    def _correct(self, seen: MeasuredStep) -> None:
        """Makes plans anew, for as much less as a measured step was too high."""
        room = self._room
        self._corrections += 1
        self._before = self._before or _RejectedPlans(
            list(self.twins), set(self._kinds), room.unplanned_nbytes, seen
        )
        above = seen.peak_nbytes - room.options.budget_nbytes
        room.unplanned_nbytes += above + seen.twin.unused_nbytes()
        self.twins.clear()
        self._kinds.clear()

    def _accept(self, seen: MeasuredStep) -> None:
        """Goes on above the budget, and says so."""
        self.measured.settle(seen)
        self._before = None
        warnings.warn(_says_above(seen, self._room.options.budget_nbytes), stacklevel=7)

    def try_least(self, least_nbytes: int) -> bool:
        """Has plans made for the budget that the refusal of a correction names.

        Returns False if that is no less than what the plans before it take.
        """
        before, room = self._before, self._room
        assert before is not None
        above = least_nbytes - room.options.budget_nbytes
        room_is_less = before.unplanned_nbytes < room.unplanned_nbytes - above
        if before.tried_least or least_nbytes >= before.seen.peak_nbytes or not room_is_less:
            return False
        before.tried_least = True
        room.unplanned_nbytes -= above
        self.twins.clear()
        self._kinds.clear()
        self.measured.close()
        return True

    def take_back(self) -> None:
        """Goes back to the plans before a correction, of which none takes less."""
        before = self._before
        assert before is not None
        self.twins[:], self._kinds = before.twins, before.kinds
        self._room.unplanned_nbytes = before.unplanned_nbytes
        self.measured.close()
        self._accept(before.seen)

    def close(self) -> None:
        """Ends all."""
        self.measured.close()
        self.forget()


def _says_first(seen: MeasuredStep, budget_nbytes: int) -> str:
    above = seen.peak_nbytes - budget_nbytes
    return (
        f"a step in which a model was compiled has taken {show_nbytes(seen.peak_nbytes)}, which is "
        f"{show_nbytes(above)} more than its budget of {show_nbytes(budget_nbytes)}. The next one "
        "is measured, too."
    )


def _says_above(seen: MeasuredStep, budget_nbytes: int) -> str:
    above = seen.peak_nbytes - budget_nbytes
    return (
        f"a compiled step takes {show_nbytes(seen.peak_nbytes)} (measured), which is "
        f"{show_nbytes(above)} more than its budget of {show_nbytes(budget_nbytes)}, and no plan "
        f"takes less. Give {show_at_least(seen.peak_nbytes)}, or halve the batch."
    )
