"""Keep what a C library prints out of the program's output."""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LIBC = ctypes.CDLL(None if os.name == "posix" else "msvcrt")
_LOCK = threading.Lock()  # two at once would put back each other's


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Inside, file descriptor 1 is that of stderr.

    HiGHS 1.12 (in scipy 1.17) prints a line of its own whenever a heuristic's answer has to be
    polished, whatever its log options say: it would stand in the middle of a program's results, or
    of JSON. What another thread prints meanwhile, and a process that it starts, goes to stderr.
    Does nothing where descriptors 1 and 2 are not open.
    """
    with _LOCK:
        try:
            os.fstat(2)
            before = os.dup(1)
        except OSError:
            yield
            return
        try:
            _flush()
            os.dup2(2, 1)
            yield
        finally:
            _LIBC.fflush(None)
            os.dup2(before, 1)
            os.close(before)


def _flush() -> None:
    """What the program has printed so far, by Python or by C, belongs where it was printed to."""
    with suppress(Exception):  # somebody's own stdout, which may be closed, or not a file
        sys.stdout.flush()
    _LIBC.fflush(None)
