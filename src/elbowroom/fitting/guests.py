"""Models that share a step: a generator and the discriminator that judges what it has made.

    fake = G(z)                                   the step of G begins
    (loss(D(real)) + loss(D(fake.detach()))).backward(); od.step()
    loss(D(fake)).backward(); og.step()           G's graph is gone: the step is over

A forward of one fitted model that begins while a graph of another one waits for its backward is a
guest in that one's step. So there is one ledger, one measurement and one plan of all that is held
at one time, and its memory is that of both models. A backward that has not come to all graphs of
the step does not end it. A forward that begins while no graph waits begins a step of its own model,
and the measurements of other models' steps are over then.

After such a backward a forward goes on with the step if its model is a guest, or if its input has
been made by a graph. Otherwise (G(z) once more, while the old images are still there) the host has
begun another step.

Models share steps only with equal options (one budget), on one device and thread, in one process of
one, and without plans that were given, which know of one model each.
"""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.replayed import ReplayedForward
from elbowroom.runtime.ledger import Tally


class OpenStep:
    """The graphs that the forwards of a step have made.

    runs        one of its forwards runs
    has_guests  some were of another model
    """

    def __init__(self) -> None:
        self._graphs: list[tuple[int, Tally]] = []
        self._thread = 0
        self.runs = self.has_guests = False

    def begin(self) -> None:
        """Begins another step."""
        self._graphs.clear()
        self.has_guests = False

    def follow(self, out: Any, last: FittedSaving | ReplayedForward | None, nth: int) -> None:
        """Follows the graph of the nth forward's results.

        last: what is held for it
        """
        if isinstance(last, ReplayedForward):
            graph = last.ledger
        else:
            graph = Tally(0, 0)
            graph.follow(out)
        self._graphs.append((nth, graph))
        self._thread = threading.get_ident()

    @property
    def waiting(self) -> frozenset[int]:
        """The numbers of the forwards whose graphs no backward has come to."""
        return frozenset(nth for nth, graph in self._graphs if graph.waits)

    @property
    def waits(self) -> bool:
        """True if a backward is still to come to one of the graphs."""
        return any(graph.waits for _, graph in self._graphs)

    @property
    def may_take_in(self) -> bool:
        """True if a forward of another model would go on with the step."""
        if self.runs or self._thread != threading.get_ident():
            return False
        return self.waits and torch._C._current_graph_task_id() == -1 and not _is_distributed()


def is_made_of_graph(given: object) -> bool:
    """Returns whether some input has a graph that backward will go on into."""
    return any(isinstance(x, Tensor) and x.grad_fn is not None for x in tree_leaves(given))


def _is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()
