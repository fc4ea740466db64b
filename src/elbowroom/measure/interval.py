"""The peak between two moments of somebody else's program: from one forward of a model to the next.

Like `peak`, for code that is not ours to call. On CUDA: the caching allocator's counter, reset at
the start. On a CPU: PyTorch's profiler, with its limits. It belongs to one thread and there is one
in a process, so an interval runs only on the main thread, one at a time, and never beside a
profiler of the user's: `start` then gives None, and one tries again later. An interval that is not
needed any more must be closed. A peak that somebody asks for (`er.peak`) ends one that runs.
"""

import atexit
import threading
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from elbowroom.measure.background import Background
from elbowroom.measure.peak import MemoryCurve, curve_of, quiet_profiler


class Interval:
    """Runs from `start` to `stop` or `close`."""

    def __init__(self, base_nbytes: int, device: torch.device, profiler: Any) -> None:
        self._base_nbytes, self._device, self._profiler = base_nbytes, device, profiler

    @classmethod
    def start(cls, base_nbytes: int, device: torch.device) -> "Interval | None":
        """base_nbytes: what is held at this moment; a CPU interval adds its own peak to it."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return cls(base_nbytes, device, None)
        if not may_measure(device):
            return None
        quiet_profiler()
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        profiler.start()
        Background.running = found = cls(base_nbytes, device, profiler)
        return found

    def stop(self) -> int | None:
        """The highest level since the start, in bytes; None if this thread cannot tell it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        curve = self.curve()
        return None if curve is None else self._base_nbytes + curve.peak_nbytes

    def curve(self) -> MemoryCurve | None:
        """On a CPU: all that happened since the start. It ends the interval."""
        return curve_of(self._profiler, self._device.type) if self.close() else None

    def close(self) -> bool:
        """Stop the profiler, if this is the thread that may. Whether this call stopped it."""
        if (
            Background.running is not self
            or threading.current_thread() is not threading.main_thread()
        ):
            return False
        Background.running = None
        self._profiler.stop()
        return True


@atexit.register
def _close_running() -> None:
    """A profiler that runs while the interpreter ends crashes it."""
    Background.interrupt()


def may_measure(device: torch.device) -> bool:
    """Whether an interval could start now, on this thread."""
    if device.type == "cuda":
        return True
    on_main = threading.current_thread() is threading.main_thread()
    busy = Background.running is not None or torch._C._autograd._profiler_enabled()
    return on_main and not busy
