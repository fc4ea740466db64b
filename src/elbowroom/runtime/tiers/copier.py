"""Copies between a device and the host, and when they are done: the seam of the host tier.

On CUDA they run on a stream of their own, beside the computation:

1. The compute stream is asked for before the side stream is entered; asked for inside, it is the
   side stream, and nobody waits for anybody.
2. The side stream waits for the compute stream first: what is copied out has been computed by then,
   and the memory that is copied into is free of what came before.
3. Events order everything; `record_stream` is never used (it delays and fragments).
4. All copies of a device share one side stream: a part of a slab that is filled again is filled
   after it was read.
"""

from typing import Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy on its way."""

    def is_done(self) -> bool: ...

    def order(self) -> None:
        """What the current stream does from now on comes after the copy. It does not wait here."""
        ...

    def wait(self) -> None:
        """Wait here until it is done: for threads of the host that read or write the memory."""
        ...


class Copier(Protocol):
    """Of one device."""

    def copy(self, source: Tensor, into: Tensor) -> Copy:
        """Begin to copy flat bytes, after all that the current stream was asked for so far."""
        ...


class CudaCopier:
    """The side stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, source: Tensor, into: Tensor) -> "CudaCopy":
        compute = torch.cuda.current_stream(self._device)  # rule 1
        self._side.wait_stream(compute)  # rule 2
        with torch.cuda.stream(self._side):
            into.copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._side)
        return CudaCopy(done, self._device)


class CudaCopy:
    """An event on the side stream."""

    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done, self._device = done, device

    def is_done(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        self._done.synchronize()
