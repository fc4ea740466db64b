"""The host tier: from a GPU to pinned host memory and back, beside the computation.

    put:    a part of a slab -> copy on the side stream -> once it is done, the tensor is released
    fetch:  copy back on the side stream -> the compute stream waits for it

No thread waits. A tensor is released at a later `put` or `source`, when its copy is found done; if
too much is on its way, the compute stream waits for the oldest copy, and the tensor may be released
immediately: its memory is reused only after the copy.
"""

import os
import threading
from collections import deque
from collections.abc import Callable

from torch import Tensor

from elbowroom.runtime.tiers.copier import Copier, Copy
from elbowroom.runtime.tiers.slabs import SlabPart, Slabs
from elbowroom.runtime.tiers.window import MAX_NBYTES, MAX_TENSORS


class HostTier:
    """Bytes of one device, in slabs of the host."""

    refusal = ""

    def __init__(self, copier: Copier, slabs: Slabs) -> None:
        self.copier, self.slabs = copier, slabs
        self._lock = threading.Lock()
        self._putting = threading.Lock()
        self._leaving: deque[HostTicket] = deque()
        self._dropped: deque[SlabPart] = deque()

    def put(self, flat: Tensor) -> "HostTicket":
        with self._lock:
            part = self.slabs.take(flat.numel())
        self._collect()
        ticket = HostTicket(self, flat, part, self.copier.copy(flat, part.flat))
        with self._putting:
            self._leaving.append(ticket)
            self._let_go()
        return ticket

    def say_trouble(self) -> None:
        self.slabs.say_trouble()

    def give_back(self, part: SlabPart) -> None:
        """Frees a part; as in the file tier, without waiting for a lock."""
        self._dropped.append(part)
        self._collect()

    def _let_go(self) -> None:
        """Releases tensors that are away, and the oldest if too much is on its way."""
        while self._leaving:
            sizes = [ticket.nbytes for ticket in self._leaving]
            oldest = self._leaving[0]
            if oldest.let_go_if_done():
                pass
            elif len(sizes) > 1 and (len(sizes) > MAX_TENSORS or sum(sizes) > MAX_NBYTES):
                oldest.let_go_in_order()
            else:
                return
            self._leaving.popleft()

    def _collect(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    self.slabs.give_back(self._dropped.popleft())
            finally:
                self._lock.release()


class HostTicket:
    """A part of a slab; before that, the tensor that goes there."""

    def __init__(self, tier: HostTier, flat: Tensor, part: SlabPart, copy: Copy) -> None:
        self._tier, self._copy = tier, copy
        self._part: list[SlabPart] = [part]  # who pops it gives it back
        self._pid = os.getpid()
        self._flat: Tensor | None = flat
        self._call: Callable[[], None] | None = None
        self.nbytes = flat.numel()

    @property
    def source(self) -> Tensor | None:
        flat = self._flat
        if flat is not None and self.let_go_if_done():
            return None
        return flat

    def let_go_if_done(self) -> bool:
        """Releases the tensor if its copy is done; returns whether it is away."""
        if self._flat is not None:
            if not self._copy.is_done():
                return False
            self._let_go()
        return True

    def let_go_in_order(self) -> None:
        """Releases the tensor before the copy is done: its memory is reused only afterwards."""
        self._copy.let_go()
        self._let_go()

    def fetch(self, into: Tensor) -> "HostArrival":
        return HostArrival(self._tier.copier.copy(self._part[0].flat, into), into)

    def when_away(self, call: Callable[[], None]) -> None:
        self._call = call
        if self._flat is None:
            call()

    def drop(self) -> None:
        if self._pid != os.getpid():
            return  # a forked child has no device to speak of, and frees nothing
        self._call = None
        if self._flat is not None:
            self._copy.let_go()  # the memory may be taken at once
            self._flat = None
        if self._part:
            self._tier.give_back(self._part.pop())

    def _let_go(self) -> None:
        self._flat = None
        call, self._call = self._call, None
        if call is not None:
            call()


class HostArrival:
    """A copy on its way back."""

    def __init__(self, copy: Copy, into: Tensor) -> None:
        self._copy, self._into = copy, into

    def wait(self) -> None:
        self._copy.order(self._into)

    def drop(self) -> None:
        self._copy.let_go()  # else the copy could overwrite bytes that are put there next
