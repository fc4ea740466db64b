"""What the runtime tells of a step that is watched: the protocol that `measure` implements.

A lower floor does not import a higher one, so the hooks know no measure; they know that somebody
may watch. Most steps are not watched, and then nothing here is called but `begin`.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from elbowroom.codecs import Codec
from elbowroom.plan import Site
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.slot import Slot, View


@dataclass(frozen=True)
class Use:
    """One op saves one tensor that may carry an error. module: where the op runs."""

    call: Call
    view: View
    module: str


class Watch(Protocol):
    """One forward that is watched, and the backward that follows."""

    def saved(self, use: Use, x: Tensor) -> None:
        """The op has saved x, which may carry an error now, or later."""
        ...

    def held(self, slot: Slot, whole: Tensor, site: Site, codec: Codec | None) -> None:
        """What the slot was made from, just before it is let go; the slot holds its stand-in.

        codec: if that is a code; None if it is a recipe.
        """
        ...

    def ended(self, call: Call, out: Any) -> None:
        """The op has ended; its node in the graph exists."""
        ...


class Observer(Protocol):
    """Decides which steps are watched."""

    def begin(self) -> Watch | None:
        """A forward begins. None: nobody watches it."""
        ...

    def error_report(self) -> object:
        """What was found so far; str() of it is a table."""
        ...
