"""Choices of saved values that were simulated for one region, found again when it is planned anew.

A region may be planned several times: in its room, and for the least that was found there. Each
time Inductor traces it anew, so no node of the last graph is in the next. But names repeat, so a
choice is known by the names of what it saves, in a graph of the same nodes. Only figures are kept:
the kernels of the few choices that are looked at closely are simulated again.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from elbowroom.compiled.collect import NodeFacts


@dataclass(frozen=True)
class Outcome:
    """Figures of a step, and the names of its nodes. See `joint.Step`."""

    saved: tuple[str, ...]
    again: tuple[str, ...]
    peak_nbytes: int
    saved_nbytes: int
    forward_nbytes: int
    seconds: float


Outcomes = dict[Any, Outcome | None]  # None: the choice is not possible, or too high


class _Thread(threading.local):
    """Outcomes of the region that is planned on this thread."""

    outcomes: Outcomes | None = None


_thread = _Thread()


@contextmanager
def remembering() -> Iterator[None]:
    """Keeps what is simulated inside this context, for one region."""
    before, _thread.outcomes = _thread.outcomes, {}
    try:
        yield
    finally:
        _thread.outcomes = before


def outcomes() -> Outcomes | None:
    """Returns what was simulated for the region that is planned; None outside of `remembering`."""
    return _thread.outcomes


def print_of(facts: Mapping[fx.Node, NodeFacts], *others: object) -> int:
    """Returns a hash of a graph: of its nodes in order, what they read, and the bytes of each."""
    nodes = (
        (n.name, str(n.target), tuple(one.name for one in n.all_input_nodes), fact.nbytes)
        for n, fact in facts.items()
    )
    return hash((tuple(nodes), others))


def names_of(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Returns the names of nodes, in their order."""
    return tuple(n.name for n in nodes)
