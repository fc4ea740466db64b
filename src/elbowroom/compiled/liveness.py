"""Simulation of the bytes that are alive while a compiled graph runs.

The kernels of a graph (`fusion.py`) run one after the other: each allocates what it writes, and
frees what is not read any more. Loops overwrite inputs that they are the last to read; freed memory
may wait for the next tensor of its size (`_FreedMemory`). On a CPU all loops between two library
calls are one function, so what they read is free at its end, unless it is overwritten.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from elbowroom.compiled.collect import Kind, NodeFacts
from elbowroom.compiled.fusion import Kernel, kernels_of

_aten = torch.ops.aten
_INTO = frozenset(  # library calls that write into memory which they are given
    [_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default]
)


@dataclass(frozen=True)
class LevelCurve:
    """The level after each kernel has taken what it writes.

    levels[i] is bytes, at kernels[i]. `end_nbytes` stays at the end.

    made, until  the first and the last kernel at which each storage stands
    """

    kernels: tuple[Kernel, ...]
    levels: tuple[int, ...]
    start_nbytes: int
    end_nbytes: int
    until: dict[fx.Node, int]
    made: dict[fx.Node, int]

    @property
    def peak_nbytes(self) -> int:
        """The highest level, in bytes."""
        return max((self.start_nbytes, *self.levels))

    @property
    def peak_at(self) -> int:
        """The kernel at which the level is highest; -1: before the first."""
        if self.peak_nbytes == self.start_nbytes:
            return -1
        return self.levels.index(self.peak_nbytes)

    def alive_at(self, at: int) -> list[fx.Node]:
        """The storages that are held while kernel `at` runs."""
        return [s for s, begin in self.made.items() if begin <= at <= self.until[s]]

    def counted_at_peak(self, facts: dict[fx.Node, NodeFacts]) -> list[fx.Node]:
        """The storages whose bytes make the peak: of two in the same memory, the one written."""
        at = self.peak_at
        if at < 0:
            return self.alive_at(at)
        held = {s for s, begin in self.made.items() if begin <= at <= max(self.until[s], 0)}
        ends = [s for s in held if max(self.until[s], 0) == at and self.made[s] < at]
        return [s for s in held if s not in _in_place(self.kernels[at], ends, facts).values()]


def curve_of(
    order: Sequence[fx.Node],
    facts: dict[fx.Node, NodeFacts],
    *,
    given: Collection[fx.Node],
    outside: Collection[fx.Node],
    outputs: Collection[fx.Node],
    waits: bool = False,
    is_cpu: bool = True,
) -> LevelCurve:
    """Simulate a graph.

    order    what is computed, in the order of the graph
    given    what the graph begins with: its inputs and saved values
    outside  those of `given` whose memory belongs to the caller: neither counted nor freed
    outputs  what must stand when it ends
    waits    whether freed memory waits for the next tensor of its size, as Inductor has it by
             itself; in planned graphs that is off (`scheduling.py`)
    is_cpu   whether loops between two library calls are one function, in which a sum over columns
             is a loop of its own
    """
    kernels = kernels_of(order, facts, set(given), set(outputs), by_column=is_cpu)
    kept = {facts[node].storage for node in outputs if node in facts}
    owned = {facts[node].storage for node in given} - {facts[node].storage for node in outside}
    last: dict[fx.Node, int] = dict.fromkeys(owned, -1)
    made: dict[fx.Node, int] = dict.fromkeys(owned, -1)
    for at, kernel in enumerate(kernels):
        for storage in kernel.writes:
            made[storage] = last[storage] = at
        for storage in kernel.reads:
            if storage in last:
                last[storage] = at
    end = len(kernels)
    for storage in kept & last.keys():
        last[storage] = end
    for storage in owned - kept:  # never read: freed with the arguments, at the beginning
        last[storage] = max(last[storage], -1)
    ends = _ends(kernels) if is_cpu else list(range(len(kernels)))
    return _levels(kernels, facts, made, last, ends, waits=waits)


def _ends(kernels: list[Kernel]) -> list[int]:
    """Returns, for each kernel, the last one of the function that it is in."""
    ends = list(range(len(kernels)))
    for at in reversed(range(len(kernels) - 1)):
        if kernels[at].is_fused and kernels[at + 1].is_fused:
            ends[at] = ends[at + 1]
    return ends


def _levels(
    kernels: list[Kernel],
    facts: dict[fx.Node, NodeFacts],
    made: dict[fx.Node, int],
    last: dict[fx.Node, int],
    ends: list[int],
    *,
    waits: bool,
) -> LevelCurve:
    """Walks the kernels. last: the last to read each storage. ends: see `_ends`."""
    dying: list[list[fx.Node]] = [[] for _ in range(len(kernels) + 1)]
    for storage, at in last.items():
        dying[max(at, 0)].append(storage)
    until = dict(last)
    start = level = sum(facts[s].nbytes for s, at in made.items() if at < 0)
    strict, loose = [], []  # with and without values that overwrite an input at its end
    late = 0  # bytes that no kernel of the function reads any more
    read: list[fx.Node] = []  # what holds them, and may be reused
    pool = _FreedMemory(kernels, facts)
    for at, kernel in enumerate(kernels):
        free = dying[at]
        over = _in_place(kernel, [s for s in free if made[s] < at], facts) if free else {}
        taken = set(over.values())
        written = sum([facts[s].nbytes for s in kernel.writes])
        loose.append(level + written)
        work = 0 if kernel.is_fused else sum([facts[n].workspace for n in kernel.nodes])
        strict.append(level + late + written + work - sum([facts[s].nbytes for s in taken]))
        level += written - sum([facts[s].nbytes for s in free])
        left = [s for s in free if s not in taken]
        late += sum([facts[s].nbytes for s in left])
        until.update((s, ends[at]) for s in left if last[s] >= 0)
        read += [s for s in left if made[s] >= 0]
        if waits:
            pool.take(at, [s for s in kernel.writes if s not in over])
        if ends[at] == at:
            if waits:
                pool.give(at, read)
            late, read = 0, []
    levels = pool.extended(strict, loose) if waits else strict
    return LevelCurve(tuple(kernels), tuple(levels), start, level, until, made)


def _in_place(
    kernel: Kernel, ends: Iterable[fx.Node], facts: dict[fx.Node, NodeFacts]
) -> dict[fx.Node, fx.Node]:
    """Returns what the kernel writes over an input that it is the last to read: written -> read.

    Inductor decides this loop by loop: an input of two loops of a kernel is not free for the first,
    unless the second depends on it.
    """
    if not kernel.is_fused:
        return {}
    free = {s for s in ends if s in kernel.reads}
    found: dict[fx.Node, fx.Node] = {}
    for storage in kernel.writes if free else ():
        earlier = _earlier(storage, kernel)
        sources_in_order = [s for s in kernel.sources.get(storage, ()) if s in free]
        for read in sorted(sources_in_order, key=_name):
            alone = all(
                read not in sources or loop is storage or loop in earlier
                for loop, sources in kernel.sources.items()
            )
            if alone and _fits(storage, read, facts):
                free.remove(read)
                found[storage] = read
                break
    return found


def _name(node: fx.Node) -> str:
    return node.name


def _earlier(loop: fx.Node, kernel: Kernel) -> set[fx.Node]:
    """The loops of a kernel that one follows from."""
    found: set[fx.Node] = set()
    pending = [loop]
    while pending:
        for source in kernel.sources.get(pending.pop(), ()):
            if source in kernel.sources and source not in found:
                found.add(source)
                pending.append(source)
    return found


def _fits(storage: fx.Node, over: fx.Node, facts: dict[fx.Node, NodeFacts]) -> bool:
    if facts[storage].kind is Kind.REDUCTION or _dtype(storage) != _dtype(over):
        return False
    return 0.95 * facts[over].nbytes <= facts[storage].nbytes <= facts[over].nbytes


class _FreedMemory:
    """Pool of freed memory in Inductor's wrapper, which waits for the next tensor of its size.

    Memory that waits is not free. So Inductor lets it wait only where the level in between, by its
    own estimate without writing in place, stays at or below the peak of the whole graph.
    """

    def __init__(self, kernels: list[Kernel], facts: dict[fx.Node, NodeFacts]) -> None:
        self._kernels = kernels
        self._facts = facts
        self._events: list[tuple[int, bool, list[fx.Node]]] = []

    def take(self, at: int, storages: list[fx.Node]) -> None:
        """Records that kernel `at` allocates memory for these."""
        kernel = self._kernels[at]
        if kernel.is_fused or all(node.target in _INTO for node in kernel.nodes):
            self._events.append((at, True, storages))

    def give(self, at: int, storages: list[fx.Node]) -> None:
        """Records that the memory of these is free after kernel `at`."""
        self._events.append((at, False, storages))

    def extended(self, strict: list[int], loose: list[int]) -> list[int]:
        """Returns the levels with the memory that waits."""
        strict, loose = list(strict), list(loose)
        highest = max(loose, default=0)
        waiting: dict[tuple[int, object], list[int]] = {}
        for at, asks, storages in self._events:
            for storage in storages:
                size = self._facts[storage].nbytes
                places = waiting.setdefault((size, _dtype(storage)), [])
                if not asks:
                    places.append(at)
                elif places:
                    between = range(places[-1] + 1, at)
                    if between and size + max(loose[t] for t in between) > highest:
                        continue
                    places.pop()
                    for t in between:
                        strict[t] += size
                        loose[t] += size
        return strict


def _dtype(storage: fx.Node) -> object:
    return getattr(storage.meta.get("val"), "dtype", None)
