"""The peak of a backward is estimated before it runs, from the graph and what is held for it.

    level(t) = resident bytes + gradients, by the graph (`plan/backward.py`)
             + bytes that are still held + bytes that the current node has restored

A tensor is released once the node that saved it first has run, because backward goes from the last
node to the first. Workspaces inside libraries are not known, so this is a lower bound, usually by a
few percent. `Fitting` uses it after a first forward, whose reserve for backward was a guess, to
decide whether the held tensors leave enough memory for backward.
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

    saving: the ended context of the forward that made the outputs
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


def gradients_peak(outputs: Iterable[Tensor], since: int = 0) -> int:
    """Returns the most bytes of gradients that stand at once in backward, by the graph alone.

    Those of parameters do not count. 0 where the outputs have no graph. since: as above
    """
    moments = run(graph_of(outputs, since=since, is_whole=not since))
    return max((moment.nbytes + moment.hidden for moment in moments), default=0)
