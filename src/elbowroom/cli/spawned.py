"""Processes that a script starts by torch.multiprocessing.spawn: each keeps to the budget.

    the script's process    mp.spawn(train, ...)  ->  starts Spawned(train, ...) in train's place
    each process            finds its own model, and writes down how it ended
    the script's process    reads that when the script has ended

A forked process inherits what `run` watches, and needs none of this.
"""

import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing

from elbowroom.fitting import Summary

_SPAWN: Any = sys.modules["torch.multiprocessing.spawn"]  # the package has a function of that name
_PACKAGE: Any = torch.multiprocessing


@dataclass(frozen=True)
class Ended:
    """How one process ended: its figures, and the exit code of a refusal, or 0."""

    told: list[Summary]
    code: int = 0


@dataclass
class Spawned:
    """Function that runs in each process in the place of the script's own.

    function  the script's
    trained   called with (the function without its arguments, rank) -> how it ended
    folder    where that is written down
    """

    function: Callable[..., object]
    trained: Callable[[Callable[[], object]], Ended]
    folder: Path

    def __call__(self, rank: int, *args: Any) -> None:
        """Runs the script's function as `run` runs a script."""
        ended = self.trained(lambda: self.function(rank, *args))
        part = self.folder / f"{rank:06d}.part"
        part.write_bytes(pickle.dumps(ended))
        part.replace(part.with_suffix(".ended"))  # another one's refusal may stop this process
        if ended.code:
            sys.exit(ended.code)


@dataclass
class Processes:
    """Processes that a script has started, and how they ended.

    started  how many of them are no copy of the script's process, so that nothing is seen of them
             but by `Spawned`
    """

    started: int = 0
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
def following(trained: Callable[[Callable[[], object]], Ended]) -> Iterator[Processes]:
    """Runs what torch.multiprocessing spawns by `trained`, which must be possible to pickle."""
    found = Processes()
    with tempfile.TemporaryDirectory(prefix="elbowroom-") as name:
        folder, count = Path(name), 0

        plain_start, plain_process = _SPAWN.start_processes, BaseProcess.start

        def start_process(process: Any) -> None:
            if getattr(process, "_start_method", None) != "fork":
                found.started += 1
            plain_process(process)

        def start(
            fn: Callable[..., object],
            args: tuple[Any, ...] = (),
            nprocs: int = 1,
            join: bool = True,
            daemon: bool = False,
            start_method: str = "spawn",
        ) -> Any:
            nonlocal count
            if start_method != "fork":
                count += 1
                own = folder / f"{count:06d}"
                own.mkdir()
                fn = Spawned(fn, trained, own)
            return plain_start(fn, args, nprocs, join, daemon, start_method)

        _SPAWN.start_processes = _PACKAGE.start_processes = start
        BaseProcess.start = start_process  # type: ignore[method-assign, assignment]
        try:
            yield found
        finally:
            _SPAWN.start_processes = _PACKAGE.start_processes = plain_start
            BaseProcess.start = plain_process  # type: ignore[method-assign]
            for path in sorted(folder.glob("*/*.ended")):
                with path.open("rb") as file:
                    found.ended.append(pickle.load(file))
