"""Who is told of one forward, op by op, as a learning context looks at it.

The context need not know who listens: `replay/scribe.py` writes down what is done, so that later
forwards follow it. Somebody always listens; most often it is `NOBODY`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from elbowroom.plan import Action, Need, SiteName
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.modules import Calls
from elbowroom.runtime.normal import Statistics

if TYPE_CHECKING:
    from elbowroom.runtime.direct import Direct
    from elbowroom.runtime.identity import Identity
    from elbowroom.runtime.recipes import Ready
    from elbowroom.runtime.slot import Slot


class Listener:
    """Listener that hears of all events of a forward, and does nothing."""

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
        """Called when the call has run; then it is decided on what waited for that."""

    def makes(self, x: Any, identity: Identity) -> None:
        """Called when the call has made x. identity: knows how that can be made again."""

    def copies(self, slot: Slot, y: Tensor, call: Call | None) -> None:
        """Called when a slot stands for a constant among the arguments of an ended call."""

    def ended(self, call: Call, out: Any) -> None:
        """Called when the call has ended, and all is decided on."""

    def failed(self) -> None:
        """Called when the call has raised."""

    def begins_region(self, module: nn.Module) -> None:
        """Called when a call begins of a module that runs again in backward."""

    def begins_inputs(self) -> None:
        """Called when a checkpoint of the user's saves one of its inputs."""

    def saves(self) -> None:
        """Called before the inputs of a module that runs again, or of a checkpoint, are saved."""

    def region_saved(self) -> None:
        """Called when the inputs of the module are saved, and it runs."""

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
        """Called when something is done with a slot.

        action  None: what follows says it
        ready   what it is made again by
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
