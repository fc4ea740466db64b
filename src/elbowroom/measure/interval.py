"""The peak between two moments of somebody else's program: from one forward of a model to the next.

Like `peak`, for code that is not ours to call. On CUDA: the caching allocator's counter, reset at
the start. On a CPU: what the allocator reports (`allocations.py`). That belongs to one thread and
there is one in a process, so an interval runs only on the main thread, one at a time, and never
beside a profiler of the user's: `start` then gives None, and one tries again later. An interval
that is not needed any more must be closed. A peak that somebody asks for (`er.peak`) and a profiler
that the user starts end one that runs; inside of such a peak one may begin.
"""

import atexit
import threading

import torch

from elbowroom.measure.allocations import Allocations, may_begin
from elbowroom.measure.background import Background
from elbowroom.measure.peak import MemoryCurve, curve_of


class Interval:
    """Measured stretch of time, from `start` to `stop` or `close`."""

    def __init__(
        self, base_nbytes: int, device: torch.device, allocations: Allocations | None
    ) -> None:
        self._base_nbytes, self._device, self._allocations = base_nbytes, device, allocations
        self._curve: MemoryCurve | None = None

    @classmethod
    def start(cls, base_nbytes: int, device: torch.device) -> "Interval | None":
        """Starts an interval.

        base_nbytes: what is held at this moment; a CPU interval adds its own peak to it.
        """
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return cls(base_nbytes, device, None)
        if not may_measure(device):
            return None
        Background.running = found = cls(base_nbytes, device, Allocations())
        return found

    def stop(self) -> int | None:
        """The highest level since the start, in bytes; None if this thread cannot tell it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        curve = self.curve()
        return None if curve is None else self._base_nbytes + curve.peak_nbytes

    def curve(self) -> MemoryCurve | None:
        """Ends the interval; returns, on a CPU, all that happened since its start."""
        return self._curve if self.close() else None

    def close(self) -> bool:
        """Stops counting, if this is the thread that may; returns whether this call stopped it."""
        if (
            self._allocations is None
            or Background.running is not self
            or threading.current_thread() is not threading.main_thread()
        ):
            return False
        Background.running = None
        if self._allocations.was_ended:
            return False
        self._curve = curve_of(*self._allocations.stop(), self._device.type)
        return True


@atexit.register
def _close_running() -> None:
    """Closes a measurement that runs while the interpreter ends, which it would crash."""
    Background.interrupt()


def may_measure(device: torch.device) -> bool:
    """Returns whether an interval could start now, on this thread."""
    if device.type == "cuda":
        return True
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and Background.running is None and may_begin()
