"""Copies between a device and the host, and their completion: the interface of the host tier.

On CUDA they run on a stream of their own, beside the computation:

1. The compute stream is determined before the side stream is entered; inside, the current stream is
   the side stream, which would wait for itself.
2. The side stream waits for the compute stream first: by then the tensor to copy was computed, and
   the target memory is no longer used by earlier work.
3. Events order everything; `record_stream` is used only where a tensor is read on another stream
   than the one that its memory belongs to (it delays and fragments).
4. All copies of a device share one side stream: a part of a slab is refilled only after it was
   read.
5. Released memory may be reused immediately by the stream that it belongs to, which need not be the
   current one: a program may compute on several, and a handle may be freed anywhere. So that stream
   has to wait.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy on its way."""

    def is_done(self) -> bool: ...

    def order(self, into: Tensor) -> None:
        """Makes reads of `into` by the current stream, from now on, come after the copy.

        The host does not wait.
        """
        ...

    def let_go(self) -> None:
        """Allows reuse of the device's memory after the copy. It does not wait."""
        ...

    def wait(self) -> None:
        """Waits until it is done: for threads of the host that read or write the memory."""
        ...


class Copier(Protocol):
    """Interface of a copier to and from one device."""

    def home(self) -> Any:
        """Returns the stream to which memory belongs that is allocated now."""
        ...

    def copy(self, source: Tensor, into: Tensor, home: Any = None) -> Copy:
        """Begins to copy flat bytes, after all work of the current stream so far.

        home: the stream that owns the memory of the device, which waits, too; None: current stream
        """
        ...


class CudaCopier:
    """The side stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def home(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def copy(
        self, source: Tensor, into: Tensor, home: torch.cuda.Stream | None = None
    ) -> "CudaCopy":
        compute = torch.cuda.current_stream(self._device)  # rule 1
        self._side.wait_stream(compute)  # rule 2
        if home is not None and home != compute:
            self._side.wait_stream(home)
        with torch.cuda.stream(self._side):
            begin(source, into)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._side)
        return CudaCopy(done, self._device, compute if home is None else home)


def begin(source: Tensor, into: Tensor) -> None:
    """Asks the current stream for a copy."""
    into.copy_(source, non_blocking=True)


def used_on(x: Tensor, stream: torch.cuda.Stream) -> None:
    """Tells that a stream uses x, whose memory is another one's."""
    x.record_stream(stream)


class CudaCopy:
    """An event on the side stream."""

    def __init__(
        self, done: torch.cuda.Event, device: torch.device, home: torch.cuda.Stream
    ) -> None:
        self._done, self._device, self._home = done, device, home

    def is_done(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def order(self, into: Tensor) -> None:
        now = torch.cuda.current_stream(self._device)
        now.wait_event(self._done)
        if now != self._home:
            used_on(into, now)  # rule 3

    def let_go(self) -> None:
        self._home.wait_event(self._done)  # rule 5

    def wait(self) -> None:
        self._done.synchronize()
