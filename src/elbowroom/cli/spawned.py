"""Processes that a script starts by multiprocessing: each keeps to the budget.

    the script's process    mp.spawn(train, ...), Process(target=train).start()
                            ->  starts Followed(train, ...) in train's place
    each process            finds its own model, and writes down how it ended
    the script's process    reads that when the script has ended

A forked process inherits what `run` watches, and looks for models by that. A process that loads
data, serves a pool or is otherwise a part of Python's or torch's own machinery is left alone.
"""

import contextlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing

from elbowroom.fitting import Summary

_SPAWN: Any = sys.modules["torch.multiprocessing.spawn"]  # the package has a function of that name
_PACKAGE: Any = torch.multiprocessing
_POOLS = ("multiprocessing.pool", "concurrent.futures.process")
_MACHINERY = ("multiprocessing", "concurrent", "torch")


@dataclass(frozen=True)
class Ended:
    """How one process ended: its figures, and the exit code of a refusal, or 0."""

    told: list[Summary]
    code: int = 0


Trained = Callable[[Callable[[], object]], Ended]


@dataclass
class Followed:
    """Function that runs in each process in the place of the script's own.

    function  the script's
    trained   called with (the function without its arguments) -> how it ended
    folder    where that is written down
    """

    function: Callable[..., object]
    trained: Trained
    folder: Path

    def __call__(self, *args: Any) -> None:
        """Runs the script's function as `run` runs a script."""
        ended = self.trained(lambda: self.function(*args))
        part = self.folder / f"{time.time_ns():020d}-{os.getpid()}.part"
        with contextlib.suppress(FileNotFoundError):  # the script has ended, and nobody reads it
            part.write_bytes(pickle.dumps(ended))
            part.replace(part.with_suffix(".ended"))  # another one's refusal may stop this process
        if ended.code:
            sys.exit(ended.code)


@dataclass
class Processes:
    """Processes that a script has started, and how they ended.

    unseen    how many of them serve a pool, in which nothing is seen of what they train
    running   how many of those that are followed had not ended when the script had
    """

    unseen: int = 0
    running: int = 0
    ended: list[Ended] = field(default_factory=list)

    @property
    def told(self) -> list[Summary]:
        """The figures of all their models."""
        return [one for ended in self.ended for one in ended.told]

    @property
    def refusal(self) -> int:
        """The exit code of the first one that was refused its budget; 0 if none was."""
        return next((one.code for one in self.ended if one.code), 0)


@contextmanager
def following(trained: Trained, copied: Trained) -> Iterator[Processes]:
    """Runs what multiprocessing starts by `trained`, or by `copied` where it is forked.

    trained  must be possible to pickle
    """
    found = Processes()
    folders: list[Path] = []  # none until it is needed: a script that is killed leaves no folder
    own = os.getpid()
    followed: list[BaseProcess] = []
    plain_start, plain_process = _SPAWN.start_processes, BaseProcess.start

    def follow(function: Callable[..., object], method: str) -> Followed:
        if not folders:
            folders.append(Path(tempfile.mkdtemp(prefix="elbowroom-")))
        return Followed(function, copied if method == "fork" else trained, folders[0])

    def start_process(process: Any) -> None:
        origin = _origin(process)
        found.unseen += origin in _POOLS
        if origin == _SPAWN.__name__:  # its function is `Followed` already
            followed.append(process)
        elif origin.partition(".")[0] not in _MACHINERY:
            followed.append(process)
            method = process._start_method or multiprocessing.get_start_method()
            process.run = follow(partial(type(process).run, process), method)
        try:
            plain_process(process)
        finally:
            process.__dict__.pop("run", None)

    def start(
        fn: Callable[..., object],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        return plain_start(follow(fn, start_method), args, nprocs, join, daemon, start_method)

    _SPAWN.start_processes = _PACKAGE.start_processes = start
    BaseProcess.start = start_process  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        _SPAWN.start_processes = _PACKAGE.start_processes = plain_start
        BaseProcess.start = plain_process  # type: ignore[method-assign]
        if os.getpid() == own:  # else the script has forked itself, and this is the copy
            found.running = sum(one in followed for one in multiprocessing.active_children())
            for folder in folders:
                for path in sorted(folder.glob("*.ended")):
                    with path.open("rb") as file:
                        found.ended.append(pickle.load(file))
                shutil.rmtree(folder, ignore_errors=True)


def _origin(process: Any) -> str:
    """Returns the module of what a process runs: of its function, or of its own class."""
    runs = getattr(process, "_target", None) or type(process)
    return str(getattr(runs, "__module__", None) or "")
