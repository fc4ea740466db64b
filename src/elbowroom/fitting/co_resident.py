"""Memory that is resident beside a fitted model as a step begins: other graphs, other models.

Fitted models that train in turns (generator and discriminator) share a device. So each counts what
graphs of the others save at that moment, as of earlier steps of its own; and weights, gradients and
states of those that take turns with it. One that has trained before, or will after it, does not.
"""

import itertools
import weakref
from collections.abc import Iterator

from elbowroom.fitting.model_state import ModelState, storage_nbytes
from elbowroom.runtime.ledger import Ledger, Tally

_TURNS = 2  # between two steps of ours, so many times: it trains beside us
_clock = itertools.count()
_fitted: "weakref.WeakSet[Neighbours]" = weakref.WeakSet()


class Neighbours:
    """Graphs and other models whose memory is resident beside one fitted model.

    learns: some of the model's forwards have not settled yet
    """

    def __init__(self, owned: ModelState) -> None:
        self._owned = owned
        self._graphs: list[Ledger | Tally] = []
        self._turns: weakref.WeakKeyDictionary[Neighbours, int] = weakref.WeakKeyDictionary()
        self._began = next(_clock)
        self._ran_inside: weakref.WeakSet[Neighbours] = weakref.WeakSet()
        self.learns = True
        _fitted.add(self)

    @property
    def is_alone(self) -> bool:
        """True if no other model is fitted."""
        return len(_fitted) == 1

    def begin(self) -> None:
        """Begins a step of the model."""
        self._graphs = [graph for graph in self._graphs if graph.held_nbytes > 0]
        for other in self._other_models():
            if other._began > self._began:
                self._turns[other] = self._turns.get(other, 0) + 1
        self._began = next(_clock)

    def opened(self, graph: Ledger | Tally) -> None:
        """Adds the graph of a forward that begins, unless it goes on with the last one's."""
        for other in self._other_models():
            if any(held.held_nbytes > 0 for held in other._graphs):
                other._ran_inside.add(self)
        if not self._graphs or self._graphs[-1] is not graph:
            self._graphs.append(graph)

    @property
    def is_inside(self) -> bool:
        """True if a graph of another fitted model waits now: what runs then may be a part of it."""
        return any(graph.held_nbytes > 0 for one in self._other_models() for graph in one._graphs)

    @property
    def others_learn(self) -> bool:
        """True if a model still learns that has run while a graph of this one waited.

        What it took then is part of what was measured of this one, and may become less.
        """
        return any(one.learns for one in self._ran_inside if one in _fitted)

    def takes_turns_with(self, other: "Neighbours") -> bool:
        """Returns whether the other model's state is counted in `nbytes`."""
        return self._turns.get(other, 0) >= _TURNS

    def leave(self) -> None:
        """Removes the model: it is not fitted any more."""
        _fitted.discard(self)
        self._graphs.clear()

    @property
    def nbytes(self) -> int:
        """Bytes resident beside the model now, before a forward of the step that begins."""
        others = list(self._other_models())
        graphs = sum(graph.held_nbytes for one in (self, *others) for graph in one._graphs)
        beside = [one for one in others if self.takes_turns_with(one)]
        if not beside:
            return graphs
        mine = self._owned.tensors()
        theirs = [tensor for one in beside for tensor in one._owned.tensors()]
        return graphs + storage_nbytes([*mine, *theirs]) - storage_nbytes(mine)

    @property
    def savings_nbytes(self) -> int:
        """Bytes by which graphs of other models that wait now are smaller than plain ones.

        Within a larger budget these models may hold as much more.
        """
        graphs = (graph for one in self._other_models() for graph in one._graphs)
        waiting = (graph for graph in graphs if graph.held_nbytes > 0)
        return sum(max(graph.before_nbytes - graph.after_nbytes, 0) for graph in waiting)

    def _other_models(self) -> Iterator["Neighbours"]:
        for one in list(_fitted):
            if one is not self and one._owned.device == self._owned.device:
                yield one
