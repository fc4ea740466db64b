"""Share of the transfer time of offloaded tensors that is hidden behind computation.

    moved   seconds that workers spend writing and reading
    waited  seconds that a computing thread waits for them: before `put`, because too much is on its
            way out, and in `wait`, because what it reads is not back yet
    hidden  (moved - waited) / moved, at least 0

Counted for the process, over all tiers that write to a file; take the difference of two `now()`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Traffic:
    """Bytes that went over the link, and its seconds, so far or between two moments."""

    nbytes: int = 0
    moved_s: float = 0.0
    waited_s: float = 0.0

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(
            self.nbytes - earlier.nbytes,
            self.moved_s - earlier.moved_s,
            self.waited_s - earlier.waited_s,
        )

    @property
    def hidden_fraction(self) -> float | None:
        """The share of the transfer time without waiting; None: nothing moved."""
        if self.moved_s <= 0:
            return None
        return max(0.0, 1 - self.waited_s / self.moved_s)


class ThreadSeconds:
    """Clock that adds up seconds of several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = Traffic()

    def now(self) -> Traffic:
        """Returns all traffic so far."""
        return self._sum

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        """Counts the time inside this context as a worker's writing or reading of `nbytes`."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - start_s
            with self._lock:
                done = self._sum
                self._sum = replace(
                    done, nbytes=done.nbytes + nbytes, moved_s=done.moved_s + spent_s
                )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside this context as that of a computing thread that waits."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - start_s
            with self._lock:
                self._sum = replace(self._sum, waited_s=self._sum.waited_s + spent_s)


CLOCK = ThreadSeconds()
