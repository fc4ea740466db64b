"""A step of the user's program, from one forward of a model to the next, as a `Profile`.

Like `record`, but in one run instead of several: times include the cost of the memory profiler,
which is about the same for all ops, so that actions can still be compared.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from elbowroom.measure.clocks import CpuMemory, CudaMemory, StepClock
from elbowroom.measure.interval import Interval
from elbowroom.measure.live_storages import LiveStorages
from elbowroom.measure.rates import rates
from elbowroom.measure.recorder import StepRecorder
from elbowroom.plan.profile import Profile


class Recording:
    """Record of one step, which runs from `start` to `finish` or `close`."""

    def __init__(
        self,
        interval: Interval,
        model_state: list[Tensor],
        device: torch.device,
        passing: list[Tensor],
    ) -> None:
        self._interval, self._device = interval, device
        self._static = LiveStorages(model_state).nbytes()
        self._held = LiveStorages([*model_state, *passing])
        self._clock = StepClock()
        self._cpu = CpuMemory(self._held) if device.type != "cuda" else None
        self._cuda = CudaMemory(device) if device.type == "cuda" else None
        self.recorder = StepRecorder(self, self._clock.stopwatch)

    @classmethod
    def start(
        cls, model_state: list[Tensor], device: torch.device, passing: Iterable[Tensor] = ()
    ) -> "Recording | None":
        """Starts a recording; None if this cannot be measured now.

        model_state: what is held at this moment; passing: what is held besides, and not for long
        """
        interval = Interval.start(0, device)
        return None if interval is None else cls(interval, model_state, device, [*passing])

    def until(self, inputs: Iterable[Tensor]) -> None:
        """Counts no further than to where backward has given these their gradients (on a CPU)."""
        self._interval.until(inputs)

    def until_updated(self, is_own: Callable[[Optimizer], bool]) -> None:
        """Counts no further than to the end of the optimizer's step (on a CPU)."""
        self._interval.until_updated(is_own)

    def begin(self, moment: int, *, frees: bool = False) -> None:
        """Begins a moment, as the clock of the recorder."""
        for clock in (self._clock, self._cpu, self._cuda):
            if clock is not None:
                clock.begin(moment, frees=frees)

    @property
    def has_backward(self) -> bool:
        """True if backward has asked for anything: a forward alone is no whole step."""
        return self.recorder.backward is not None

    def finish(self, *, moves: bool = False) -> Profile | None:
        """Returns what was written down so far; None if this thread cannot tell.

        moves: plans of it may move tensors, though no `fit` has asked for that
        """
        *starts_s, seconds = self._clock.times_s()
        recorder = self.recorder
        levels = self._levels()
        if levels is None:
            return None
        last = recorder.moments - 1
        speeds = rates(self._device.type, lossy=False, moves=moves)  # and what `fit` has asked for
        return Profile(
            level=tuple(levels[0]),
            floor=tuple(levels[1]),
            starts_s=tuple(starts_s),
            backward=last if recorder.backward is None else recorder.backward,
            seconds=seconds,
            static=self._static,
            storages=recorder.storages(),
            modules=recorder.modules(),
            rates=speeds,
            fixed_s=speeds.fixed_s,
            unlisted_nbytes=recorder.unlisted_nbytes,
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
