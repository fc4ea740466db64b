"""Processes that a script starts by multiprocessing: each keeps to the budget.

    the script's process    mp.spawn(train, ...), Process(target=train).start()
                            ->  starts Followed(train, ...) instead of train, with a pipe
    each process            finds its own model, and reports through the pipe how it ended
    the script's process    reads the reports when the script has ended

A forked process inherits the hooks by which `run` finds models. Processes that load data, serve a
pool or belong to Python's or torch's own machinery are left alone.

No files are used, so nothing is left behind if a process is killed. A process that calls `os._exit`
reports before that; a process that is killed reports nothing.
"""

import multiprocessing
import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from elbowroom.fitting import Summary

_SPAWN = "torch.multiprocessing.spawn"
_POOLS = ("multiprocessing.pool", "concurrent.futures.process")
_MACHINERY = ("multiprocessing", "concurrent", "torch")
_MAX_NBYTES = 60_000  # of a message: less than a pipe buffers before it is read


@dataclass(frozen=True)
class Ended:
    """How one process ended: its figures, and the exit code of a refusal, or 0."""

    summaries: list[Summary]
    code: int = 0


Tell = Callable[[Ended], None]
Trained = Callable[[Callable[[], object], Tell], int]


@dataclass
class Followed:
    """Function that runs in each process instead of the script's own function.

    function  the script's function
    trained   called with (the function without its arguments, `tell`) -> an exit code, or 0
    pipe      takes the report of how the process ended
    copied    of a forked process: the `Processes` of its parent, which it has inherited
    """

    function: Callable[..., object]
    trained: Trained
    pipe: Connection
    copied: "Processes | None" = None

    def __call__(self, *args: Any) -> None:
        """Runs the script's function as `run` runs a script."""
        if self.copied is not None:
            self.copied.forget()
        code = self.trained(lambda: self.function(*args), self._tell)
        if code:
            raise SystemExit(code)

    def _tell(self, ended: Ended) -> None:
        if self.copied is not None:
            self.copied.collect()
            ended = replace(ended, summaries=ended.summaries + self.copied.summaries)
        message = _packed(ended)
        if len(message) > _MAX_NBYTES:
            summaries = [replace(one, lines=()) for one in ended.summaries]
            message = _packed(replace(ended, summaries=summaries))
        with suppress(OSError):  # the script has ended, and nobody reads it
            self.pipe.send_bytes(message)
            self.pipe.close()


def _packed(ended: Ended) -> bytes:
    return zlib.compress(pickle.dumps((time.time_ns(), ended)))


@dataclass
class Processes:
    """Processes that a script has started, and how they ended.

    unseen    the number of processes of pools, whose trainings cannot be found
    running   the number of followed processes that had not ended when the script had
    silent    the number of processes that ended without a report: by an error, or killed
    """

    unseen: int = 0
    running: int = 0
    silent: int = 0
    _ended: list[tuple[int, Ended]] = field(default_factory=list)
    _followed: list[tuple[BaseProcess, Connection]] = field(default_factory=list)

    @property
    def ended(self) -> list[Ended]:
        """Reports in the order in which processes ended: the first refusal may stop others."""
        return [one for _, one in sorted(self._ended, key=lambda pair: pair[0])]

    @property
    def summaries(self) -> list[Summary]:
        """The figures of all their models."""
        return [one for ended in self.ended for one in ended.summaries]

    @property
    def refusal(self) -> int:
        """The exit code of the first one that was refused its budget; 0 if none was."""
        return next((one.code for one in self.ended if one.code), 0)

    def follow(self, process: BaseProcess, pipe: Connection) -> None:
        """Adds a process that was started, and the pipe of its report."""
        self.collect()  # a script may start thousands, one after another
        self._followed.append((process, pipe))

    def collect(self) -> None:
        """Reads the reports of processes that have ended; the pipes of others stay open."""
        waiting = []
        for process, pipe in self._followed:
            if not pipe.poll():
                waiting.append((process, pipe))
                continue
            with pipe:
                try:
                    self._ended.append(pickle.loads(zlib.decompress(pipe.recv_bytes())))
                except (EOFError, OSError):
                    self.silent += 1
        self._followed = waiting

    def end(self) -> None:
        """Reads all reports, and counts the processes that still run."""
        active = multiprocessing.active_children()
        self.running = sum(one in active for one, _ in self._followed)
        self.collect()
        self.forget_pipes()

    def forget(self) -> None:
        """Forgets the parent's processes in a forked copy: the parent reads their reports."""
        self._ended.clear()
        self.unseen = self.running = self.silent = 0
        self.forget_pipes()

    def forget_pipes(self) -> None:
        for _, pipe in self._followed:
            pipe.close()
        self._followed.clear()


@contextmanager
def following(trained: Trained, copied: Trained) -> Iterator[Processes]:
    """Runs what multiprocessing starts by `trained`, or by `copied` where it is forked.

    trained  must be possible to pickle
    """
    found = Processes()
    own = os.getpid()
    plain_start = BaseProcess.start

    def start(process: Any) -> None:
        origin = _origin(process)
        found.unseen += origin in _POOLS
        is_spawns = origin == _SPAWN
        if not is_spawns and origin.partition(".")[0] in _MACHINERY:
            plain_start(process)
            return
        method = process._start_method or multiprocessing.get_start_method()
        is_copy = method == "fork"
        read, write = multiprocessing.Pipe(duplex=False)
        follow = partial(
            Followed,
            trained=copied if is_copy else trained,
            pipe=write,
            copied=found if is_copy else None,
        )
        if is_spawns:  # a function of torch's own, which writes errors down, calls the script's
            process._args = (follow(process._args[0]), *process._args[1:])
        else:
            process.run = follow(partial(type(process).run, process))
        try:
            plain_start(process)
        except BaseException:  # an interrupt, too: nobody would close this end of the pipe
            read.close()
            raise
        finally:
            write.close()
            process.__dict__.pop("run", None)
        found.follow(process, read)

    BaseProcess.start = start  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        BaseProcess.start = plain_start  # type: ignore[method-assign]
        if os.getpid() == own:  # else the script has forked itself, and this is the copy
            found.end()


@contextmanager
def before_exit(act: Callable[[int], int]) -> Iterator[None]:
    """Calls `act` before `os._exit` ends this process from its main thread.

    act: called with the exit code; returns the one to end with
    """
    own, plain = os.getpid(), os._exit

    def leave(status: int) -> None:
        try:
            if os.getpid() == own and threading.current_thread() is threading.main_thread():
                os._exit = plain
                status = act(status)
        finally:
            plain(status)

    os._exit = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        if os._exit is leave:  # else other code has replaced it since
            os._exit = plain


def _origin(process: Any) -> str:
    """Returns the module of what a process runs: of its function, or of its own class."""
    runs = getattr(process, "_target", None) or type(process)
    return str(getattr(runs, "__module__", None) or "")
