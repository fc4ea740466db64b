"""A clock for settled steps."""

from elbowroom.measure.clocks import Undisturbed

_STEPS = 6  # that are timed of each plan: the least of them counts


class StepTimer:
    """Times settled steps, from the first forward of one to that of the next.

    counts  the step that runs is settled, and so far like the one before it
    """

    def __init__(self) -> None:
        self._clock, self._began_s = Undisturbed(), 0.0
        self._taken_s: list[float] = []
        self.counts = False

    def tick(self) -> float | None:
        """Begins a step; returns the seconds of one, once enough have ended."""
        now_s = self._clock.now_s()
        if self.counts:
            self._taken_s.append(now_s - self._began_s)
        self._began_s, self.counts = now_s, False
        return min(self._taken_s) if len(self._taken_s) >= _STEPS else None
