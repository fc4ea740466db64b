"""A GPU's tensors in a file, through host memory that is held only meanwhile.

    put:    copy to the host; a worker waits for it, and writes
    fetch:  a worker reads; then copy to the device

The host memory is torch's own pinned cache, which does not reuse a block before the copies that use
it are done. The windows limit the memory in use.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from elbowroom.runtime.tiers.base import Arrival
from elbowroom.runtime.tiers.copier import Copier
from elbowroom.runtime.tiers.file import FileTier


class StagedTier:
    """A file tier for one device. stage: makes host memory of so many bytes."""

    def __init__(
        self, copier: Copier, file: FileTier, stage: Callable[[int], Tensor] | None = None
    ) -> None:
        self.copier, self.file = copier, file
        self.stage = _pinned if stage is None else stage

    @property
    def refusal(self) -> str:
        return self.file.refusal

    def put(self, flat: Tensor) -> "StagedTicket":
        return StagedTicket(self, flat)

    def say_trouble(self) -> None:
        self.file.say_trouble()


class StagedTicket:
    """A tensor, then its copy on the host, then an extent of a file."""

    def __init__(self, tier: StagedTier, flat: Tensor) -> None:
        self._tier = tier
        self._call: Callable[[], None] | None = None
        self.source: Tensor | None = flat
        host = tier.stage(flat.numel())
        self._copy = tier.copier.copy(flat, host)
        self._file = tier.file.put(host, before=self._copied)

    def _copied(self) -> None:
        """Called by a worker before it writes: the copy on the host is done."""
        self._copy.wait()
        self.source = None
        call = self._call
        if call is not None:
            call()

    def fetch(self, into: Tensor) -> "StagedArrival":
        copier, host = self._tier.copier, self._file.source
        if host is not None:  # not written yet, or it could not be
            return StagedArrival(copier, host, into, None)
        host = self._tier.stage(into.numel())
        return StagedArrival(copier, host, into, self._file.fetch(host))

    def when_away(self, call: Callable[[], None]) -> None:
        self._call = call
        if self.source is None:
            call()

    def drop(self) -> None:
        self._call = None
        if self.source is not None:
            self._copy.let_go()  # the memory may be taken at once
            self.source = None
        self._file.drop()


class StagedArrival:
    """A read, and the copy that follows it."""

    def __init__(self, copier: Copier, host: Tensor, into: Tensor, reading: Arrival | None) -> None:
        self._copier, self._host, self._into, self._reading = copier, host, into, reading
        self._home = copier.home()

    def wait(self) -> None:
        if self._reading is not None:
            self._reading.wait()
        self._copier.copy(self._host, self._into, self._home).order(self._into)

    def drop(self) -> None:
        """Drops the read: no copy has begun.

        The worker holds the memory that it reads into.
        """


def _pinned(nbytes: int) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no pinned memory is left: slower, with the same result
        return torch.empty(nbytes, dtype=torch.uint8)
