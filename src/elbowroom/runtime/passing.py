"""What inert ops save in one forward: kept and counted, without a look (`inert.py`).

Or, where nobody knows yet which ops those are, the lesson that this forward gives.
"""

import weakref
from collections.abc import Iterable

from torch import Tensor

from elbowroom.runtime.consumers import BUFFERS
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.handles.keep import storage_nbytes
from elbowroom.runtime.identity import is_parameter
from elbowroom.runtime.inert import Inertness, OpName, Parts
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.slot import Beside, Lone, Slot

_UNCOUNTED = 4096  # bytes. To count statistics and scalars costs more than it tells


class Passing:
    """One forward's share of an `Inertness`.

    ops        that are inert; none of them once `stop` was called
    parts      finds out which are, where nobody knows yet
    was_blind  some ops were not looked at, from the start
    """

    def __init__(self, inertness: Inertness | None, ledger: Ledger, min_nbytes: int) -> None:
        known = None if inertness is None else inertness.ops
        self.ops: frozenset[OpName] = known or frozenset()
        self.parts = Parts() if inertness is not None and known is None else None
        self.was_blind = bool(self.ops)
        self._inertness, self._ledger = inertness, ledger
        self._uncounted_nbytes = min(_UNCOUNTED, min_nbytes)
        self._storages: dict[int, weakref.ref[Lone]] = {}  # that inert ops have saved

    def keep(self, x: Tensor, op: OpName) -> Lone | Beside | KeepHandle | None:
        """x, saved by an inert op. None: more is held than the plan's steps hold, so look at it."""
        handle, nbytes = KeepHandle(x, "the plan keeps it"), storage_nbytes(x)
        if nbytes < self._uncounted_nbytes or is_parameter(x):
            return handle
        _, name = op
        if name in BUFFERS and x.dim() == 1:
            return handle  # a statistic, of the module or of the batch
        counted = self._counted(x)
        if counted is not None:
            return Beside(handle, counted)
        if self._inertness is not None and self._inertness.is_more(self._ledger.held_nbytes):
            return None
        return self._count(x, handle, op)

    def keep_small(self, x: Tensor, op: OpName) -> Lone | Beside:
        """x, saved by an op that saves thousands, each too small to do anything with."""
        handle, counted = KeepHandle(x, "small"), self._counted(x)
        return self._count(x, handle, op) if counted is None else Beside(handle, counted)

    def _counted(self, x: Tensor) -> Lone | None:
        first = self._storages.get(x.untyped_storage()._cdata)
        return None if first is None else first()

    def _count(self, x: Tensor, handle: KeepHandle, op: OpName) -> Lone:
        dtype = str(x.dtype).removeprefix("torch.")
        counted = Lone(handle, self._ledger.open(*op, dtype, storage_nbytes(x)))
        self._storages[x.untyped_storage()._cdata] = weakref.ref(counted)
        return counted

    def stop(self) -> None:
        """From now on all is looked at; this forward teaches nothing, and what it knew is wrong."""
        if self._inertness is not None and self.ops:
            self._inertness.forget()
        self.ops, self.parts = frozenset(), None

    def learn(self, slots: Iterable[Slot]) -> None:
        """The forward has ended. slots: all that are alive."""
        if self._inertness is not None:
            self._inertness.learn(self._ledger, self.parts, slots)
