"""The tracer's notes of a forward, from which the writer makes a script.

NotedOp    one call from Python to torch, and what it saves (`NotedSave`)
NotedInstruction  an action on a slot, and its time
Trace      the slot, or what is left of one that has ended (`Remains`)

A graph may end before its forward does: what a quantization cuts off lives as long as a variable of
the model's. Its slots are gone when the script is written, but what was done with them is not: a
step that did not do it would hold more than the one that was measured.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elbowroom.plan import Action, Need, SiteName
from elbowroom.runtime.consumers import Levels
from elbowroom.runtime.direct import Direct
from elbowroom.runtime.handles import EncodeHandle, KeepHandle
from elbowroom.runtime.handles.rebuild import Op, Ready
from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.ledger import Entry, NoEntry
from elbowroom.runtime.replay.script import NOWHERE, Like
from elbowroom.runtime.slot import Geometry, Slot, View

Place = tuple[int, int]  # a storage's address, and its version
AT_SAVE, BEFORE, AFTER, LAST = range(4)


class Unwritable(Exception):
    """Raised if there is no script of this forward; the message says why."""


class OnceUnwritable(Unwritable):
    """Raised if there is no script of this forward, but maybe of the next."""


@dataclass(frozen=True, eq=False)
class Remains:
    """Describes a slot, which may have ended, as far as the writer of a script needs it.

    Of a recipe the bits are held, and nothing else that takes memory.

    kind    of its value
    bits    address of the bits of a mask; 0: it has none. brings: they are those of its code
    is_raw  a lossy codec holds it exactly
    recipe  of what is rebuilt, if it has ended
    ended   how many ops had begun; NOWHERE: it has not
    """

    base: Geometry
    is_window: bool
    is_source: bool
    shared: bool | None
    entry: Entry | NoEntry
    kind: type
    bits: int
    brings: bool
    is_raw: bool
    recipe: NotedRecipe | None = None
    ended: int = NOWHERE

    @classmethod
    def of(cls, slot: Slot | Remains) -> Remains:
        """Returns what is known of a slot."""
        if isinstance(slot, Remains):
            return slot
        held, bits = slot.value, slot.bits
        lossy = isinstance(held, EncodeHandle) and not held.codec.lossless
        shared = None if slot.shared is None else slot.shared.takes_codes
        return cls(
            *(slot.base, slot.is_window, slot.is_source, shared, slot.entry),
            type(held),
            0 if bits is None else bits.data_ptr(),
            bits is not None and bits is getattr(held, "bitmap", None),
            held is not None and lossy and held.exact,
        )

    @property
    def is_kept(self) -> bool:
        """True if nothing is held but the tensor."""
        return self.kind is KeepHandle and not self.bits


@dataclass(eq=False)
class Trace:
    """Reference to a slot, and to what is left of it once that has ended."""

    slot: weakref.ref[Slot]
    remains: Remains | None = None

    def __call__(self) -> Slot | Remains | None:
        """Returns the slot, or what is left of it."""
        return self.remains or self.slot()


@dataclass(frozen=True)
class NotedRecipe:
    """A recipe without its tensors, but for parameters and bits; fields as in `NumberedRecipe`.

    makers  the ops that have made what it makes
    """

    op: Op
    makers: tuple[int, ...]
    source: Trace | NotedRecipe
    seen: Geometry
    made: Geometry
    bits: Tensor | None
    noise: Trace | None
    others: tuple[Trace | NotedRecipe, ...]
    given: tuple[tuple[Place, Geometry], ...]
    works_lossy: bool


class Seen(NamedTuple):
    """A view that has been there, of a slot that may be there."""

    slot: Slot | Remains
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
    seen: tuple[Trace, Need] | None = None

    @property
    def view(self) -> View | Seen | None:
        """The view, be it there or gone; None: it has no slot."""
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
    so_far: tuple[int, int]  # `Step.so_far`
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
    calls: int = 0  # of a recomputed module: the number of ops that it called
    dropped: int = 0  # of tensors that it saved
    numel: int = 0  # of all that it has saved
    out_numel: int = 0  # of its result, if that is one tensor

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
    slot: Trace
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
