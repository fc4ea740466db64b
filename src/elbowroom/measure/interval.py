"""The peak between two moments of somebody else's program: from one forward of a model to the next.

Like `peak`, for code that is not ours to call: on a CPU the profiler's memory events, on CUDA the caching allocator's
counter, which is reset at the start.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from elbowroom.measure.peak import curve_of


@dataclass
class Interval:
    """Runs from `start` to `stop`."""

    _base_nbytes: int
    _device: torch.device
    _profiler: Any

    @classmethod
    def start(cls, base_nbytes: int, device: torch.device) -> "Interval":
        """base_nbytes: what is held at this moment, in bytes; it is added to the peak of a CPU interval."""
        profiler = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif not torch._C._autograd._profiler_enabled():
            profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            profiler.start()
        return cls(base_nbytes, device, profiler)

    def stop(self) -> int | None:
        """The highest level since the start, in bytes; None if somebody else's profiler was in the way."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._profiler is None:
            return None
        self._profiler.stop()
        return self._base_nbytes + curve_of(self._profiler, self._device.type).peak_nbytes
