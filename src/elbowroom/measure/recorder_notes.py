"""Notes that a recorder takes of storages, ops and calls of modules, and interfaces of its clocks.

`Storage` and `ModuleCall` of a profile are made of these when the step is over (`recorder.py`).
"""

import os
import sys
import types
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from elbowroom.plan import Need
from elbowroom.plan.profile import Save
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.storage import WeakStorage


class Timer(Protocol):
    """Tells how long ops and modules take (`clocks.Stopwatch`)."""

    def read(self) -> int:
        """Returns the number of a new reading."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context in which no time passes."""
        ...

    def seconds_at(self, readings: Sequence[int]) -> list[float]:
        """Returns the seconds at these readings, when the step is over."""
        ...


class Clock(Protocol):
    """Interface of what measures each moment, from its beginning on."""

    def begin(self, moment: int, *, frees: bool = False) -> None:
        """Begins a moment.

        frees: memory that is about to be freed belongs to the moment before
        """
        ...


@dataclass
class StorageNotes:
    """Notes on one saved storage; `plan.profile.Storage` explains most fields."""

    nbytes: int
    born: int
    used: int
    saves: list[Save] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    freed: int | None = None
    held: int = 0
    kept: bool = True
    made: "Made | None" = None
    asked: dict[int, int] = field(default_factory=dict)  # by save, the last moment
    made_of: set[int] = field(default_factory=set)  # storages, by index
    nodes: list[int] = field(default_factory=list)  # of each save, autograd's number of its node

    def ask(self, save: int, moment: int) -> None:
        """Notes that backward asks for it in this moment, for one of its saves."""
        self.asked[save] = moment
        if not self.needs or self.needs[-1] != moment:
            self.needs.append(moment)

    @property
    def is_lost(self) -> bool:
        """True if nothing can be made of it, since only its signs or its shape are saved."""
        return all(save.site.need in (Need.MASK, Need.SHAPE) for save in self.saves)


class UserStorage(NamedTuple):
    """Storage that the user holds, a local variable of forward, say; what the slot holds apart.

    weak    the storage itself
    slot    what is held for it
    record  what is noted of it
    """

    weak: WeakStorage
    slot: weakref.ref[Slot]
    record: StorageNotes


Span = tuple[int, int]  # readings of the timer as an op began and ended


class Made(NamedTuple):
    """Record of what an op made, and of what must run again to make it of what is saved.

    spans    of this op, and of the ops between what is saved and this one
    modules  that run these ops
    """

    spans: tuple[Span, ...] = ()
    modules: tuple[str, ...] = ()


NOBODY = Made()
MAX_SPANS = 16  # ops; no recipe is as long (`handles/rebuild.py`)


@dataclass
class ModuleNotes:
    """Notes on one call of a module; `plan.profile.ModuleCall` explains most fields."""

    name: str
    kind: str
    first: int
    inputs: tuple[int, ...] = ()
    extra_nbytes: int = 0
    last: int = 0
    began: int = 0
    ended: int = 0
    why_not: str = ""
    sources: tuple[int, ...] = ()
    made_nbytes: int = 0
    rough: str = ""
    loses: bool = False  # a gradient, as in `checkpoints.loses_gradient`


_OURS = str(Path(__file__).parents[1]) + os.sep
_DEMO = os.path.join(_OURS, "demo") + os.sep  # a program like any other
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.__file__)
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def calling_line() -> str:
    """Returns "train.py:12", the innermost frame outside of torch, elbowroom and Python; or ""."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not is_of_a_library(path):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(4096)  # it is asked of each frame around each saved tensor
def is_of_a_library(path: str) -> bool:
    """Returns whether a file belongs to torch, to Python itself or to elbowroom."""
    if path.startswith("<"):
        return True
    if path.startswith(_OURS):
        return not path.startswith(_DEMO)
    if path.startswith(_LIBRARIES[0]):
        return True
    # Other packages lie below Python's own library, and their lines are worth knowing.
    return path.startswith(_LIBRARIES[1]) and not any(part in path for part in _PACKAGES)
