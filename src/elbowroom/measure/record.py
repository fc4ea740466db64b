"""Runs a step a few times, and returns its `Profile`.

    1. once or twice without a record: optimizer states and caches are created
    2. with a clock: when each tensor is saved and requested
    3. with the allocator: how much is held, moment by moment; and with a clock, too

For each moment, the lesser of the times of runs 2 and 3 counts: a disturbance rarely hits the same
moment twice.

Each run is inside a `saving` context of exact actions, so a step that does not fit in memory under
plain autograd may still be measured, and no bit of any gradient changes. The step is the user's,
and really trains.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from elbowroom.errors import PlanError
from elbowroom.measure.allocations import Allocations
from elbowroom.measure.background import Background
from elbowroom.measure.clocks import Clocks, CpuMemory, CudaMemory, StepClock
from elbowroom.measure.live_storages import LiveStorages, all_tensors
from elbowroom.measure.peak import curve_of, pick_device
from elbowroom.measure.rates import rates
from elbowroom.measure.recorder import StepRecorder
from elbowroom.measure.recorder_notes import Clock, Timer
from elbowroom.measure.shares import watch_noise
from elbowroom.plan import Exact, Policy
from elbowroom.plan.profile import Profile
from elbowroom.runtime.context import Context
from elbowroom.runtime.saving import Saving

Step = Callable[[], object]


def record(
    step: Step,
    *,
    device: torch.device | str | None = None,
    policy: Policy | None = None,
    min_nbytes: int = 65536,
    warm_up: int = 1,
    noise: bool = False,
) -> Profile:
    """Runs `step` warm_up + 2 times, and writes down what the last two did.

    noise: and STEPS times more (`shares.py`), with lossy codes, to learn what these add.

    Raises PlanError if nothing was saved for backward, or if two runs of the step differ.
    """
    chosen = pick_device(device)
    policy = Exact() if policy is None else policy
    for _ in range(warm_up):
        with Saving(policy, min_nbytes=min_nbytes, context=Context(learns=False)):
            step()
    clock, second = StepClock(), StepClock()
    timed = run_recorded(step, clock, policy, min_nbytes, clock.stopwatch)
    times = [clock.times_s()]
    sized, (levels, floors), static = _sized(step, chosen, policy, min_nbytes, second)
    times.append(second.times_s())
    check_saves(sized)
    if not _saved_the_same(sized, timed):
        raise PlanError(
            "two runs of the step saved different tensors, so no plan can be made of it; give a "
            "step that does the same every time (same shapes, same branches, no fitted model)"
        )
    *starts_s, seconds = least_times(*times)
    speeds = rates(chosen.type)
    return Profile(
        level=tuple(levels),
        floor=tuple(floors),
        starts_s=tuple(starts_s),
        backward=sized.moments - 1 if sized.backward is None else sized.backward,
        seconds=seconds,
        static=static,
        storages=tuple(
            replace(one, producer_s=min(one.producer_s, other.producer_s))
            for one, other in zip(timed.storages(), sized.storages(), strict=True)
        ),
        modules=tuple(
            replace(one, seconds=min(one.seconds, other.seconds))
            for one, other in zip(timed.modules(), sized.modules(), strict=True)
        ),
        rates=speeds,
        fixed_s=speeds.fixed_s,
        unlisted_nbytes=sized.unlisted_nbytes,
        device=(chosen.type, _name_of(chosen)),
        noise=watch_noise(step, min_nbytes=min_nbytes) if noise else None,
    )


def least_times(one_s: Sequence[float], other_s: Sequence[float]) -> list[float]:
    """Returns times of a step in which each moment takes the lesser of what it took in two.

    Both have the start of each moment, and the end of the step last.
    """
    taken = zip(pairwise((0.0, *one_s)), pairwise((0.0, *other_s)), strict=True)
    return list(accumulate(min(b - a, d - c) for (a, b), (c, d) in taken))


def run_recorded(
    step: Step, clock: Clock, policy: Policy, min_nbytes: int, timer: Timer | None
) -> StepRecorder:
    """Runs a step once, inside a context of `policy`, and writes it down."""
    recorder = StepRecorder(clock, timer)
    with Saving(
        policy, min_nbytes=min_nbytes, context=Context(learns=False), recorder=recorder
    ) as saving:
        step()
    del saving
    return recorder


def check_saves(recorder: StepRecorder) -> None:
    """Raises PlanError if nothing was saved for backward."""
    if not recorder.storages():
        raise PlanError(
            "the step saves nothing for backward; it should run forward and backward, with "
            "parameters that require a gradient"
        )


def _sized(
    step: Step, device: torch.device, policy: Policy, min_nbytes: int, clock: StepClock
) -> tuple[StepRecorder, tuple[list[int], list[int]], int]:
    """The record, the levels of its moments, and what was held before."""
    gc.collect()  # unreachable tensors would be found, and may be freed within the step
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        static = torch.cuda.memory_allocated(device)
        counters = CudaMemory(device)
        both = Clocks(clock, counters)
        clock.stopwatch.start()
        recorder = run_recorded(step, both, policy, min_nbytes, clock.stopwatch)
        return recorder, counters.levels(), static
    held = LiveStorages(all_tensors(device.type))
    static = held.nbytes()
    marks = CpuMemory(held)
    Background.interrupt()
    allocations = Allocations()
    try:
        both = Clocks(clock, marks)
        clock.stopwatch.start()
        recorder = run_recorded(step, both, policy, min_nbytes, clock.stopwatch)
    finally:
        changes, named = allocations.stop()
    allocations.check()
    return recorder, marks.levels(curve_of(changes, named, device.type)), static


def _saved_the_same(one: StepRecorder, other: StepRecorder) -> bool:
    """Returns whether two runs saved the same, in the same order."""
    saved = [
        [[(save.site.name, storage.nbytes) for save in storage.saves] for storage in run.storages()]
        for run in (one, other)
    ]
    same = one.moments == other.moments and one.backward == other.backward
    return same and saved[0] == saved[1]


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
