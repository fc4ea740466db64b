"""A step of `er.saving` that replays a script: its slots, and the count of their bytes.

The bytes of kept tensors are known from the recorded step. A slot that is acted on has an entry,
which gets its held bytes, and is summed on request.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from elbowroom.runtime.context import Context
from elbowroom.runtime.ledger import (
    NOT_COUNTED,
    Account,
    Counted,
    Counts,
    LedgerRow,
    NoEntry,
    summed,
)
from elbowroom.runtime.replay.held import ForwardRecord
from elbowroom.runtime.replay.replay import Replay
from elbowroom.runtime.replay.script import NOWHERE, Script
from elbowroom.runtime.replay.tracer import Tracer
from elbowroom.runtime.saving import Saving
from elbowroom.runtime.slot import Geometry, Slot
from elbowroom.runtime.storage import storage_nbytes

if TYPE_CHECKING:
    from elbowroom.runtime.replay.saving_context import StepScripts

Make = Callable[[Tracer | None], Saving]


class Repeated(NoEntry):
    """Entry of a slot that is acted on, in a forward that repeats a counted one."""

    __slots__ = ("action", "after_nbytes", "away_nbytes", "before_nbytes", "why")
    counts = True

    def __init__(self, known: Counted, nbytes: int) -> None:
        """nbytes: of the tensor in this forward."""
        self.action, self.why = known.action, known.why
        self.before_nbytes, self.after_nbytes = nbytes, known.after_nbytes
        self.away_nbytes = known.away_nbytes

    def hold(self, nbytes: int) -> None:
        """Sets the bytes that are held, here or away."""
        self.after_nbytes = nbytes - self.away_nbytes

    def move_away(self, nbytes: int) -> None:
        """Sets how many of them are away from now on, and not here. From any thread."""
        held = self.after_nbytes + self.away_nbytes
        self.after_nbytes, self.away_nbytes = held - nbytes, nbytes


class RepeatedLedger(Account):
    """The ledger of a forward that repeats one that was counted.

    What is kept is known from that one. What is acted on is counted, for codes of zeros or of sharp
    logits take another number of bytes in each step, as experts do. Nothing is added up until
    the user asks.
    """

    def __init__(
        self, known: Counts, record: object, flat: Iterable[int], *, varies: bool = False
    ) -> None:
        """record: lives as long as anything that is held without a slot.

        flat: numbers of the slots that are not made. varies: tensors may be of other sizes than the
        known ones
        """
        self._varies = varies
        self._known, self._record = known, weakref.ref(record)
        self._flat = flat
        self._entries: dict[int, tuple[Repeated, weakref.ref[Slot]]] = {}
        self._by_slot = known.by_slot

    def new_slot(self, number: int, base: Tensor, geometry: Geometry) -> Slot:
        """Returns the slot of this number, which is counted as long as it lives if it is acted on.

        geometry: of what covers it, as `base` may not
        """
        known = self._by_slot.get(number)
        if known is None:
            return Slot(base, NOT_COUNTED, geometry=geometry)
        is_other = self._varies and known.before_nbytes  # but for copies, which plain has not
        entry = Repeated(known, storage_nbytes(base) if is_other else known.before_nbytes)
        slot = Slot(base, entry, geometry=geometry)
        self._entries[number] = entry, weakref.ref(slot)
        return slot

    @property
    def rows(self) -> list[LedgerRow]:
        """The saved tensors of the fullest moment."""
        return summed(
            counted if (mine := self._entries.get(counted.slot)) is None else _now(counted, mine[0])
            for counted in self._known.entries
        )

    @property
    def before_nbytes(self) -> int:  # type: ignore[override]
        """Bytes that plain autograd would hold."""
        each = ((e.before_nbytes, self._by_slot[at]) for at, (e, _) in self._entries.items())
        return self._known.before_nbytes + sum(now - known.before_nbytes for now, known in each)

    @property
    def after_nbytes(self) -> int:  # type: ignore[override]
        """Bytes that were held instead, before backward."""
        each = ((e.after_nbytes, self._by_slot[at]) for at, (e, _) in self._entries.items())
        return self._known.after_nbytes + sum(now - known.after_nbytes for now, known in each)

    @property
    def away_nbytes(self) -> int:  # type: ignore[override]
        """Bytes that were in another tier."""
        each = ((e.away_nbytes, self._by_slot[at]) for at, (e, _) in self._entries.items())
        return self._known.away_nbytes + sum(now - known.away_nbytes for now, known in each)

    @property
    def max_nbytes(self) -> int:  # type: ignore[override]
        """The most that was held at any moment."""
        return max(self._known.max_nbytes, self.after_nbytes)

    @property
    def held_nbytes(self) -> int:  # type: ignore[override]
        """Bytes that are held now."""
        kept = 0
        if self._record() is not None:
            flat = (self._by_slot.get(n) for n in self._flat if n not in self._entries)
            kept = self._known.kept_nbytes
            kept += sum(one.after_nbytes for one in flat if one is not None and not one.ended)
        alive = (entry for entry, slot in self._entries.values() if slot() is not None)
        return kept + sum(entry.after_nbytes for entry in alive)


def _now(counted: Counted, entry: Repeated) -> Counted:
    """Returns what a slot is in this forward."""
    bytes_now = entry.before_nbytes, entry.after_nbytes, entry.away_nbytes
    return Counted(*counted[:3], entry.action, entry.why, *bytes_now, *counted[8:])


class Following(Replay):
    """Step that replays a script, or another one with the same beginning."""

    def __init__(
        self, known: tuple[Script, ...], scripts: StepScripts, make: Make, context: Context
    ) -> None:
        super().__init__(known[0], context, known[1:])
        self.scripts, self._make = scripts, make
        self._repeated: RepeatedLedger  # from the beginning on: `follow` makes it

    @property
    def ledger(self) -> Account:
        """The count of this step."""
        return self._repeated if self.saving is None else self.saving.ledger

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._open is None:
            return
        super().__exit__(kind, error, trace)
        self.record = ForwardRecord()  # what is held refers to the one before, whose end is seen
        if kind is not None:
            return
        saving = self.saving
        if saving is not None and saving.tracer is not None:
            self.scripts.add_step(saving.tracer, saving.called)
        elif self.diverged or self.script.numel not in (NOWHERE, self._numel):
            self.scripts.was_left(self.script)
        else:
            self.scripts.was_followed(self.script)

    def follow(self, script: Script) -> None:
        """Continues with another script."""
        super().follow(script)
        self._repeated = RepeatedLedger(
            script.counts, self.record, script.compiled.flat.numbers, varies=script.sizes > 0
        )

    def look(self) -> Saving:
        """Returns the context that examines the rest; its ledger has the bytes held so far."""
        if self.has_begun:
            saving, (before_nbytes, held_nbytes) = self._make(None), self.so_far
            entry = saving.ledger.open("", "", "", before_nbytes)
            entry.action, entry.why = "as before", "a step that began like an earlier one"
            entry.hold(held_nbytes)
            weakref.finalize(self.record, entry.close).atexit = False
            return saving
        return self._make(Tracer(selects=True) if self.scripts.wanted else None)

    def new_slot(self, number: int, base: Tensor, geometry: Geometry) -> Slot:
        """Returns the slot of this number, which the ledger counts if it is acted on."""
        return self._repeated.new_slot(number, base, geometry)

    def calls_compiled(self) -> None:
        """Notes that calls have to be intercepted from now on."""
        self.scripts.has_seen_calls(compiled=True)
