"""Plans of one region, compiled one after another until the code of one fits.

The simulation of a plan may be wrong; what counts is the code that Inductor writes (`written.py`):

1.  with exact=False, two plans that save as much in codes as fits
2.  three plans, each predicted to take less by what was too much
3.  the plan with the lowest peak, and then the one of plain torch.compile, if it may be lower

The last two are the same whatever the room is. So the least that a refusal names, which is the
lower one of theirs, is held where it is given. Where none fits, and a plan that was predicted to
fit takes a little too much, the one that came nearest stays.

A later start begins with the attempt that fitted (`later_starts.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from elbowroom.compiled.decision import too_small
from elbowroom.compiled.later_starts import AttemptOptions, LaterStarts
from elbowroom.compiled.simulated import remembering
from elbowroom.compiled.written import SURE, Check
from elbowroom.errors import BudgetTooSmall

if TYPE_CHECKING:
    from elbowroom.compiled.options import Settings

_ATTEMPTS = 3  # plans of one region, where the code that is written takes more than the room
_FILLED = 2  # attempts before those, at plans that leave no room for errors of the simulation
_NEAR = 0.05  # of the room: so much more than it is taken where no other plan has less
Compiled = Callable[..., Any]


class CompilePlan(Protocol):
    """Compiles a region by a plan for a room; None: as plain torch.compile."""

    def __call__(self, tight: int | None, check: Check, *, fills: bool) -> Compiled: ...


@dataclass(frozen=True)
class _Missed:
    """An attempt that has failed.

    over_nbytes  that its code takes too many; None: there is no plan for its room, or its code is
                 not known
    tight        its room
    planned      what it was predicted to take of the room; where there is no plan, the least
    parts        of that, where there is no plan
    """

    over_nbytes: int | None
    tight: int | None
    planned: int
    parts: Mapping[str, int]


def fitting(
    compile_plan: CompilePlan, settings: "Settings", room: int | None, starts: LaterStarts
) -> tuple[Compiled, Check]:
    """Returns a compiled region whose code fits, with what is known of it.

    Raises BudgetTooSmall if there is none. starts: where the attempt that fits is found again
    """
    attempts = _RegionAttempts(compile_plan, settings, room)
    if room is None:
        made = attempts.run(None)
        assert not isinstance(made, _Missed)
        return made, attempts.check
    known = starts.load()
    with remembering():
        compiled = None if known is None else attempts.again(known)
        if compiled is None:
            ways = (attempts.filled, attempts.corrected, attempts.surely, attempts.nearest)
            compiled = next(found for way in ways if (found := way(room)) is not None)
            if attempts.number > 1 or known is not None:
                starts.save(attempts.last)
    return compiled, attempts.check


class _RegionAttempts:
    """The attempts at one region.

    last    the arguments of the last one
    check   what is known of its code
    number  how many were made, without the one of an earlier start
    """

    def __init__(self, compile_plan: CompilePlan, settings: "Settings", room: int | None) -> None:
        self._compile, self._settings, self._room = compile_plan, settings, room
        self._tries: list[_Missed] = []  # at plans that were predicted to fit
        self._refused: _Missed | None = None
        self._sure: list[_Missed] = []  # at plans that are the same for each room
        self.check = self._checked()
        self.last, self.number = AttemptOptions(room), 0

    def _checked(self, *, raises: bool = True, waits: bool = False) -> Check:
        settings = self._settings
        return Check(
            self._room,
            settings.counts_inputs,
            raises=raises,
            standing_nbytes=settings.standing_nbytes,
            waits=waits,
        )

    def run(
        self, tight: int | None, *, fills: bool = False, raises: bool = True, waits: bool = False
    ) -> Compiled | _Missed:
        """Compiles a plan for this room. waits: for the code of backward, too, before it judges."""
        self.check = check = self._checked(raises=raises, waits=waits)
        self.last, self.number = AttemptOptions(tight, fills, raises, waits), self.number + 1
        try:
            return self._compile(tight, check, fills=fills)
        except BudgetTooSmall as error:
            return _Missed(None, tight, error.least_nbytes, error.parts)
        except Exception:  # of any class: Inductor wraps what `check` raises
            if not check.over_nbytes:
                raise
            return self._missed(check.over_nbytes, tight)

    def _missed(self, over_nbytes: int, tight: int | None) -> _Missed:
        inputs = self.check.made[-1].inputs_nbytes if self._settings.counts_inputs else 0
        given = {"parameters and inputs": inputs}
        return _Missed(over_nbytes, tight, self.check.planned_nbytes, given)

    def again(self, known: AttemptOptions) -> Compiled | None:
        """Makes the attempt that has fitted in an earlier start."""
        made = self.run(known.tight, fills=known.fills, raises=known.raises, waits=known.waits)
        self.number = 0
        # Graphs that come from a cache do not raise where they are above the room.
        is_above = known.raises and self.check.above_nbytes()
        return None if isinstance(made, _Missed) or is_above else made

    def filled(self, room: int) -> Compiled | None:
        """Tries plans that save as much in codes as fits."""
        tight = room
        for _ in range(_FILLED if self._settings.exact is False else 0):
            made = self.run(tight, fills=True)
            if not isinstance(made, _Missed):
                return made
            if made.over_nbytes is None:
                self._refused = made if tight == room else None
                break
            tight = min(tight, made.planned) - made.over_nbytes
        return None

    def corrected(self, room: int) -> Compiled | None:
        """Tries plans that are predicted to take less and less."""
        tight = room
        while self._refused is None and len(self._tries) < _ATTEMPTS:
            made = self.run(tight)
            if not isinstance(made, _Missed):
                return made
            if made.over_nbytes is None:
                self._refused = made
            else:
                self._tries.append(made)
                tight = min(tight, made.planned) - made.over_nbytes
        return None

    def surely(self, room: int) -> Compiled | None:
        """Tries the lowest plan, and the one of plain torch.compile."""
        if self._refused is None:
            nothing = self.run(0)
            self._refused = nothing if isinstance(nothing, _Missed) else None
        lowest = [] if self._refused is None else [self._refused.planned]
        for tight in (*lowest, None):
            if self._sure and self._plain_is_higher(room):
                break
            made = self.run(tight, waits=True)
            for _ in range(_ATTEMPTS):
                if tight is None or not isinstance(made, _Missed) or made.over_nbytes is not None:
                    break
                # The least is found from a room, and from another one it may be a little higher.
                self._refused, tight = made, made.planned
                made = self.run(tight, waits=True)
            if isinstance(made, _Missed):
                self._sure.append(made)
            elif self.check.is_complete and (above := self.check.above_nbytes()):  # from a cache
                self._sure.append(self._missed(above, tight))
            elif self.check.is_complete or (tight is not None and tight <= room):
                return made  # else its code cannot be read, and is predicted not to fit
        return None

    def _plain_is_higher(self, room: int) -> bool:
        """Returns whether plain torch.compile needs no less than the lowest plan for certain."""
        if not self.check.made:
            return False
        lowest, known = self.check.made[-1], self._sure[-1]
        if lowest.is_plain or known.over_nbytes is None:
            return bool(lowest.is_plain)
        inputs = lowest.inputs_nbytes if self._settings.counts_inputs else 0
        return bool(SURE * lowest.plain_nbytes + inputs > room + known.over_nbytes)

    def nearest(self, room: int) -> Compiled:
        """Returns the plan that takes a little too much. Raises BudgetTooSmall if none does."""
        known = [one for one in (*self._tries, *self._sure) if one.over_nbytes is not None]
        best = min(known, key=_over, default=None)
        if self._tries and best is not None and _over(best) <= _NEAR * room:
            made = self.run(best.tight, raises=False)
            if not isinstance(made, _Missed):
                return made
        raise self._error(room) from None

    def _error(self, room: int) -> BudgetTooSmall:
        refused, limit = self._refused, self._settings.limit
        known = [one for one in self._sure if one.over_nbytes is not None] or self._tries
        if not known:
            assert refused is not None
            return too_small(room, refused.planned, refused.parts, limit)
        best = min(known, key=_over)
        least, parts = room + _over(best), dict(best.parts)
        others = sum(parts.values())
        if best.tight is None:
            parts["plain torch.compile"] = least - others
        elif refused is not None and refused.planned == best.tight <= least:
            parts = {**refused.parts, "workspaces of its compiled kernels": least - refused.planned}
        elif best.planned <= least:
            parts["planned"] = best.planned - others
            parts["workspaces of its compiled kernels"] = least - best.planned
        else:
            parts["the code of the lowest plan"] = least - others
        return too_small(room, least, parts, limit)


def _over(one: _Missed) -> int:
    """The bytes that the code of an attempt takes too many."""
    assert one.over_nbytes is not None
    return one.over_nbytes
