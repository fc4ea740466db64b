"""The cost of each moment of a recorded step: seconds, or bytes.

Stopwatch      seconds of the step's own work: it stands still while we look at the step
StepClock      the time at which each moment begins, by a stopwatch
Undisturbed    seconds without those in which other processes had the processor
CpuMemory      the highest level in each moment, from the marks among the allocations
CudaMemory     the same from the caching allocator's counters, read and reset at each moment
"""

import itertools
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch

from elbowroom.kernels.paused_clocks import watch
from elbowroom.measure.cuda_peak import CudaPeak
from elbowroom.measure.live_storages import LiveStorages
from elbowroom.measure.peak import MemoryCurve, mark

_recordings = itertools.count()
_SHORT_S = 1e-4  # a scheduler gives the processor to others for longer


class Undisturbed:
    """Seconds of a CPU, as far as this process could use them.

    Between two readings, the lesser of the wall clock's and the processor clock's difference counts
    (the latter is of all threads of the process). On a machine that does other work, the wall clock
    alone would make a step seem several times as long as codes and copies, which are measured as
    the best of many runs. On an idle machine both clocks agree, except where the step waits.

    Reading the processor clock is a system call, which takes up to ten times as long as reading the
    wall clock. A step is read thousands of times, so the processor clock is read only if enough
    time has passed for another process to have run.
    """

    def __init__(
        self,
        wall_clock: Callable[[], float] = time.perf_counter,
        process_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """wall_clock, process_clock: in seconds."""
        self._wall_clock, self._process_clock = wall_clock, process_clock
        self._total_s = self._short_s = 0.0
        self._wall_s, self._process_s = wall_clock(), process_clock()

    def now_s(self) -> float:
        """Seconds since its making."""
        wall_s = self._wall_clock()
        took_s = wall_s - self._wall_s
        self._wall_s = wall_s
        if took_s < _SHORT_S:
            self._short_s += took_s
        else:
            process_s = self._process_clock()
            used_s = process_s - self._process_s - self._short_s
            took_s = min(took_s, max(used_s, 0.0))
            self._process_s, self._short_s = process_s, 0.0
        self._total_s += took_s
        return self._total_s


class Stopwatch:
    """Seconds of a step's own work, of the CPU or of the current CUDA stream.

    The recorder examines each op and each saved tensor, which takes as long as a small op, and does
    exact actions that plain autograd would not. Inside `paused()` no time counts, so that readings
    are those of plain autograd. Nor does it while a kernel is loaded (`paused_clocks.py`).

    A reading is an index, which is converted to seconds when the step is over, so that the host
    need not wait for a GPU inside of the step. On a GPU, a pause is the time between an event
    before it and an event after it: nothing if the GPU was still busy with earlier work, else the
    time for which it was idle.
    """

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        """now_s: seconds on any clock, in place of this machine's."""
        self._now_s = now_s or Undisturbed().now_s
        self._has_events = now_s is None and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._is_paused = False
        self._read_s: list[float] = []
        self._events: list[tuple[torch.cuda.Event, int]] = []  # and how many pauses came before
        self._pauses: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._began: torch.cuda.Event | None = None  # the pause that lasts
        self.start()
        watch(self)

    def start(self) -> None:
        """Begins again at 0; no reading from before counts."""
        self._running_s, self._last_s = 0.0, self._now_s()
        self._read_s.clear()
        self._events.clear()
        self._pauses.clear()
        self.read()

    def read(self) -> int:
        """Returns the number of a new reading."""
        if self._has_events:
            self._events.append((self._began or _event(), len(self._pauses)))
            return len(self._events) - 1
        if not self._is_paused:
            self._run()
        self._read_s.append(self._running_s)
        return len(self._read_s) - 1

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context in which no time passes; inside of another one, it changes nothing."""
        return _NEVER if self._is_paused else self

    def __enter__(self) -> None:
        self._is_paused = True
        if self._has_events:
            self._began = _event()
        else:  # as `_run` does: this happens several times for each op
            now_s = self._now_s()
            self._running_s += now_s - self._last_s
            self._last_s = now_s

    def __exit__(self, *raised: object) -> None:
        if self._began is not None:
            self._pauses.append((self._began, _event()))
            self._began = None
        else:
            self._last_s = self._now_s()
        self._is_paused = False

    def seconds_at(self, readings: Sequence[int]) -> list[float]:
        """Returns, for each of these readings, the seconds from the first of all until then.

        The step is over: a GPU is waited for.
        """
        if not self._has_events:
            return [self._read_s[reading] - self._read_s[0] for reading in readings]
        torch.cuda.synchronize()
        lost = [0.0, *accumulate(one.elapsed_time(other) for one, other in self._pauses)]
        first, _ = self._events[0]
        read = [self._events[reading] for reading in readings]
        return [(first.elapsed_time(event) - lost[pauses]) / 1000 for event, pauses in read]

    def _run(self) -> None:
        now_s = self._now_s()
        self._running_s += now_s - self._last_s
        self._last_s = now_s


_NEVER = nullcontext()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class StepClock:
    """Seconds from its making to each moment, by the stopwatch."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        self._begun: list[int] = []

    def begin(self, moment: int, *, frees: bool = False) -> None:
        self._begun.append(self.stopwatch.read())

    def times_s(self) -> list[float]:
        """Returns the start of each moment, and now, in seconds."""
        return self.stopwatch.seconds_at([*self._begun, self.stopwatch.read()])


class Clocks:
    """Tells all of its clocks of each moment."""

    def __init__(self, *clocks: "StepClock | CpuMemory | CudaMemory") -> None:
        self._clocks = clocks

    def begin(self, moment: int, *, frees: bool = False) -> None:
        for clock in self._clocks:
            clock.begin(moment, frees=frees)


class CpuMemory:
    """Marks each moment among the allocations of a step, and watches what was there before."""

    def __init__(self, held: LiveStorages) -> None:
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

    Memory that is freed at the very start of a moment counts in the moment before alone. Otherwise
    local variables of a function that has returned would count in a moment in which they are gone,
    and a plan that keeps their saved tensors would count them twice.

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
        self._peaks: list[int] = []
        self._floors: list[int] = []
        self._peak = CudaPeak(device)

    def begin(self, moment: int, *, frees: bool = False) -> None:
        peak, now = self._peak.restart()
        if moment:
            self._peaks.append(peak)
        self._floors.append(now)

    def levels(self) -> tuple[list[int], list[int]]:
        """The highest level in each moment, and that at its beginning, in bytes; ends it."""
        peaks = [*self._peaks, self._peak.close()]
        return peaks[: len(self._floors)], self._floors
