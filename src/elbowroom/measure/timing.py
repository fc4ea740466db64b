"""Measures which of two steps is faster, and by how much, on a machine that is never idle.

    pair i = (a_i, b_i), run one right after the other, the order swapped from pair to pair
    ratio  = median of b_i / a_i,   spread = its quartiles

A drift of the clock or another process hits both halves of a pair alike, so the ratio of a pair
varies far less than the quotient of two averages taken minutes apart. Swapping the order cancels
the advantage of the second run, whose caches are warm.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from elbowroom.measure.clocks import Undisturbed


@dataclass(frozen=True)
class Paired:
    """Seconds of step a and step b, pair by pair."""

    a_s: tuple[float, ...]
    b_s: tuple[float, ...]

    @property
    def n(self) -> int:
        """The number of pairs."""
        return len(self.a_s)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Per pair b / a: above 1, b is slower."""
        return tuple(b_s / a_s for a_s, b_s in zip(self.a_s, self.b_s, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return _median(self.ratios)

    @property
    def ratio_iqr(self) -> tuple[float, float]:
        """The lower and upper quartile of the ratios."""
        if self.n < 2:
            return self.ratio, self.ratio
        lower, upper = np.quantile(self.ratios, (0.25, 0.75))
        return float(lower), float(upper)

    @property
    def median_a_s(self) -> float:
        """The median of a, in seconds."""
        return _median(self.a_s)

    @property
    def median_b_s(self) -> float:
        """The median of b, in seconds."""
        return _median(self.b_s)


def _median(values: tuple[float, ...]) -> float:
    return float(np.median(values))


def paired(
    a: Callable[[], object],
    b: Callable[[], object],
    *,
    pairs: int = 10,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    on_pair: Callable[[int], object] | None = None,
) -> Paired:
    """Time a and b in `pairs` interleaved pairs, after `warmup` untimed runs of each.

    `on_pair` is called after each pair with the number of pairs done, for a progress bar.
    """
    if pairs < 1 or warmup < 0:
        raise ValueError(f"paired needs pairs >= 1 and warmup >= 0; got {pairs} and {warmup}")
    for _ in range(warmup):
        a()
        b()
    a_s: list[float] = []
    b_s: list[float] = []
    for pair in range(pairs):
        if pair % 2 == 0:
            a_s.append(_seconds(a, clock))
            b_s.append(_seconds(b, clock))
        else:
            b_s.append(_seconds(b, clock))
            a_s.append(_seconds(a, clock))
        if on_pair is not None:
            on_pair(pair + 1)
    return Paired(tuple(a_s), tuple(b_s))


def _seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds that one run takes, until the device is done if one is in use."""
    _wait()
    start_s = clock()
    step()
    _wait()
    return clock() - start_s


def _wait() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


_QUEUEING_CYCLES = 4_000_000  # of a GPU: about 2 ms, in which a host queues about 100 launches


def least_s(run: Callable[[], object], device: torch.device) -> float:
    """Returns the least seconds of five runs, after one that warms up.

    This is for a rate, not for a comparison: the time that other processes take is left out.
    """
    run()
    least = float("inf")
    for _ in range(5):
        start_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        least = min(least, time.perf_counter() - start_s)
    return least


def busy_s(run: Callable[[], object], device: torch.device) -> float:
    """Returns the least seconds for which five runs, after a first one, keep the device busy.

    On a GPU, launches are queued behind other work before the first of them begins, so that the
    speed of the host is not part of it. Elsewhere as `least_s`.
    """
    if device.type != "cuda":
        return least_s(run, device)
    run()
    least = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            torch.cuda._sleep(_QUEUEING_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            run()
            end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / 1000)
    return least


def typical_s(
    run: Callable[[], object], between: Callable[[], object], device: torch.device
) -> float:
    """Returns the median seconds of seven runs, after one that warms up, with other work between.

    This is for a cost in a step, where neither code nor data is in the nearest caches.
    """
    run()
    taken = []
    for _ in range(7):
        between()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock = Undisturbed()
        made = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(clock.now_s())
        del made
    return _median(tuple(taken))
