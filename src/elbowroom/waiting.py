"""A line on the terminal for work that takes longer than two seconds: spinner, text, seconds.

The line is on stderr, if that is a terminal, and disappears when the work ends. There is one line
at a time: inside of another `waiting`, nothing is shown.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str], None]

AFTER_S = 2.0
_one = threading.Lock()


@contextmanager
def waiting(what: str) -> Iterator[Tell]:
    """Shows `what` on the terminal after 2 s, with the latest text that the given function got."""
    is_shown = sys.stderr is not None and sys.stderr.isatty() and _one.acquire(blocking=False)
    if not is_shown:
        yield lambda _: None
        return
    line = _ProgressLine(what)
    timer = threading.Timer(AFTER_S, line.show)
    timer.daemon = True
    timer.start()
    try:
        yield line.tell
    finally:
        timer.cancel()
        line.hide()
        _one.release()


class _ProgressLine:
    def __init__(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._lock, self._ended = threading.Lock(), False
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(file=sys.stderr), transient=True)
        self._what, self._task = what, self._bar.add_task(what)

    def tell(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._what}: {text}")

    def show(self) -> None:
        with self._lock:
            if not self._ended:
                self._bar.start()

    def hide(self) -> None:
        with self._lock:
            self._ended = True
            self._bar.stop()
