"""Values that a device sends to the host, which reads them when they have arrived, and never waits.

They go to pinned memory, with an event behind the copy. Both are looked up here when they are asked
for, so that tests can let any memory play the device's.
"""

from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """Interface of what tells whether a stream has done what it was asked for before."""

    def query(self) -> bool:
        """Returns whether the stream has done it; this does not wait."""
        ...

    def synchronize(self) -> None:
        """Waits until the stream has."""
        ...


def pinned(nbytes: int) -> Tensor:
    """Allocates memory of the host that a device can reach. RuntimeError: there is none."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def event(device: torch.device) -> Event:
    """Returns an event behind all that the current stream was asked for."""
    made = torch.cuda.Event()  # type: ignore[no-untyped-call]
    made.record(torch.cuda.current_stream(device))
    return made


class Sent:
    """Numbers on their way to the host."""

    __slots__ = ("_event", "_there")

    def __init__(self, x: Tensor) -> None:
        """x: strided and dense; what is written to it later does not count."""
        try:
            memory = pinned(x.nbytes)
        except RuntimeError:  # the system gives no more: the copy waits, and is as good
            memory = torch.empty(x.nbytes, dtype=torch.uint8)
        there = memory.view(x.dtype).view(x.shape)
        there.copy_(x, non_blocking=True)
        self._there, self._event = there.numpy(), event(x.device)

    @property
    def has_arrived(self) -> bool:
        """True if `numbers` may be read."""
        return self._event.query()

    def numbers(self) -> list[int]:
        """Returns the integers that were sent, which have arrived."""
        found: list[int] = self._there.tolist()
        return found

    def number(self, *, wait: bool = False) -> float:
        """Returns the one number that was sent. wait: it may not have arrived."""
        if wait:
            self._event.synchronize()
        return float(self._there.item())
