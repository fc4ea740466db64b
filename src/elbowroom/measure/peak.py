"""Measures how many bytes one step holds at its worst, as the allocator saw it.

    level(t) = sizes allocated up to t, less those freed up to t     above what stood before
    peak     = max over t of level(t)

On a CPU the allocator reports every allocation and release of a tensor, temporaries inside an
operator included (`allocations.py`). Against an interposed malloc that was 352.30 of 352.38 MiB
on a conv net and 81.75 of 82.00 on a transformer; resident memory (RSS) gave values from 0 to 192
for the same step, because freed memory stays with the process. Three things escape: buffers that
NumPy or numba allocate by themselves (ours come from torch); what was held before the step began,
such as a cache that an earlier step left behind; and, on a CPU, the release of what was held
before, so let the step before drop its gradients, or they count twice. On CUDA the peak is the
counter of the caching allocator, whose requests are rounded up to 512 bytes.

Run the step twice before measuring: the first one creates optimizer states.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

import torch

from elbowroom._checks import check_device, check_function
from elbowroom.measure.allocations import (
    Allocations,
    Change,
    Freed,
    NamedMoment,
    is_busy,
    is_in_backward,
)
from elbowroom.measure.background import Background


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes above the level before the step, after each allocation or release.

    `times_s` counts from the first of them; `nbytes[i]` holds from `times_s[i]` on. `marks` are the
    moments that the step named with `mark`, as (name, seconds).
    """

    times_s: tuple[float, ...]
    nbytes: tuple[int, ...]
    marks: tuple[tuple[str, float], ...] = ()

    @property
    def peak_nbytes(self) -> int:
        """The highest level, in bytes; 0 for a step that allocated nothing."""
        return max(0, *self.nbytes, 0)

    @property
    def end_nbytes(self) -> int:
        """The bytes that the step left behind (gradients, states), above the level before it."""
        return self.nbytes[-1] if self.nbytes else 0

    @property
    def duration_s(self) -> float:
        """Seconds from the first event or mark to the last, with the profiler's own cost inside."""
        return max(self.times_s + tuple(at_s for _, at_s in self.marks), default=0.0)

    def until(self, name: str) -> "MemoryCurve":
        """Returns the curve up to the last moment of this name; all of it if there is none."""
        end_s = max((at_s for known, at_s in self.marks if known == name), default=inf)
        changes = bisect_right(self.times_s, end_s)
        return replace(self, times_s=self.times_s[:changes], nbytes=self.nbytes[:changes])

    def after(self, name: str) -> "MemoryCurve":
        """Returns the curve from the last moment of this name on; nothing if there is none."""
        changes = len(self.until(name).nbytes)
        return replace(self, times_s=self.times_s[changes:], nbytes=self.nbytes[changes:])


def mark(name: str) -> None:
    """Name this moment of a step, for `memory_curve`: `mark("backward")`. Costs microseconds."""
    Allocations.mark(name)


def peak(step: Callable[[], object], *, device: torch.device | str | None = None) -> int:
    """Returns the peak memory of `step()`, in bytes above the memory in use before it.

    device  None: the current CUDA device if CUDA is in use in this process, else the CPU

    On a CPU, allocations of this thread and of its backward are counted, but not those of other
    threads that the step starts. Raises PlanError if this machine does not have the device, and
    RuntimeError if a profiler is running already (as inside another `peak` or a backward), or if
    the step starts one.

    >>> peak(lambda: torch.zeros(1000, dtype=torch.uint8))
    1000
    """
    check_function("step", step)
    device = pick_device(device)
    if device.type != "cuda":
        return memory_curve(step, device=device).peak_nbytes
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_nbytes = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before_nbytes)


def memory_curve(
    step: Callable[[], object], *, device: torch.device | str | None = None
) -> MemoryCurve:
    """Every change of the allocated bytes on one device while `step()` runs, with its time."""
    check_function("step", step)
    device = pick_device(device)
    if is_in_backward():
        raise RuntimeError(
            "a peak cannot be measured inside a backward, which puts back the profiler that ran "
            "when it began; measure the whole step"
        )
    Background.interrupt()
    if is_busy():
        raise RuntimeError(
            "a peak cannot be measured inside another peak, or while a profiler runs: PyTorch has "
            "one profiler per process. Stop that one first."
        )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    allocations = Allocations(shares=True)
    try:
        result = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        changes, marks = allocations.stop()
    allocations.check()
    del result  # held until here, as the caller of an ordinary step would
    return curve_of(changes, marks, device.type)


def pick_device(device: torch.device | str | None) -> torch.device:
    """Returns the device to measure.

    None: the current CUDA device if CUDA is in use in this process, else the CPU.

    Raises PlanError for a device that this machine does not have.
    """
    if device is None:
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.device("cuda" if in_use else "cpu")
    return check_device(device)


def curve_of(
    changes: list[Change], marks: list[NamedMoment], device_type: str, *, by: object = None
) -> MemoryCurve:
    """Returns what was allocated and freed on one type of device, as a curve.

    by: the measurement whose marks say what was freed that was there before it.
    """
    changes = [change for change in changes if change.device_type == device_type]
    if device_type == "cpu":
        changes = _of_this_run(changes)
    freed = [
        Change(at_ns, 0, -name.nbytes, device_type)
        for at_ns, name in marks
        if isinstance(name, Freed) and name.by is by
    ]
    if freed:
        changes = sorted([*freed, *changes], key=lambda change: change.at_ns)
    moments_ns = [change.at_ns for change in changes] + [mark.at_ns for mark in marks]
    start_ns = min(moments_ns, default=0)
    return MemoryCurve(
        times_s=tuple((change.at_ns - start_ns) / 1e9 for change in changes),
        nbytes=tuple(accumulate(change.nbytes for change in changes)),
        marks=tuple(
            (name, (at_ns - start_ns) / 1e9) for at_ns, name in marks if isinstance(name, str)
        ),
    )


def _of_this_run(changes: list[Change]) -> list[Change]:
    """Returns the changes of memory that was both taken and freed, or taken and kept, in this run.

    That is, while the profiler ran.

    The CPU allocator's reporter never forgets an address whose release it did not see, so a tensor
    from before the run that stands where an earlier run's tensor stood is "freed" with the size of
    that one: a level of -128 bytes out of nowhere.
    """
    held: dict[int, int] = {}
    kept = []
    for change in changes:
        if change.nbytes > 0:
            held[change.ptr] = change.nbytes
        elif held.pop(change.ptr, None) is None:
            continue
        kept.append(change)
    return kept
