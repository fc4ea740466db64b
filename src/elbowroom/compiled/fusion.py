"""Simulation of the kernels that Inductor makes of a graph.

A graph does not run as it is written. Inductor inlines cheap pointwise ops into their readers,
fuses what loops over the same elements into one kernel, and stores only what crosses from one
kernel to another. So there are two steps:

1.  store    which values are written to memory: outputs, what a library call reads or writes,
             what a reduction gives, what many readers share. All other values are inlined: their
             readers read the sources instead.
2.  fuse     stored values that follow from each other in loops over the same elements, with no
             library call between them, are made by one kernel; what only that kernel reads
             takes no memory.

The rules are Inductor's own heuristics (`_inductor/ir.py`, `should_realize_on_reuse`,
`has_exceeded_max_reads`; its scheduler), as far as they decide about large tensors.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from elbowroom.compiled.collect import Kind, NodeFacts
from elbowroom.compiled.scheduling import SHARED

_SHARED_READS = 4  # a value with more than one reader is stored if it reads more (`realize_reads`)
_MAX_READS = 12  # and any other if it reads more than this
_FAR = 64  # kernels further apart are not fused (`are_long_distant_nodes`)
_NUMBER = 16  # bytes of the largest
_MIN_SHARED = 1024  # bytes for which a fusion is worth anything


@dataclass
class Kernel:
    """Work that runs as one: a library call, or loops that were fused."""

    order: int
    nodes: list[fx.Node] = field(default_factory=list)
    reads: set[fx.Node] = field(default_factory=set)  # storages
    writes: list[fx.Node] = field(default_factory=list)
    is_fused: bool = True
    heavy: list[fx.Node] = field(default_factory=list)  # exp and the like, inlined ones too
    loops: set[tuple[int, bool]] = field(default_factory=set)  # of each, see `loop_of`
    sources: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)  # of each loop


def kernels_of(
    order: Sequence[fx.Node],
    facts: dict[fx.Node, NodeFacts],
    given: set[fx.Node],
    outputs: set[fx.Node],
    *,
    by_column: bool,
) -> list[Kernel]:
    """Returns the kernels in the order in which they run, with the storages they read and write.

    given: what the graph begins with. outputs: what must stand when it ends
    by_column: whether sums over columns are loops of their own
    """
    here = given.union(order)
    reads: dict[fx.Node, frozenset[fx.Node]] = {n: frozenset([facts[n].storage]) for n in given}
    slow: dict[fx.Node, frozenset[fx.Node]] = {}  # heavy ops that are inlined into a value
    nothing: frozenset[fx.Node] = frozenset()
    level: dict[fx.Node, int] = dict.fromkeys(given, 0)  # library calls passed on the way
    kernels: list[Kernel] = []
    kernel_of: dict[fx.Node, Kernel] = {}  # by storage
    kept = {facts[node].storage for node in outputs if node in facts}
    for position, node in enumerate(order):
        fact = facts[node]
        inputs = [n for n in fact.inputs if n in reads]
        if len(inputs) == 1:  # as most nodes have; nothing is joined then
            sources, heavy = reads[inputs[0]], slow.get(inputs[0], nothing)
            depth = level[inputs[0]]
        else:
            sources = nothing.union(*[reads[n] for n in inputs])
            heavy = nothing.union(*[slow[n] for n in inputs if n in slow])
            depth = max([level[n] for n in inputs], default=0)
        heavy = heavy | {node} if fact.is_heavy else heavy
        if fact.kind is Kind.VIEW or fact.kind is Kind.GIVEN:
            reads[node], level[node], slow[node] = sources, depth, heavy
            continue
        if fact.kind is Kind.EXTERN:
            is_part = node.target is operator.getitem
            parent = kernel_of.get(inputs[0]) if is_part and inputs else None
            if parent is not None:
                parent.writes.append(node)
                kernel = parent
            else:
                kernel = Kernel(position, [node], set(sources), [], is_fused=False)
                kernels.append(kernel)
                if not isinstance(node.meta.get("val"), (tuple, list)):
                    kernel.writes.append(node)
            kernel_of[node] = kernel
            reads[node], level[node] = frozenset([node]), depth + (not is_part)
            continue
        if not _is_stored(node, fact, sources, heavy, here, facts, kept):
            reads[node], level[node], slow[node] = sources, depth, heavy
            continue
        loop = loop_of(fact, by_column=by_column)
        joined = _joined(loop, sources, depth, kernel_of, level)
        kernel = Kernel(position) if joined is None else joined
        if joined is None:
            kernels.append(kernel)
        kernel.nodes.append(node)
        kernel.loops.add(loop)
        kernel.sources[node] = sources
        kernel.heavy += [n for n in heavy if n not in kernel.heavy]
        kernel.reads |= sources
        kernel.writes.append(node)
        kernel_of[node] = kernel
        reads[node], level[node] = frozenset([node]), depth + fact.blocks
    kernels = _fused(_without_locals(kernels, kept), facts)
    return _scheduled(_without_locals(kernels, kept))


def _is_stored(
    node: fx.Node,
    fact: NodeFacts,
    sources: frozenset[fx.Node],
    heavy: frozenset[fx.Node],
    here: set[fx.Node],
    facts: dict[fx.Node, NodeFacts],
    kept: set[fx.Node],
) -> bool:
    """Returns whether a value is written to memory. heavy: slow ops that are inlined into it."""
    if fact.kind is Kind.REDUCTION or node in kept:
        return not isinstance(node.meta.get("val"), (tuple, list))
    if len(sources) > _MAX_READS or _is_read_by_extern(node, here, facts):
        return True
    if len(sources) > _SHARED_READS or heavy:
        return sum(user in here for user in node.users) > 1
    return False


def _is_read_by_extern(node: fx.Node, here: set[fx.Node], facts: dict[fx.Node, NodeFacts]) -> bool:
    pending = [node]
    while pending:
        for reader in pending.pop().users:
            if reader not in here:
                continue
            kind = facts[reader].kind
            if kind is Kind.EXTERN:
                return True
            if kind is Kind.VIEW:
                pending.append(reader)
    return False


def loop_of(fact: NodeFacts, *, by_column: bool = True) -> tuple[int, bool]:
    """Returns which loops a value can be made in: those over as many elements in the same order.

    A sum over columns goes through them column by column, but one of all elements as they lie.
    """
    return fact.elements, by_column and fact.blocks and fact.nbytes > _NUMBER


def _joined(
    loop: tuple[int, bool],
    sources: frozenset[fx.Node],
    depth: int,
    kernel_of: dict[fx.Node, Kernel],
    level: dict[fx.Node, int],
) -> Kernel | None:
    """The kernel of a value that this depends on, in loops over the same elements."""
    found: Kernel | None = None
    for source in sources:  # in no order, as nodes are hashed by their address
        kernel = kernel_of.get(source)
        if kernel is None or not kernel.is_fused or level[source] != depth:
            continue
        if loop in kernel.loops and (found is None or kernel.order > found.order):
            found = kernel
    return found


def _without_locals(kernels: list[Kernel], kept: set[fx.Node]) -> list[Kernel]:
    """Drops values that only the kernel that makes them reads: they are never written."""
    outer: set[fx.Node] = set(kept)
    for kernel in kernels:
        outer |= kernel.reads - set(kernel.writes)
    for kernel in kernels:
        own = set(kernel.writes)
        kernel.writes = [s for s in kernel.writes if s in outer or not kernel.is_fused]
        kernel.reads -= own
    return kernels


def _fused(kernels: list[Kernel], facts: dict[fx.Node, NodeFacts]) -> list[Kernel]:
    """Loops over the same elements that share something to read or follow from each other, as one.

    They must not be far apart, and nothing may have to run between them.
    """
    made_by = {s: at for at, kernel in enumerate(kernels) for s in kernel.writes}
    before, after = _reach(kernels, made_by)
    members = [1 << at for at in range(len(kernels))]  # kernels that were fused into each, as bits
    home = list(range(len(kernels)))  # the kernel into which each was fused
    latest = list(home)  # the last of those that were fused into each
    calls = sum(1 << at for at, kernel in enumerate(kernels) if not kernel.is_fused)
    for negative, first, second in _pairs(kernels, facts, made_by):
        one, two = home[first], home[second]
        if one == two or (after[one] & before[two]) | (after[two] & before[one]):
            continue
        follows = before[two] >> one & 1 or before[one] >> two & 1
        early, late = sorted((one, two))
        between = (calls & ((1 << late) - 1)) >> latest[early] + 1
        if not follows and between:  # see scheduling.py
            written = sum([facts[s].nbytes for at in (one, two) for s in kernels[at].writes])
            if before[late] >> latest[early] + 1 & between or -negative < SHARED * written:
                continue
        _merge(kernels, one, two)
        latest[one] = max(latest[one], latest[two])
        members[one] |= members[two]
        for at in _places(members[two]):
            home[at] = one
        earlier = (before[one] | before[two]) & ~members[one]
        later = (after[one] | after[two]) & ~members[one]
        # Kernels that depend on both, or on which both depend, have all of it already.
        for at in _places(later & ~(after[one] & after[two])):
            before[at] |= earlier | 1 << one
        for at in _places(earlier & ~(before[one] & before[two])):
            after[at] |= later | 1 << one
        before[one], after[one] = earlier, later
    return [kernel for at, kernel in enumerate(kernels) if home[at] == at]


def _places(bits: int) -> Iterator[int]:
    """Yields the places of the bits that are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _reach(kernels: list[Kernel], made_by: dict[fx.Node, int]) -> tuple[list[int], list[int]]:
    """The kernels that run before each, and those after it, as bits."""
    before, after = [0] * len(kernels), [0] * len(kernels)
    read: list[tuple[int, list[int]]] = []
    for kernel in _scheduled(kernels):
        if not kernel.writes:
            continue
        at = made_by[kernel.writes[0]]
        sources = [made_by[s] for s in kernel.reads if s in made_by and made_by[s] != at]
        read.append((at, sources))
        for source in sources:
            before[at] |= before[source] | 1 << source
    for at, sources in reversed(read):
        for source in sources:
            after[source] |= after[at] | 1 << at
    return before, after


def _pairs(
    kernels: list[Kernel], facts: dict[fx.Node, NodeFacts], made_by: dict[fx.Node, int]
) -> list[tuple[int, int, int]]:
    """Pairs of kernels that could be one, those that share most bytes first."""
    users: dict[fx.Node, list[int]] = {}
    for at, kernel in enumerate(kernels):
        if kernel.is_fused and kernel.writes:
            for storage in {*kernel.reads, *kernel.writes}:
                users.setdefault(storage, []).append(at)
    shared: dict[tuple[int, int], int] = {}
    for storage, places in users.items():
        nbytes = facts[storage].nbytes
        for i, one in enumerate(places):
            for two in places[i + 1 :]:
                if two - one > _FAR:
                    break
                shared[one, two] = shared.get((one, two), 0) + nbytes
    # Reductions that loops over other elements cannot follow.
    walls = [{s for s in kernel.writes if facts[s].blocks} for kernel in kernels]
    return sorted(
        (-nbytes, one, two)
        for (one, two), nbytes in shared.items()
        if nbytes >= _MIN_SHARED
        and not kernels[one].loops.isdisjoint(kernels[two].loops)
        and walls[one].isdisjoint(kernels[two].reads)
        and walls[two].isdisjoint(kernels[one].reads)
    )


def _merge(kernels: list[Kernel], one: int, two: int) -> None:
    kept, gone = kernels[one], kernels[two]
    kept.order = min(kept.order, gone.order)
    kept.nodes += gone.nodes
    kept.loops |= gone.loops
    kept.sources.update(gone.sources)
    kept.heavy += [n for n in gone.heavy if n not in kept.heavy]
    kept.writes += gone.writes
    kept.reads = (kept.reads | gone.reads) - set(kept.writes)


def _scheduled(kernels: list[Kernel]) -> list[Kernel]:
    """The kernels in an order in which each follows what it reads."""
    made_by = {storage: kernel for kernel in kernels for storage in kernel.writes}
    done: set[int] = set()
    ordered: list[Kernel] = []
    for first in kernels:
        pending = [(first, False)]
        while pending:
            kernel, ready = pending.pop()
            if ready:
                ordered.append(kernel)
            elif id(kernel) not in done:
                done.add(id(kernel))
                pending.append((kernel, True))
                before = {id(k): k for s in kernel.reads if (k := made_by.get(s)) is not None}
                for k in sorted(before.values(), key=lambda k: -k.order):
                    if id(k) not in done:
                        pending.append((k, False))
    return ordered
