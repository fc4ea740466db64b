"""A copy that is made when it is first asked for, of a tensor that may be asked for never.

What is gathered from x (the features of nodes, once for each edge) could be made again from a copy
of x. Mostly no op saves it, and a copy that was made at once would stand in the step's highest
moment, beside what was gathered. So x is referred to weakly until something is made of it:

    x is there, unchanged         it is copied when it is asked for
    x dies before                 it is copied then, if what was gathered lives on
    x was changed in place        there is no copy, so nothing is made again from it
"""

import weakref

import torch
from torch import Tensor

from elbowroom.runtime.ledger import Entry
from elbowroom.runtime.slot import CountedSlot, Handle, KeepHandle
from elbowroom.runtime.storage import WeakStorage

CONSTANT = "a constant: something is made again with it"


class LateCopy(CountedSlot):
    """Slot that copies a tensor when its value is first asked for, if it is still as it was."""

    def __init__(self, x: Tensor, base: Tensor, entry: Entry, out: Tensor) -> None:
        """base: a dense tensor that covers x's storage. out: what was made of x."""
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

        # Of what x is a view, the base lives as long as x's memory; a view may be gone at once.
        self._owner = weakref.ref(x if x._base is None else x._base, died)

    @property
    def value(self) -> Handle | None:
        """What is held: the copy, which is made now if it was not before."""
        if self._value is None:
            self._copy()
        return self._value

    @value.setter
    def value(self, value: Handle | None) -> None:
        self._value, self._storage = value, None

    def _copy(self, *, only_for_out: bool = False) -> None:
        """Copies the tensor, the first time that it is called; else, it does nothing."""
        storage, self._storage = self._storage, None
        # A tensor dies between two ops of the model's: what is done then is none of them.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            changed = self._counter._version != self._version
            if storage is None or changed or (only_for_out and self._out.expired()):
                return
            x = storage.tensor(self.dtype)
            if x is not None:
                self.hold(KeepHandle(x.as_strided(*self.base).clone(), CONSTANT))
