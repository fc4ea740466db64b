"""Keeps what a C library prints out of the program's output."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()  # two at once would put back each other's
_NOISE = b"HighsMipSolverData::"  # how the lines begin that are HiGHS's


@contextmanager
def silent_stdout() -> Iterator[None]:
    """Keeps what HiGHS prints out of stdout, and nothing else.

    HiGHS 1.12 (in scipy 1.17) prints a line of its own, by C's `printf`, whenever a heuristic's
    answer has to be polished, whatever its log options say: it would stand in the middle of a
    program's results, or of JSON. File descriptors are left alone, since other threads and child
    processes write to them, and so does Python: it is C's `stdout` that points to a buffer in
    memory meanwhile. What other C code has printed into it is printed afterwards. Does nothing
    where the C library has no such variable (it is glibc's and musl's).
    """
    with _LOCK:
        if _buffer is None:
            yield
            return
        before, _buffer.stdout.value = _buffer.stdout.value, _buffer.file
        try:
            yield
        finally:
            _buffer.stdout.value = before
            _print(line for line in _buffer.taken() if not line.startswith(_NOISE))


def _print(lines: Iterator[bytes]) -> None:
    text = b"".join(lines)
    if text:
        _libc.fwrite(text, 1, len(text), ctypes.c_void_p(_buffer.stdout.value if _buffer else None))


class _Buffer:
    """A stream of C's into memory. It is never closed: another thread may be printing to it.

    file    the stream
    stdout  C's variable
    """

    def __init__(self, libc: ctypes.CDLL) -> None:
        """Raises ValueError or AttributeError where the C library lacks any of these."""
        self._libc = libc
        self.stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        self._text, self._size = ctypes.c_void_p(), ctypes.c_size_t()
        libc.open_memstream.restype = ctypes.c_void_p
        self.file = libc.open_memstream(ctypes.byref(self._text), ctypes.byref(self._size))
        if not self.file:
            raise ValueError("there is no memory for a stream")

    def taken(self) -> list[bytes]:
        """The lines that were printed since the last time."""
        file = ctypes.c_void_p(self.file)
        self._libc.fflush(file)
        text = ctypes.string_at(self._text.value or 0, self._size.value) if self._text else b""
        self._libc.fseek(file, ctypes.c_long(0), 0)
        return text.splitlines(keepends=True)


def _new_buffer() -> _Buffer | None:
    try:
        return _Buffer(_libc)
    except (AttributeError, ValueError):
        return None


_libc = ctypes.CDLL(None if os.name == "posix" else "msvcrt")
_libc.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
_buffer = _new_buffer()
