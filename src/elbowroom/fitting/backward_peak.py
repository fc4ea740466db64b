"""The peak of a backward is estimated before it runs, from the graph and what is held for it.

    level(t) = what stands + gradients, by the graph (`plan/backward.py`) + what is held still
             + what the node that runs has restored

A tensor is let go of once the node has run that was the first to save it, for backward goes from
the last node to the first. Workspaces inside of libraries are not known, so this is a lower bound,
mostly by a few percent. It tells a first forward that holds all it should from one that should not
have (`Fitting`), where what was set aside for backward is a guess.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from torch import Tensor

from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.options import MemoryState
from elbowroom.measure.graph import graph_of
from elbowroom.plan.backward import run


def peak_of_backward(
    outputs: Iterable[Tensor], saving: FittedSaving, memory: MemoryState, since: int = 0
) -> int:
    """Returns the bytes of backward's highest moment; 0 where the outputs have no graph.

    saving: of the forward that has made the outputs, and has ended
    since: autograd's number of the first node that counts
    """
    restored: dict[int, int] = defaultdict(int)
    held: list[tuple[int, int]] = []  # the first node that saves it, and its bytes
    for slot, nodes in saving.saved_by.items():
        held.append((min(nodes), slot.entry.after_nbytes))
        whole = max(slot.entry.before_nbytes - slot.entry.after_nbytes, 0)
        for node in set(nodes):
            restored[node] += whole
    held.sort()
    firsts = [node for node, _ in held]
    below = [0, *accumulate(nbytes for _, nbytes in held)]
    highest, node = 0, firsts[-1] if firsts else 0
    for moment in run(graph_of(outputs, since=since, is_whole=not since)):
        node = node if moment.is_leaf else moment.nth
        still = below[bisect_right(firsts, node)] + restored.get(node, 0)
        stay = min(moment.stay, memory.unallocated_gradient_nbytes)
        highest = max(highest, moment.nbytes + moment.hidden + stay + still)
    return highest and memory.static_nbytes + highest
