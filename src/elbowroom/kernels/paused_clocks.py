"""Clocks that stand still while a kernel is loaded or compiled for the first time.

A backend is imported when the first op asks for it, and numba compiles a loop, or loads it from
disk, when it is first called. That takes from a tenth of a second to several, in the middle of a
module that takes milliseconds: in a profile, to run this module again would seem a thousand times
as dear as it is. So clocks of steps stand still meanwhile.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol
from weakref import WeakSet


class Pausable(Protocol):
    """A clock that can stand still (`measure.clocks.Stopwatch`)."""

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context in which no time counts."""


class _Thread(threading.local):
    """The clocks of this thread: another one's step does not wait for what this one compiles."""

    def __init__(self) -> None:
        self.all: WeakSet[Pausable] = WeakSet()


_clocks = _Thread()


def watch(clock: Pausable) -> None:
    """Lets a clock stand still during first uses on this thread, as long as it exists."""
    _clocks.all.add(clock)


@contextmanager
def uncounted() -> Iterator[None]:
    """Returns a context around a first use, which no clock of this thread counts."""
    with ExitStack() as pauses:
        for clock in tuple(_clocks.all):
            pauses.enter_context(clock.paused())
        yield
