"""Memory that is resident beside a fitted model as a step begins: other graphs, other models.

Fitted models that train alternately (generator and discriminator) share a device. So each counts
the tensors that graphs of the others, and of its own earlier steps, hold at that moment; and the
weights, gradients and states of the models that train alternately with it; and what an optimizer
holds that runs forwards in its step (LBFGS). It does not count a model whose training has ended or
has not begun.
"""

import itertools
import threading
import weakref
from collections.abc import Iterator

from elbowroom.fitting.model_state import ModelState, storage_nbytes
from elbowroom.runtime.ledger import Ledger, Tally

_TURNS = 2  # a model that ran so often between two of our steps trains alternately with us
_clock = itertools.count()
_fitted: "weakref.WeakSet[Neighbors]" = weakref.WeakSet()


class Neighbors:
    """Graphs and other models whose memory is resident beside one fitted model.

    learns: some of the model's forwards are not settled yet
    """

    def __init__(self, model_state: ModelState) -> None:
        self._model_state = model_state
        self._graphs: list[Ledger | Tally] = []
        self._turns: weakref.WeakKeyDictionary[Neighbors, int] = weakref.WeakKeyDictionary()
        self._began = next(_clock)
        self._ran_inside: weakref.WeakSet[Neighbors] = weakref.WeakSet()
        self.learns = True
        self._thread, self._state_nbytes = threading.get_ident(), model_state.nbytes
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
        self._began, self._thread = next(_clock), threading.get_ident()
        if any(other._thread != self._thread for other in self._other_models()):
            self._state_nbytes = self._model_state.nbytes

    def opened(self, graph: Ledger | Tally) -> None:
        """Adds the graph of a forward that begins, unless it continues the last forward's step."""
        for other in self._other_models():
            if any(held.held_nbytes > 0 for held in other._graphs):
                other._ran_inside.add(self)
        if not self._graphs or self._graphs[-1] is not graph:
            self._graphs.append(graph)

    @property
    def is_inside(self) -> bool:
        """True if this forward may be part of another fitted model's waiting graph."""
        return any(graph.held_nbytes > 0 for one in self._other_models() for graph in one._graphs)

    @property
    def waits(self) -> bool:
        """True if graphs of earlier forwards, of this model or another, hold saved tensors."""
        return self.is_inside or any(graph.held_nbytes > 0 for graph in self._graphs)

    @property
    def others_learn(self) -> bool:
        """True if a model is still learning that ran while a graph of this one waited.

        Its memory is part of what was measured for this model, and may decrease later.
        """
        return any(one.learns for one in self._ran_inside if one in _fitted)

    def takes_turns_with(self, other: "Neighbors") -> bool:
        """Returns whether the other model's state is counted in `nbytes`."""
        return self._turns.get(other, 0) >= _TURNS

    def leave(self) -> None:
        """Removes the model: it is not fitted any more."""
        _fitted.discard(self)
        self._graphs.clear()

    @property
    def nbytes(self) -> int:
        """Bytes resident beside the model now, before a forward of the step that begins.

        A model that another thread trains counts as its last step began: its gradients may be
        replaced meanwhile, and to read one then ends the process.
        """
        others = list(self._other_models())
        graphs = sum(graph.held_nbytes for one in (self, *others) for graph in one._graphs)
        graphs += self._model_state.passing_nbytes
        in_turns = [one for one in others if self.takes_turns_with(one)]
        if not in_turns:
            return graphs
        here = [one for one in in_turns if one._thread == self._thread]
        graphs += sum(one._state_nbytes for one in in_turns if one not in here)
        mine = self._model_state.tensors()
        theirs = [tensor for one in here for tensor in one._model_state.tensors()]
        return graphs + storage_nbytes([*mine, *theirs]) - storage_nbytes(mine)

    @property
    def savings_nbytes(self) -> int:
        """Bytes that waiting graphs of other models save compared to plain autograd.

        Within a larger budget these models may hold that many bytes more.
        """
        graphs = (graph for one in self._other_models() for graph in one._graphs)
        waiting = (graph for graph in graphs if graph.held_nbytes > 0)
        return sum(max(graph.before_nbytes - graph.after_nbytes, 0) for graph in waiting)

    def _other_models(self) -> Iterator["Neighbors"]:
        for one in list(_fitted):
            if one is not self and one._model_state.device == self._model_state.device:
                yield one
