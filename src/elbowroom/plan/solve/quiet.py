"""Keep what a C library prints out of the program's output."""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()  # two at once would put back each other's


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Inside, file descriptor 1 is that of stderr.

    HiGHS 1.12 (in scipy 1.17) prints a line of its own whenever a heuristic's answer has to be
    polished, whatever its log options say: it would stand in the middle of a program's results, or
    of JSON. What another thread prints meanwhile is not lost. Does nothing where descriptors 1 and
    2 are not open.
    """
    with _LOCK:
        try:
            os.fstat(2)
            before = os.dup(1)
        except OSError:
            yield
            return
        if sys.stdout is not None:
            sys.stdout.flush()
        os.dup2(2, 1)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)  # C's own buffer, before it is the program's again
            os.dup2(before, 1)
            os.close(before)
