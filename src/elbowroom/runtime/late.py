"""Values that a device sends to the host, which reads them once they have arrived, without waiting.

They are copied to pinned memory, followed by an event. Both functions are looked up at each use, so
that tests can replace device memory.
"""

from typing import Protocol

import torch
from torch import Tensor


class StreamEvent(Protocol):
    """Interface of an event of a stream."""

    def query(self) -> bool:
        """Returns whether the stream has reached the event, without waiting."""
        ...

    def synchronize(self) -> None:
        """Waits until the stream has reached the event."""
        ...


def pinned(nbytes: int) -> Tensor:
    """Allocates memory of the host that a device can reach. RuntimeError: there is none."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def event(device: torch.device) -> StreamEvent:
    """Returns an event behind all work of the current stream."""
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
        except RuntimeError:  # no pinned memory is left: the copy blocks, with the same result
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
        """Returns the single number that was sent. wait: it may not have arrived yet."""
        if wait:
            self._event.synchronize()
        return float(self._there.item())
