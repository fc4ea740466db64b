"""Protocols by which the runtime tells of a step that is watched; `measure` implements them.

A lower floor does not import a higher one, so the hooks know no measure; they know that somebody
may watch what errors codes make (`Observer`), or write down what is saved when (`Recorder`). Most
steps are not watched, and then nothing here is called but `begin`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from elbowroom.codecs import Codec
from elbowroom.plan import Site
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.slot import Slot, View


@dataclass(frozen=True)
class Use:
    """Record of one op that saves one tensor that may carry an error. module: where the op runs."""

    call: Call
    view: View
    module: str


class Watch(Protocol):
    """One forward that is watched, and the backward that follows."""

    def saved(self, use: Use, x: Tensor) -> None:
        """Called when the op has saved x, which may carry an error now, or later."""
        ...

    def held(self, slot: Slot, whole: Tensor, site: Site, codec: Codec | None) -> None:
        """Called with what a slot was made from, just before that is let go.

        The slot holds its stand-in.

        codec: of the stand-in if it is a code; None if it is a recipe.
        """
        ...

    def curved(self, slot: Slot) -> None:
        """Called when a GELU or SiLU reads what is made of what this slot holds, or will hold."""
        ...

    def ended(self, call: Call, out: Any) -> None:
        """Called when the op has ended; its node in the graph exists."""
        ...


class Observer(Protocol):
    """Decides which steps are watched."""

    def begin(self) -> Watch | None:
        """Called when a forward begins. Returns what watches it; None: nobody does."""
        ...

    def error_report(self) -> object:
        """Returns what was found so far; str() of it is a table."""
        ...


class Recorder(Protocol):
    """Writes down one forward, and the backward that follows."""

    def looking(self) -> AbstractContextManager[None]:
        """Returns a context for what is no work of the step's: its time is not counted."""
        ...

    def saved(
        self, view: View, x: Tensor, site: Site, why: str, node: int, sources: Sequence[Slot]
    ) -> View:
        """Called when an op has saved x.

        why: the reason that it is left alone whatever the policy says, or "".

        node: autograd's number of its node. sources: what x could be made again from.
        What comes back is what autograd holds: the view, or one that tells when it is asked for.
        """
        ...

    def curved(self, slot: Slot) -> None:
        """Called when a GELU or SiLU reads what is made of what this slot holds."""
        ...

    def ended(self, call: Call, out: Any, slots: list[Slot]) -> None:
        """Called when an op that had read these slots has made `out`."""
        ...

    def module(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        source_of: Callable[[Tensor], Slot | None],
    ) -> Any:
        """Runs call(*args, **kwargs), which is that of a module.

        source_of: the one saved tensor that a tensor can be made from again bit for bit, if any.
        """
        ...

    def forward_ended(self) -> None:
        """Called when the context closes."""
        ...
