"""The file tier: one unlinked file per process and directory; threads write and read it.

    put:    window -> extent -> a worker writes, with a checksum -> a later `put` lets it go
    fetch:  a worker reads into memory of the caller's, and compares the checksum

1. During a write, the ticket holds the tensor, and `source` returns it: a tensor that backward
   needs early is never read back. It is released by the thread that puts, not by a worker, whose
   frees torch's profiler does not see (so `er.peak` would count them as held).
2. If a write fails, its tensor stays in memory: nothing is lost, this is logged once, and nothing
   more is put until all present bytes have been dropped.
3. `drop` may come from `__del__`, anywhere: it takes no lock that its own thread may hold. An
   action that must happen once (write or cancel, free an extent) is taken by the thread that pops a
   token from a list.
4. A forked child reads the parent's extents by itself, and frees none. Its own go to a new file.
5. An empty file is truncated: the disk space is free between steps, and pages that the system has
   not written yet never reach the disk.

Written bytes first stay in the system's page cache, which the system reclaims when memory is
needed; until then reading them again costs a copy.
"""

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from torch import Tensor

from elbowroom.errors import PlanError
from elbowroom.runtime.tiers import unlinked
from elbowroom.runtime.tiers.extents import Extents
from elbowroom.runtime.tiers.traffic import CLOCK
from elbowroom.runtime.tiers.window import RoomGate
from elbowroom.runtime.tiers.workers import WORKERS
from elbowroom.units import show_nbytes


class FileTier:
    """Bytes in one file. `file_tier` (choose.py) gives the one of a directory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.window = RoomGate()
        try:
            self.descriptor = unlinked.open_unlinked(directory)
        except OSError as error:
            raise PlanError(
                f"offload: no file can be made in '{directory}' ({error.strerror or error}); "
                "name another place, as in er.saving('offload', directory='/var/tmp')"
            ) from error
        self._lock = threading.Lock()
        self._extents = Extents()
        self._dropped: deque[tuple[int, int]] = deque()
        self._written: deque[FileTicket] = deque()
        self._trouble = ""
        self._untold: str | None = ""  # None: it was logged already
        if unlinked.is_in_memory(self.descriptor):
            warnings.warn(
                f"offload: '{directory}' lies in memory (tmpfs): what is moved there frees none. "
                "Name a directory on a disk, as in er.saving('offload', directory='/var/tmp').",
                stacklevel=2,
            )

    def __del__(self) -> None:
        descriptor, self.descriptor = getattr(self, "descriptor", -1), -1
        if descriptor >= 0:  # in a cycle that dies, tickets may drop theirs after this
            os.close(descriptor)

    @property
    def end(self) -> int:
        """Offset at which the last taken part of the file ends."""
        return self._extents.end

    @property
    def refusal(self) -> str:
        return self._trouble

    def put(self, flat: Tensor, before: Callable[[], None] | None = None) -> "FileTicket":
        """Has a worker write `flat` to the file; returns a ticket for it.

        before: the worker's first action, such as waiting until `flat` is filled
        """
        WORKERS.start()
        nbytes = flat.numel()
        self._let_go()
        with CLOCK.waiting():
            self.window.enter(nbytes)
        self._let_go()
        with self._lock:
            offset = self._extents.take(nbytes)
        self._collect()
        assert offset is not None  # a file has no limit of ours
        ticket = FileTicket(self, flat, offset, before)
        WORKERS.submit(ticket.write)
        return ticket

    def flush(self) -> None:
        """Waits until nothing is on its way to the file."""
        self.window.wait_until_empty()
        self._let_go()

    def written(self, ticket: "FileTicket") -> None:
        """Notes that a ticket was written; its tensor may be released. Called by a worker."""
        self._written.append(ticket)

    def _let_go(self) -> None:
        while self._written:
            with suppress(IndexError):  # another thread was faster
                self._written.popleft().let_go()

    def say_trouble(self) -> None:
        if self._untold:
            untold, self._untold = self._untold, None
            warnings.warn(untold, stacklevel=2)

    def failed(self, error: Exception, nbytes: int) -> None:
        """Notes that a write of so many bytes failed."""
        reason = getattr(error, "strerror", None) or error
        why = f"writing {show_nbytes(nbytes)} to '{self.directory}' failed: {reason}"
        if self._untold == "":
            self._untold = (
                f"offload: {why}. What could not be written stays in memory, and nothing more is "
                "moved until the file is empty again. Make room, or name another directory=."
            )
        self._trouble = f"offload: {why}"

    def give_back(self, offset: int, nbytes: int) -> None:
        """Frees an extent. Rule 3."""
        self._dropped.append((offset, nbytes))
        self._collect()

    def _collect(self) -> None:
        """Frees what was dropped. A thread that finds the lock taken leaves this to its owner."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    self._extents.give_back(*self._dropped.popleft())
                is_empty = not self._extents.end
            finally:
                self._lock.release()
            if is_empty:
                self._trouble = ""
                WORKERS.submit(self._truncate)

    def _truncate(self) -> None:
        with self._lock:
            if not self._extents.end:
                with suppress(OSError):  # then the space comes back when the process ends
                    os.ftruncate(self.descriptor, 0)
        self._collect()  # what was dropped meanwhile


class FileTicket:
    """One extent of a file; before that, the tensor that goes there."""

    def __init__(
        self, tier: FileTier, flat: Tensor, offset: int, before: Callable[[], None] | None
    ) -> None:
        self._tier = tier
        self._before = before
        self._offset, self._nbytes = offset, flat.numel()
        self._checksum = 0
        self._pid = os.getpid()
        self._to_write = [True]  # who pops it writes, or cancels
        self._to_free = [True]  # who pops it frees the extent
        self._call: Callable[[], None] | None = None
        self._is_dropped = self._is_written = False
        self.source: Tensor | None = flat

    def write(self) -> None:
        """Writes the bytes, as a worker's job."""
        if not _pop(self._to_write):
            return
        assert self.source is not None
        before, self._before = self._before, None  # it may hold who holds us
        try:
            if before is not None:
                before()
            with CLOCK.moving(self._nbytes):
                self._checksum = unlinked.write(self._tier.descriptor, self.source, self._offset)
        except Exception as error:  # any exception: it would be lost otherwise
            self._tier.failed(error, self._nbytes)
            self._free()
        else:
            self._is_written = True
            self._tier.written(self)
        if self._is_dropped:
            self._release()
        self._tier.window.leave(self._nbytes)  # last: all is freed once the window is empty

    def let_go(self) -> None:
        """Releases the tensor, which is written."""
        self.source = None
        call = self._call  # dropping forgets it, at any time
        if call is not None:
            call()

    def fetch(self, into: Tensor) -> "PendingRead":
        reading = PendingRead(partial(self._read, into))
        if self._pid == os.getpid():
            WORKERS.submit(reading.run)
        else:
            reading.run()  # rule 4
        return reading

    def when_away(self, call: Callable[[], None]) -> None:
        self._call = call
        if self.source is None:
            call()

    def drop(self) -> None:
        if self._pid != os.getpid():
            return
        self._is_dropped = True
        self._call = None
        if _pop(self._to_write):
            self._release()
            self._tier.window.leave(self._nbytes)
        elif self._is_written:
            self._release()
        # else it is being written, and its worker sees that it was dropped, or it stays in memory

    def _release(self) -> None:
        self.source = self._before = None
        self._free()

    def _free(self) -> None:
        if _pop(self._to_free):
            self._tier.give_back(self._offset, self._nbytes)

    def _read(self, into: Tensor) -> None:
        with CLOCK.moving(self._nbytes):
            found = unlinked.read(self._tier.descriptor, into, self._offset)
        if found != self._checksum:
            raise OSError("the checksum differs: what lies in the file is not what was written")


class PendingRead:
    """A read on its way."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read
        self._pid = os.getpid()
        self._done = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Reads the bytes, as a worker's job."""
        try:
            self._read()
        except Exception as error:  # re-raised by the waiting thread
            self._error = error.with_traceback(None)  # its frames hold memory
        self._done.set()

    def wait(self) -> None:
        if self._pid != os.getpid():
            self._read()  # rule 4: the worker that would have done it is the parent's
            return
        with CLOCK.waiting():
            self._done.wait()
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """Does nothing: the worker holds the memory that it reads into until it has."""


def _pop(token: list[bool]) -> bool:
    try:
        return token.pop()
    except IndexError:
        return False
