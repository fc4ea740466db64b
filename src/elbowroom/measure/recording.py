"""A step of somebody else's program, from one forward of a model to the next, as a `Profile`.

Like `record`, in one run instead of several: times carry the cost of the memory profiler, which is
alike for all, and enough to compare actions by.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from elbowroom.measure.clocks import CpuMemory, CudaMemory, StepClock
from elbowroom.measure.held import Held
from elbowroom.measure.interval import Interval
from elbowroom.measure.rates import rates
from elbowroom.measure.recorder import StepRecorder
from elbowroom.plan.profile import Profile


class Recording:
    """Record of one step, which runs from `start` to `finish` or `close`."""

    def __init__(self, interval: Interval, owned: Iterable[Tensor], device: torch.device) -> None:
        self._interval, self._device = interval, device
        self._held = Held(owned)
        self._static = self._held.nbytes()
        self._wall = StepClock()
        self._cpu = CpuMemory(self._held) if device.type != "cuda" else None
        self._cuda = CudaMemory(device) if device.type == "cuda" else None
        self.recorder = StepRecorder(self)

    @classmethod
    def start(cls, owned: list[Tensor], device: torch.device) -> "Recording | None":
        """Starts a recording; None if this cannot be measured now.

        owned: what is held at this moment.
        """
        interval = Interval.start(0, device)
        return None if interval is None else cls(interval, owned, device)

    def begin(self, moment: int, *, frees: bool = False) -> None:
        """Begins a moment, as the clock of the recorder."""
        self._wall.begin(moment, frees=frees)
        for memory in (self._cpu, self._cuda):
            if memory is not None:
                memory.begin(moment, frees=frees)

    @property
    def has_backward(self) -> bool:
        """True if backward has asked for anything: a forward alone is no whole step."""
        return self.recorder.backward is not None

    def finish(self) -> Profile | None:
        """Returns what was written down so far; None if this thread cannot tell."""
        seconds = self._wall.seconds
        recorder = self.recorder
        levels = self._levels()
        if levels is None:
            return None
        last = recorder.moments - 1
        return Profile(
            level=tuple(levels[0]),
            floor=tuple(levels[1]),
            starts_s=tuple(self._wall.starts_s),
            backward=last if recorder.backward is None else recorder.backward,
            seconds=seconds,
            static=self._static,
            storages=recorder.storages(),
            modules=recorder.modules(),
            rates=rates(self._device.type, lossy=False),  # with what `fit` has asked for
            device=(self._device.type, ""),
        )

    def close(self) -> bool:
        """Ends the record, whose content is lost; returns whether this thread could."""
        return self._interval.close()

    def _levels(self) -> tuple[list[int], list[int]] | None:
        if self._cuda is not None:
            self._interval.close()
            return self._cuda.levels()
        curve = self._interval.curve()
        return None if curve is None or self._cpu is None else self._cpu.levels(curve)
