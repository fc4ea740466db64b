"""The tracer's notes of a forward, from which the writer makes a script.

NotedOp    one call from Python to torch, and what it saves (`NotedSave`)
NotedInstruction  an action on a slot, and its time
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from elbowroom.plan import Action, Need, SiteName
from elbowroom.runtime.consumers import Levels
from elbowroom.runtime.direct import Direct
from elbowroom.runtime.handles.rebuild import Op, Ready
from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.replay.script import Like
from elbowroom.runtime.slot import Geometry, Slot, View

Place = tuple[int, int]  # a storage's address, and its version
Makers = dict[int, tuple["weakref.ref[Op]", int]]  # of recipes, by the id of their op
AT_SAVE, BEFORE, AFTER, LAST = range(4)


class Unwritable(Exception):
    """Raised if there is no script of this forward; the message says why."""


class OnceUnwritable(Unwritable):
    """Raised if there is no script of this forward, but maybe of the next."""


class Seen(NamedTuple):
    """A view that has been there, of a slot that still is."""

    slot: Slot
    need: Need


@dataclass
class NotedSave:
    """One tensor that was saved.

    held  what autograd holds of it
    seen  its slot, and what its op needs, once that has ended: a result that nobody reads takes
          its node, and what that holds, with it
    """

    geometry: Geometry
    dtype: torch.dtype
    nbytes: int
    at: Place
    held: weakref.ref[View | Deferred] | None
    seen: tuple[weakref.ref[Slot], Need] | None = None

    @property
    def view(self) -> View | Seen | None:
        """The view, be it there or gone; None: it has no slot, or its slot is gone."""
        held = None if self.held is None else self.held()
        if isinstance(held, Deferred):
            held = held.held if isinstance(held.held, View) else None
        if held is not None or self.seen is None:
            return held
        slot = self.seen[0]()
        return None if slot is None else Seen(slot, self.seen[1])


@dataclass
class NotedOp:
    """One call from Python to torch."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: list[Place]
    saves: list[NotedSave] = field(default_factory=list)
    run: Callable[..., Any] | None = None
    direct: Direct | None = None
    opens: bool = False
    out: Place | None = None
    levels: Levels | None = None
    module: weakref.ref[nn.Module] | None = None
    copies: list[tuple[int, weakref.ref[Slot]]] = field(default_factory=list)
    compared: bool = False
    is_between: bool = False  # no call, but what is saved between two
    numel: int = 0  # of all that it has saved

    @property
    def addresses(self) -> Iterator[int]:
        """Addresses of the parameters among the arguments."""
        for x in (*self.args, *(value for _, value in self.kwargs)):
            if type(x) is Like and x.parameter is not None:
                yield x.address


class NotedNorm(NamedTuple):
    """Places of the statistics that something was normalized with."""

    mean: tuple[Place, Geometry]
    rstd: tuple[Place, Geometry]
    inner: int
    rows: int


class NotedInstruction(NamedTuple):
    """An action on a slot, and its time; `Instruction` explains the fields."""

    op: int
    when: int
    save: int
    slot: weakref.ref[Slot]
    name: SiteName
    need: Need
    action: Action | None
    bits: str
    covers: bool
    draw: int
    ready: weakref.ref[Ready] | None
    norm: NotedNorm | None


def made_of(each: list[Any], x: Any) -> Any:
    """A tuple or list of these, of x's type: x itself if it cannot change.

    Identity is compared first, and is usually true.
    """
    stays = type(x) is tuple and all(map(operator.is_, each, x))
    return x if stays else type(x)(each)
