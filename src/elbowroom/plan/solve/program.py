"""A linear program with whole numbers, written column by column and row by row; solved by HiGHS.

minimize cost . x    subject to    low <= A x <= high,    0 <= x <= upper,    some x whole
"""

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_FAILED = 4  # what scipy calls all that is neither an answer nor a proof nor a limit


@dataclass
class Program:
    """Columns (cost, upper, whole) and rows (terms, low, high), in the order they were added."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    _at: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _factors: list[float] = field(default_factory=list)

    def column(self, cost: float, *, upper: float = 1.0, whole: bool = False) -> int:
        """A new variable; gives its index."""
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(
        self, terms: Iterable[tuple[int, float]], *, low: float = -inf, high: float = inf
    ) -> None:
        """A new row: low <= sum of factor * x[column] <= high. A column may come twice."""
        for column, factor in terms:
            self._at.append(len(self.low))
            self._columns.append(column)
            self._factors.append(factor)
        self.low.append(low)
        self.high.append(high)

    def solve(
        self,
        *,
        relaxed: bool = False,
        fixed: Mapping[int, float] | None = None,
        gap: float = 0.0,
        limit_s: float = inf,
        nodes: int | None = None,
        dense: tuple[Vector, Sequence[float]] | None = None,
    ) -> Vector | None:
        """The best x, or None if there is none, or none was found in time.

        relaxed  all x may be fractions
        fixed    x that are given
        gap      relative, between what is found and what is proved
        nodes    of the search tree that are examined
        dense    further rows: factors [rows, columns], and their highest values
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # see check_solver
        from scipy.sparse import csr_array, vstack

        n = len(self.cost)
        if n == 0:  # rows without terms
            below = [*self.high, *(dense[1] if dense is not None else ())]
            return None if min(below, default=0.0) < 0 else np.zeros(0)
        low, high = np.zeros(n), np.array(self.upper)
        for column, value in (fixed or {}).items():
            low[column] = high[column] = value
        A = csr_array((self._factors, (self._at, self._columns)), shape=(len(self.low), n))
        lows, highs = list(self.low), list(self.high)
        if dense is not None:
            A = vstack([A, csr_array(dense[0])], format="csr")
            lows += [-inf] * len(dense[1])
            highs += dense[1]
        options: dict[str, float] = {"mip_rel_gap": gap}
        if nodes is not None:
            options["node_limit"] = nodes
        if limit_s < inf:
            options["time_limit"] = limit_s
        constraints = LinearConstraint(A, lows, highs) if lows else None
        # Without whole numbers, presolve takes as long as what is left to solve then (half of 184,
        # 188 and 119 ms, 12 to 25 programs each). With them, HiGHS 1.12's now and then ends in an
        # error.
        for presolve in (False, True) if relaxed else (True, False):
            with silent_stdout():
                answer = milp(
                    np.array(self.cost),
                    integrality=np.zeros(n) if relaxed else np.array(self.whole, float),
                    bounds=Bounds(low, high),
                    constraints=constraints,
                    options={**options, "presolve": presolve},
                )
            if answer.status != _FAILED:
                break
        return None if answer.x is None else np.asarray(answer.x)


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
