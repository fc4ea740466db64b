"""Tensors without a slot: their op has not ended yet, or their bytes are only counted.

Deferred      is decided on when the call that saves it has ended
Substitute    stands in for a saved tensor while its node runs once more (`redrawn.py`)
CountedTensor  has no storage of the common kind (subclass, sparse), or is one of thousands
CountedView, SmallTensors  the thousands: each storage of them is counted once
Held           all that autograd may hold in place of a tensor in an examined forward
"""

import weakref
from typing import TypeAlias

import torch
from torch import Tensor

from elbowroom.plan.site import SMALL
from elbowroom.runtime.ledger import Entry, Ledger
from elbowroom.runtime.slot import DropHandle, KeepHandle, View
from elbowroom.runtime.storage import storage_nbytes


class CountedTensor:
    """A tensor that is kept and counted, and has no slot.

    It has no storage of the common kind (subclass, sparse), or is one of many (`SmallTensors`).
    """

    __slots__ = ("__weakref__", "_entry", "_handle")

    def __init__(self, handle: KeepHandle, entry: Entry) -> None:
        self._handle, self._entry = handle, entry
        entry.action, entry.why = handle.label, handle.why
        entry.hold(handle.nbytes)

    def __del__(self) -> None:
        self._entry.close()

    def restore(self) -> Tensor:
        self._entry.ask()
        return self._handle.restore()


def last_node() -> int:
    """Autograd's number of the node made last: one is numbered before it saves anything."""
    return torch._C._autograd._get_sequence_nr() - 1


class Substitute:
    """A value that stands in for a saved tensor."""

    __slots__ = ("_x",)

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def restore(self) -> Tensor:
        return self._x


class Deferred:
    """Tensor about which a decision is made when the call that saves it has ended.

    held: the tensor itself until then, or for ever if the call raises; afterwards its view.
    node: autograd's number of the node that has saved it; a call may make several.
    """

    __slots__ = ("__weakref__", "held", "node")

    def __init__(self, x: Tensor) -> None:
        self.node = last_node()
        self.held: View | CountedTensor | KeepHandle | Substitute = KeepHandle(
            x, "its op has not ended"
        )

    def restore(self) -> Tensor:
        """Returns the saved tensor again."""
        return self.held.restore()


class CountedView:
    """Another view of a `CountedTensor`'s storage, which is counted as long as either exists."""

    __slots__ = ("_counted", "_handle")

    def __init__(self, handle: KeepHandle, counted: CountedTensor) -> None:
        self._handle, self._counted = handle, counted

    def restore(self) -> Tensor:
        return self._handle.restore()


class SmallTensors:
    """Keeps the tensors of an op that saves thousands of them, each too small for an action."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[CountedTensor]] = {}

    def keep(
        self, x: Tensor, ledger: Ledger, module: str, consumer: str
    ) -> CountedTensor | CountedView:
        """Returns what is held of x. Each storage is counted once."""
        handle, at = KeepHandle(x, SMALL), x.untyped_storage()._cdata
        known = self._storages.get(at)
        counted = None if known is None else known()
        if counted is not None:
            return CountedView(handle, counted)
        dtype = str(x.dtype).removeprefix("torch.")
        one = CountedTensor(handle, ledger.open(module, consumer, dtype, storage_nbytes(x)))
        self._storages[at] = weakref.ref(one)
        return one


Held: TypeAlias = View | Deferred | CountedTensor | CountedView | KeepHandle | DropHandle
