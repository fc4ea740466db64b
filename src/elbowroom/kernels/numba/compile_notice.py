"""The first call of a loop says once that loops are compiled, and no clock counts what it takes.

numba compiles a loop when it is first called with arguments of a kind, and keeps the machine code
on disk, so an installation waits once; without a line, a first run looks as if it hung. Nothing is
said of what is loaded from there, nor of less than `UNNOTICED_S` in all. The events are numba's own
(numba.core.event): "compile" is sent under its lock, and "compiler_lock" of what is loaded, too.
"""

import logging
import threading
import time
from contextlib import ExitStack
from typing import Any

from numba.core import event as events

from elbowroom.kernels.paused_clocks import uncounted

_log = logging.getLogger("elbowroom.kernels")
UNNOTICED_S = 3.0
_OURS = __name__.rpartition(".")[0]


class CompileNotice(events.Listener):  # type: ignore[misc]  # numba has no types
    """Adds up the seconds in which loops of ours are compiled, until they are worth a line."""

    def __init__(self) -> None:
        self._depth = 0  # a loop is compiled inside of the one that calls it
        self._began_s = 0.0
        self._earlier_s = 0.0
        self._is_said = False

    def on_start(self, event: Any) -> None:
        """Called when a loop, or what it calls, is about to be compiled."""
        if not self._depth:
            if not event.data["dispatcher"].py_func.__module__.startswith(_OURS):
                return
            self._began_s = time.perf_counter()
        self._depth += 1
        taken_s = self._earlier_s + time.perf_counter() - self._began_s
        if taken_s > UNNOTICED_S and not self._is_said:
            self._is_said = True
            _log.warning(
                "compiling kernels for this CPU, each once for this installation: up to a minute "
                "in all. `elbowroom doctor --compile` does it in advance"
            )

    def on_end(self, event: Any) -> None:
        """Called when it was compiled, or could not be."""
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._earlier_s += time.perf_counter() - self._began_s


class Uncounted(threading.local, events.Listener):  # type: ignore[misc]  # numba has no types
    """Stops the clocks of a thread while it compiles or loads a loop, or waits for the lock."""

    def __init__(self) -> None:
        self._depth = 0
        self._pauses = ExitStack()

    def on_start(self, event: Any) -> None:
        """Called before numba's lock is taken, on the thread that takes it."""
        if not self._depth:
            self._pauses.enter_context(uncounted())
        self._depth += 1

    def on_end(self, event: Any) -> None:
        """Called after the lock was given back."""
        self._depth = max(self._depth - 1, 0)  # it may have been taken before we listened
        if not self._depth:
            self._pauses.close()


events.register("numba:compile", CompileNotice())
events.register("numba:compiler_lock", Uncounted())
