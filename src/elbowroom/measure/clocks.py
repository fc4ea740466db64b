"""The cost of each moment of a recorded step: seconds, or bytes.

StepClock      the time at which each moment begins
Undisturbed    seconds without those in which other processes had the processor
CpuMemory      the highest level in each moment, from the marks among the allocations
CudaMemory     the same from the caching allocator's counters, read and reset at each moment
"""

import itertools
import time
from bisect import bisect_right
from collections.abc import Sequence

import torch

from elbowroom.measure.held import Held
from elbowroom.measure.peak import MemoryCurve, mark

_recordings = itertools.count()


class Undisturbed:
    """Seconds of a CPU, as far as this process could use them.

    Between two readings the lesser of what the wall clock and the process's own processor time
    (of all its threads) have gone on by: on a machine that does other work, a step would seem
    several times as long as what codes and copies are measured at, the best of many runs. On one
    that does nothing else, both clocks agree, but where the step itself waits.
    """

    def __init__(self) -> None:
        self._total_s = 0.0
        self._wall_s, self._process_s = time.perf_counter(), time.process_time()

    def now_s(self) -> float:
        """Seconds since its making."""
        wall_s, process_s = time.perf_counter(), time.process_time()
        self._total_s += min(wall_s - self._wall_s, process_s - self._process_s)
        self._wall_s, self._process_s = wall_s, process_s
        return self._total_s


class StepClock:
    """Seconds from its making to each moment: of the CPU, or of the current CUDA stream."""

    def __init__(self) -> None:
        self._cuda: list[torch.cuda.Event] | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = [self._event()]
        self._cpu = Undisturbed()
        self._cpu_s = [self._cpu.now_s()]

    def begin(self, moment: int, *, frees: bool = False) -> None:
        if self._cuda is not None:
            self._cuda.append(self._event())
        else:
            self._cpu_s.append(self._cpu.now_s())

    @property
    def starts_s(self) -> list[float]:
        """The start of each moment, in seconds."""
        if self._cuda is None:
            return [at_s - self._cpu_s[0] for at_s in self._cpu_s[1:]]
        torch.cuda.synchronize()
        return [self._cuda[0].elapsed_time(event) / 1000 for event in self._cuda[1:]]

    @property
    def seconds(self) -> float:
        """Until now."""
        if self._cuda is None:
            return self._cpu.now_s() - self._cpu_s[0]
        now = self._event()
        torch.cuda.synchronize()
        return float(self._cuda[0].elapsed_time(now)) / 1000

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class CpuMemory:
    """Marks each moment among the allocations of a step, and watches what was there before."""

    def __init__(self, held: Held) -> None:
        self._held = held
        # One that was interrupted still marks, into whatever is measured by then.
        self._moment = f"moment {next(_recordings)}."
        self._before: list[int] = []
        self._frees: list[bool] = []

    def begin(self, moment: int, *, frees: bool = False) -> None:
        self._before.append(self._held.nbytes())
        self._frees.append(frees)
        mark(f"{self._moment}{moment}")

    def levels(self, curve: MemoryCurve) -> tuple[list[int], list[int]]:
        """The highest level in each moment, and that at its beginning, in bytes."""
        starts = [0.0] * len(self._before)
        for name, at_s in curve.marks:
            if name.startswith(self._moment):
                starts[int(name.removeprefix(self._moment))] = at_s
        firsts = [bisect_right(curve.times_s, start_s) for start_s in starts]
        levels, floors = levels_of(curve.nbytes, firsts, self._frees)
        above = zip(levels, floors, self._before, strict=True)
        both = [(level + before, floor + before) for level, floor, before in above]
        return [level for level, _ in both], [floor for _, floor in both]


def levels_of(
    nbytes: Sequence[int], firsts: Sequence[int], frees: Sequence[bool]
) -> tuple[list[int], list[int]]:
    """The highest level in each moment, and that at its beginning, in bytes.

    What is let go of before anything else happens counts in the moment before alone. Else variables
    of a function that has returned would stand in a moment in which they are known to be gone, and
    a plan that keeps what is saved of them would count them twice.

    nbytes  the level after each change
    firsts  of each moment, the first change in it
    frees   whether that lets go of what belongs to the moment before
    """
    levels: list[int] = []
    floors: list[int] = []
    lasts = (*firsts[1:], len(nbytes))
    for first, last, releases in zip(firsts, lasts, frees, strict=True):
        at_start = nbytes[first - 1] if first else 0
        if releases and first < last:
            at_start = min(at_start, nbytes[first])
        floors.append(at_start)
        begun = first
        while levels and begun < last and nbytes[begun] <= at_start:
            at_start, begun = nbytes[begun], begun + 1
        levels.append(max((at_start, *nbytes[begun:last])))
    return levels, floors


class CudaMemory:
    """Reads the allocator at each moment; no part of the step waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: list[int] = []
        self._floors: list[int] = []
        torch.cuda.reset_peak_memory_stats(device)

    def begin(self, moment: int, *, frees: bool = False) -> None:
        if moment:
            self._peaks.append(torch.cuda.max_memory_allocated(self._device))
        self._floors.append(torch.cuda.memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def levels(self) -> tuple[list[int], list[int]]:
        """The highest level in each moment, and that at its beginning, in bytes."""
        peaks = [*self._peaks, torch.cuda.max_memory_allocated(self._device)]
        return peaks[: len(self._floors)], self._floors
