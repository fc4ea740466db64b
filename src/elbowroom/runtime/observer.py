"""Interfaces of objects that are notified of an examined forward, op by op.

    Observer, Watch, Recorder    protocols, for a step that is watched; `measure` implements them
    Listener                     is notified of all actions. There always is one: usually `NOBODY`;
                                 `replay/tracer.py` records a script

The hooks cannot import `measure`, which is a higher package. They only know these interfaces, for
measuring the errors of codes (`Observer`) and for recording a profile (`Recorder`). Most steps are
not watched; then only `begin` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from elbowroom.codecs import Codec
from elbowroom.plan import Action, Need, Site, SiteName
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.handles.rebuild import Op
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.modules import Calls
from elbowroom.runtime.normal import Statistics
from elbowroom.runtime.slot import Slot, View

if TYPE_CHECKING:
    from elbowroom.runtime.direct import Direct
    from elbowroom.runtime.handles.rebuild import Ready
    from elbowroom.runtime.storage import Origin


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
        """Called with the original of a slot, just before it is released.

        The slot holds its replacement.

        codec: of the replacement if it is a code; None if it is a recipe.
        """
        ...

    def curved(self, slot: Slot) -> None:
        """Called when a GELU or SiLU reads a result of what this slot holds, or will hold."""
        ...

    def ended(self, call: Call, out: Any) -> None:
        """Called when the op has ended; its node in the graph exists."""
        ...


class Observer(Protocol):
    """Decides which steps are watched."""

    def begin(self) -> Watch | None:
        """Called when a forward begins. Returns its watch; None: it is not watched."""
        ...

    def error_report(self) -> object:
        """Returns what was found so far; str() of it is a table."""
        ...


class Recorder(Protocol):
    """Records a profile of one forward, and of the backward that follows."""

    def looking(self) -> AbstractContextManager[None]:
        """Returns a context for work that does not belong to the step: its time is not counted."""
        ...

    def saved(
        self, view: View, x: Tensor, site: Site, why: str, node: int, sources: Sequence[Slot]
    ) -> View:
        """Called when an op has saved x.

        why: the reason that it is kept whatever the policy says, or "".

        node: autograd's number of its node. sources: from which x could be rebuilt. Returns what
        autograd holds: the view, or one that reports when it is restored.
        """
        ...

    def curved(self, slot: Slot) -> None:
        """Called when a GELU or SiLU reads a result of the tensor that this slot holds."""
        ...

    def alone(self, nbytes: int) -> None:
        """Called when a tensor of so many bytes is kept, and counted, that has no slot."""
        ...

    def decided(self, slot: Slot, why: str) -> None:
        """Called when an op turns out to need the tensor of this slot exactly (`saturated.py`)."""
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

        source_of: the single saved tensor from which a tensor can be rebuilt bit for bit, if any.
        """
        ...

    def forward_ended(self) -> None:
        """Called when the context closes."""
        ...


class Listener:
    """Listener to all events of a forward, which does nothing."""

    def starts(self, ledger: Ledger, seeds: int) -> None:
        """Called when the forward begins.

        ledger: that counts it; seeds: the count of its context's.
        """

    def begins(self, call: Call) -> None:
        """Called when a call begins, and nothing of it has happened yet."""

    def runs(self, call: Call, run: Callable[..., Any], direct: Direct | None) -> None:
        """Called when the call runs as `run`."""

    def compares(self) -> None:
        """Called if the arguments of the call that begins must be the same in later forwards."""

    def saved(self, x: Tensor, held: Any) -> None:
        """Called when autograd saves x, and holds `held` for it."""

    def ends(self) -> None:
        """Called when the call has run; then the tensors that waited for it are decided on."""

    def makes(self, origin: Origin) -> None:
        """Called when the result of the call is recorded with this origin."""

    def needs_levels(self, op: Op, levels: int | None, scale: float) -> None:
        """Called when codes of the operands of a product need so many levels, or must not be.

        scale: what a softmax multiplies its logits with
        """

    def copies(self, slot: Slot, y: Tensor, call: Call | None) -> None:
        """Called when a slot stands for a constant among the arguments of an ended call."""

    def ended(self, call: Call, out: Any) -> None:
        """Called when the call has ended, and all is decided on."""

    def failed(self) -> None:
        """Called when the call has raised."""

    def begins_region(self, module: nn.Module) -> None:
        """Called when a call of a recomputed module begins."""

    def saves_between(self, *, of_checkpoint: bool) -> None:
        """Called when a tensor is saved between two calls.

        of_checkpoint: by a checkpoint of the user, as an input; else by a function of the user
        """

    def saves(self) -> None:
        """Called before inputs of a recomputed module, or tensors between calls, are saved."""

    def region_saved(self) -> None:
        """Called when the inputs of the module are saved, and it runs."""

    def region_ended(self, saves: int) -> None:
        """Called when the module has run. saves: number of its saved tensors, none of them held."""

    def does(
        self,
        slot: Slot,
        name: SiteName,
        need: Need,
        action: Action | None,
        *,
        ready: Ready | None = None,
        norm: Statistics | None = None,
        bits: str = "",
        covers: bool = False,
        drawn: int = 0,
    ) -> None:
        """Called when an action is performed on a slot.

        action  None: the other arguments say what is done
        ready   the recipe by which it is rebuilt
        norm    the statistics that it is normalized with
        bits    the op whose mask is taken of it; "": none is
        covers  whether the op that saves it made all of its storage
        drawn   the count of the context's seeds as one was drawn for it
        """

    def refuse(self, why: str, *, once: bool = False) -> None:
        """Called if later forwards cannot follow this one. once: the next one may be followed."""

    def leaves(self) -> None:
        """Called when the forward has ended; what waits for that is decided on."""

    def finish(self, ledger: Ledger, seeds: int, calls: Calls) -> None:
        """Called when all is decided on, and the graph is still there.

        ledger, seeds: those that it has started with; calls: of outermost modules in this step
        """


NOBODY = Listener()
