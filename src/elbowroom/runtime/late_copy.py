"""A copy that is made only when it is first used, of a tensor that may never be used.

A tensor that is gathered from x (the features of nodes, once for each edge) could be rebuilt from a
copy of x. Usually no op saves x, and an immediate copy would be alive at the step's peak, beside
the gathered tensor. So x is referred to weakly until a recipe uses it:

    x is there, unchanged         it is copied when it is asked for
    x dies before                 it is copied then, if what was gathered lives on
    x was changed in place        there is no copy, so nothing is rebuilt from it
"""

import weakref

import torch
from torch import Tensor

from elbowroom.runtime.ledger import Entry
from elbowroom.runtime.slot import CountedSlot, Handle, KeepHandle
from elbowroom.runtime.storage import WeakStorage

CONSTANT = "a constant: something is rebuilt with it"


class LateCopy(CountedSlot):
    """Slot that copies a tensor when its value is first used, if the tensor is unchanged."""

    def __init__(self, x: Tensor, base: Tensor, entry: Entry, out: Tensor) -> None:
        """base: a dense tensor that covers x's storage. out: the result computed from x."""
        super().__init__(base, entry)
        self._value: Handle | None = None
        self._storage: WeakStorage | None = WeakStorage(x)
        self._out = WeakStorage(out)
        self._version = x._version
        with torch._C.DisableTorchFunction():
            self._counter = x.detach()  # which shares the count of changes with x, and no memory
            self._counter.data = torch.empty(0, dtype=x.dtype, device=x.device)
        ours = weakref.ref(self)

        def died(_: object) -> None:
            slot = ours()
            if slot is not None:
                slot._copy(only_for_out=True)

        # If x is a view, its base exists as long as its memory; the view itself may be freed
        # immediately.
        self._owner = weakref.ref(x if x._base is None else x._base, died)

    @property
    def value(self) -> Handle | None:
        """The held copy, which is made now if it does not exist yet."""
        if self._value is None:
            self._copy()
        return self._value

    @value.setter
    def value(self, value: Handle | None) -> None:
        self._value, self._storage = value, None

    @property
    def is_pending(self) -> bool:
        """True if there is no copy yet, and there can be one."""
        return self._storage is not None and self._counter._version == self._version

    def _copy(self, *, only_for_out: bool = False) -> None:
        """Copies the tensor, the first time that it is called; else, it does nothing."""
        storage, self._storage = self._storage, None
        # A tensor is freed between two ops of the model, so this copy is not one of them.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            changed = self._counter._version != self._version
            if storage is None or changed or (only_for_out and self._out.expired()):
                return
            x = storage.tensor(self.dtype)
            if x is not None:
                self.hold(KeepHandle(x.as_strided(*self.base).clone(), CONSTANT))
