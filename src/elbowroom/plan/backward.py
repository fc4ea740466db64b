"""Simulates the memory of backward, from the graph that a forward has built.

    graph   one node for each op that backward will run: the gradients it takes, to whom it gives
    order   autograd's own: of the nodes whose gradients have all come, the one made last
    level   gradients that wait for their node + what a node makes of them + gradients that stay

Nothing runs here. A gradient has the size of the tensor that it belongs to, which each node knows.
An op that hands on what it was given (a view, a sum) makes none of its own; where several come
together, they are added up in place if nobody else holds the first of them. What some ops make in
between is in a table. What libraries take inside of an op is not known.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

# What a formula makes beside its results: so many of the largest tensor that it takes or gives.
# Measured on a CPU (`tests/unit/test_backward.py`); a reduction also makes some of what it takes.
_BETWEEN = {
    "AbsBackward": 1,
    "AddcdivBackward": 4,
    "AddcmulBackward": 1,
    "AmaxBackward": 1.25,
    "AminBackward": 1.25,
    "AsinBackward": 4,
    "Atan2Backward": 3,
    "AtanBackward": 2,
    "ClampBackward1": 0.5,
    "CosBackward": 2,
    "CoshBackward": 1,
    "CumprodBackward": 3.25,
    "CumsumBackward": 2,
    "ErfBackward": 4,
    "ErfinvBackward": 4,
    "EuclideanDistBackward": 1,
    "Expm1Backward": 1,
    "FftR2CBackward": 2,
    "IndexReduceBackward amax": 3.25,
    "IndexReduceBackward amin": 3.25,
    "IndexReduceBackward mean": 2,
    "LerpBackward1": 1,
    "LinalgCholeskyExBackward": 3,
    "LinalgDetBackward": 2,
    "LinalgHouseholderProductBackward": 3,
    "LinalgInvExBackward": 2,
    "LinalgLuFactorExBackward": 6,
    "LinalgMatrixExpBackward": 43,  # 27 to 55: more powers are added up for a larger gradient
    "LinalgPinvBackward": 12,
    "LinalgQrBackward": 3,
    "LinalgSlogdetBackward": 1,
    "LinalgSolveExBackward": 2,
    "LinalgSolveTriangularBackward": 2,
    "LinalgVectorNormBackward": 1,
    "Log10Backward": 1,
    "Log1PBackward": 1,
    "Log2Backward": 1,
    "LogaddexpBackward": 3,
    "LogcumsumexpBackward": 7,
    "LogsumexpBackward": 2,
    "MaxBackward1": 2.25,
    "MaximumBackward": 1.5,
    "MinBackward1": 2.25,
    "MinimumBackward": 1.5,
    "NativeBatchNormBackward": 1,
    "NormBackward": 1,
    "PowBackward": 2,
    "PowBackward1": 4.25,
    "PowBackward2": 1,
    "PreluKernelBackward": 1,
    "ProdBackward": 1,
    "ReciprocalBackward": 2,
    "RsqrtBackward": 2,
    "ScatterReduceBackward amax": 4.25,
    "ScatterReduceBackward amin": 4.25,
    "ScatterReduceBackward mean": 2,
    "ScatterReduceBackward prod": 6.25,
    "SinBackward": 1,
    "SincBackward": 7,
    "SinhBackward": 1,
    "SqrtBackward": 1,
    "StdBackward": 1,
    "TanBackward": 2,
    "VarBackward": 1,
    "VarMeanBackward": 1,
}
_QUOTIENT = 4  # largest tensors that a quotient makes in all, if its divisor needs a gradient
_PASS = (  # their gradient is what came in, or a view of it
    *("AddBackward", "AliasBackward", "CatBackward", "CloneBackward", "ExpandBackward"),
    *("PermuteBackward", "ReshapeAliasBackward", "SqueezeBackward", "StackBackward"),
    *("SubBackward", "TBackward", "TransposeBackward", "UnsafeViewBackward"),
    *("UnsqueezeBackward", "ViewBackward", "_SumOfRowsBackward", "_RowsBackward"),
)
_VIEWS = (  # what they make lies in the memory of what they read
    *("AliasBackward", "AsStridedBackward", "ChunkBackward", "DetachBackward", "DiagonalBackward"),
    *("ExpandBackward", "PermuteBackward", "ReshapeAliasBackward", "SelectBackward"),
    *("SliceBackward", "SplitBackward", "SplitWithSizesBackward", "SqueezeBackward"),
    *("TBackward", "TransposeBackward", "UnbindBackward", "UnfoldBackward", "UnsafeViewBackward"),
    *("UnsqueezeBackward", "ViewBackward"),
)
_PARTS = ("CatBackward", "StackBackward")  # each gets a part of what came in
_EMPTY = {"_NegativeLogLikelihoodBackward": 0}  # the input whose gradient has no memory
# They give rows that wait a gradient without memory.
_READ_ROWS = ("_ApplyBackward", "_ExtremesBackward", "_ScaleRowsBackward", "_SumOfRowsBackward")
_ROWS = "_RowsBackward"  # hands on what has no memory, too
_REDUCING = ("MulBackward", "DivBackward")  # a broadcast factor: the whole product, then its sum
_NONE = (-1, 0)  # an input that needs no gradient
_DIFFERENCE = "SubBackward"  # its second input gets what came in with the other sign


@dataclass(frozen=True)
class BackwardOp:
    """One op of the backward graph.

    nth     autograd's number of it: the later it was made, the higher
    name    as autograd calls it; of a reduction over indices followed by which one it is
    takes   bytes of the gradient of each tensor that the op made
    gives   (node, which of its tensors) for each input of the op; node -1: it needs no gradient
    stays   what it takes is the gradient of a leaf, which has none yet
    reads   (node, which of its tensors) of what it has saved, where the user's hooks hold it
    workspace  bytes that it is known to take beside gradients
    is_older   its op ran before the forward that the graph is of
    """

    nth: int
    name: str
    takes: tuple[int, ...]
    gives: tuple[tuple[int, int], ...] = ()
    stays: bool = False
    reads: tuple[tuple[int, int], ...] = ()
    workspace: int = 0
    is_older: bool = False

    @property
    def is_leaf(self) -> bool:
        """True if the node hands its gradient to no other node."""
        return not self.gives


@dataclass(frozen=True)
class Graph:
    """The ops that backward will run.

    roots   (node, which of its tensors) that gradients come into
    least_roots  those that no other one leads to: the least that a loss reads of a forward, if it
            is not to leave saved tensors unread
    asks    for each saved storage, the `nth` of the node that has made each save
    hidden  for each checkpoint of the user's the ranges of `nth`, from and up to, of nodes that its
            hooks hold for; it puts all of that back at once
    """

    nodes: tuple[BackwardOp, ...] = ()
    roots: tuple[tuple[int, int], ...] = ()
    asks: tuple[tuple[int, ...], ...] = ()
    hidden: tuple[tuple[tuple[int, int], ...], ...] = ()
    least_roots: tuple[tuple[int, int], ...] = ()

    def followed_by(self, later: "Graph") -> "Graph":
        """Returns this graph joined with that of a forward that ran after this one.

        What the later one has made of this one's outputs hands its gradients to them: a loss of the
        model's outputs, say. They have come from elsewhere, then, and are roots no more.
        """
        shift = len(self.nodes)
        places = {-1: -1} | {at: at + shift for at in range(len(later.nodes))}
        outputs = {
            (self.nodes[to].name, self.nodes[to].takes): to for to, _ in reversed(self.roots)
        }
        for at, node in enumerate(later.nodes):
            if node.is_older:
                places[at] = outputs.get((node.name, node.takes), at + shift)
        moved = (
            replace(
                node,
                gives=tuple((places[to], k) for to, k in node.gives),
                reads=tuple((places[to], k) for to, k in node.reads),
            )
            for node in later.nodes
        )
        read, waiting, seen = set(), [to for to, _ in later.roots], set[int]()
        while waiting:
            at = waiting.pop()
            if at in seen or at < 0 or places[at] < shift:
                continue
            seen.add(at)
            read |= {(places[to], k) for to, k in later.nodes[at].gives}
            waiting += [to for to, _ in later.nodes[at].gives]
        mine, least_of_mine = (
            tuple(root for root in roots if root not in read)
            for roots in (self.roots, self.least_roots)
        )
        roots = mine + tuple((to + shift, k) for to, k in later.roots)
        asks, hidden = self.asks + later.asks, self.hidden + later.hidden
        least = least_of_mine + tuple((to + shift, k) for to, k in later.least_roots)
        return Graph((*self.nodes, *moved), roots, asks, hidden, least)

    def begins_at(self, other: "Graph") -> bool:
        """Returns whether gradients come into any root of another graph, which this begins with."""
        return not other.roots or any(root in self.roots for root in other.roots)


@dataclass(frozen=True)
class OpPeak:
    """Largest bytes that one op of backward takes, apart from what it has saved.

    nth      its number
    nbytes   gradients that wait, that it makes, and what lies between
    waits    gradients that wait as it begins, its own counted
    stay     of gradients that stay: those so far, its own counted
    hidden   of what the user's hooks have put back for it: a checkpoint of the user's
    """

    nth: int
    nbytes: int
    waits: int
    stay: int
    hidden: int = 0
    is_leaf: bool = False


@dataclass
class _Gradients:
    """Gradients in memory: each counts once, for as long as anybody holds it."""

    nbytes: int = 0
    _size: dict[int, int] = field(default_factory=dict)
    _holders: dict[int, int] = field(default_factory=dict)

    def make(self, nbytes: int) -> int:
        """Adds a new gradient with one holder; returns its number."""
        one = len(self._size)
        self._size[one], self._holders[one] = nbytes, 1
        self.nbytes += nbytes
        return one

    def size(self, one: int) -> int:
        return self._size[one]

    def is_shared(self, one: int) -> bool:
        return self._holders[one] > 1

    def hold(self, one: int) -> int:
        self._holders[one] += 1
        return one

    def drop(self, one: int) -> None:
        self._holders[one] -= 1
        if not self._holders[one]:
            self.nbytes -= self._size[one]


def run(graph: Graph) -> list[OpPeak]:
    """Returns all ops of backward, in the order in which they will run."""
    return list(_Backward(graph).moments())


class _Backward:
    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.nodes
        self._gradients = _Gradients()
        self._came: dict[int, dict[int, int]] = defaultdict(dict)  # by node and tensor
        self._missing = [0] * len(graph.nodes)
        for at in _reached(graph):  # what no root leads to gives nothing that anyone waits for
            for to, _ in graph.nodes[at].gives:
                if to >= 0:
                    self._missing[to] += 1
        self._peak = self._stay = 0
        self._hidden = _Hidden(graph)
        for to, which in graph.roots:
            self._give(to, which, self._gradients.make(graph.nodes[to].takes[which]))
        ready = {to for to, _ in graph.roots if not self._missing[to]}
        self._ready = [(-graph.nodes[to].nth, to) for to in ready]

    def moments(self) -> Iterator[OpPeak]:
        heapq.heapify(self._ready)
        while self._ready:
            _, at = heapq.heappop(self._ready)
            node = self._nodes[at]
            waits = self._peak = self._gradients.nbytes
            self._run(at, node)
            hidden = self._hidden.read_by(at)
            yield OpPeak(node.nth, self._peak, waits, self._stay, hidden, node.is_leaf)

    def _run(self, at: int, node: BackwardOp) -> None:
        came = self._came.pop(at, {})
        if node.is_leaf:
            if node.stays:
                self._stay += sum(map(self._gradients.size, came.values()))
            for one in came.values():
                self._gradients.drop(one)
            self._peak = self._gradients.nbytes
            return
        made = [
            (to, which, self._made(node, nth, to, which, came))
            for nth, (to, which) in enumerate(node.gives)
        ]
        self._peak = max(self._peak, self._gradients.nbytes + _between(node, self._nodes))
        for one in came.values():
            self._gradients.drop(one)
        for to, which, gradient in made:
            if to >= 0:
                self._give(to, which, gradient)
                self._missing[to] -= 1
                if not self._missing[to]:
                    heapq.heappush(self._ready, (-self._nodes[to].nth, to))

    def _made(self, node: BackwardOp, nth: int, to: int, which: int, came: dict[int, int]) -> int:
        if to < 0:
            return -1
        is_rows = self._nodes[to].name == _ROWS and node.name in _READ_ROWS
        if is_rows or _EMPTY.get(node.name) == nth:
            return self._gradients.make(0)
        nbytes, name = self._nodes[to].takes[which], _stripped(node.name)
        is_new = nth == 1 and name == _DIFFERENCE
        if len(came) == 1 and name in _PASS and not is_new:
            (one,) = came.values()
            sizes = (nbytes, 0) if node.name == _ROWS else (nbytes,)
            if self._gradients.size(one) in sizes or node.name.startswith(_PARTS):
                return self._gradients.hold(one)
        return self._gradients.make(nbytes)

    def _give(self, to: int, which: int, gradient: int) -> None:
        """Hands over a gradient, and adds it to one that has come before."""
        before = self._came[to].get(which)
        if before is None:
            self._came[to][which] = gradient
            return
        if self._gradients.is_shared(before):
            self._came[to][which] = self._gradients.make(self._nodes[to].takes[which])
            self._peak = max(self._peak, self._gradients.nbytes)
            self._gradients.drop(before)
        self._gradients.drop(gradient)


def _reached(graph: Graph) -> set[int]:
    """Returns the nodes that a gradient of the roots comes to, by index."""
    found = {to for to, _ in graph.roots}
    waiting = list(found)
    while waiting:
        new = {to for to, _ in graph.nodes[waiting.pop()].gives if to >= 0} - found
        found |= new
        waiting += new
    return found


def _between(node: BackwardOp, nodes: tuple[BackwardOp, ...]) -> int:
    """Returns the bytes that a node's formula takes beside what came in and what comes out."""
    name = _stripped(node.name)
    sizes = [nodes[to].takes[which] for to, which in node.gives if to >= 0]
    largest = max(*node.takes, *sizes, 0)
    times = _BETWEEN.get(node.name, _BETWEEN.get(name, 0))
    second = node.gives[1] if len(node.gives) == 2 else _NONE
    if second[0] >= 0 and name == "DivBackward":
        return node.workspace + _QUOTIENT * largest - sum(sizes)
    if name in _REDUCING:
        times += sum(size < largest for size in sizes)
    elif second[0] >= 0 and name == _DIFFERENCE:
        times += nodes[second[0]].takes[second[1]] < largest
    return node.workspace + int(times * largest)


@lru_cache(4096)
def _stripped(name: str) -> str:
    """Returns the name of a node without the number of its overload."""
    op, *rest = name.split(" ")
    return " ".join((op.rstrip("0123456789"), *rest))


class _Hidden:
    """Bytes that checkpoints of the user's have put back in backward.

    As a node of a piece runs, all that the piece has saved is put back at once; each tensor goes as
    the last node has run that reads it. A tensor counts once, however many nodes and views of it
    have saved it, and parameters are there anyway. What a piece begins with is held by its
    checkpoint, counts apart for the node that asks first, and stays until the piece has read it.
    A piece inside of another one begins with what that one has put back.
    """

    def __init__(self, graph: Graph) -> None:
        self.nbytes = 0
        self._nodes = graph.nodes
        self._piece: dict[int, int] = {}  # by node
        self._around = _around(graph.hidden)
        self._waits: list[list[_Put]] = [[] for _ in graph.hidden]  # to be put back, by piece
        self._given: list[list[_Put]] = [[] for _ in graph.hidden]  # what each piece begins with
        self._read_by: dict[int, list[_Put]] = defaultdict(list)
        self._are_back: set[int] = set()
        if graph.hidden:
            self._note(graph)

    def _note(self, graph: Graph) -> None:
        at = {node.nth: i for i, node in enumerate(graph.nodes) if not node.is_leaf}
        reached = _reached(graph)
        for piece, ranges in enumerate(graph.hidden):
            inside = [at[n] for first, end in ranges for n in range(first, end) if n in at]
            readers: dict[tuple[int, int], set[int]] = defaultdict(set)
            for i in reached.intersection(inside):
                self._piece[i] = piece
                for read in graph.nodes[i].reads:
                    readers[self._base(read)].add(i)
            for (node, which), by in readers.items():
                if not graph.nodes[node].is_leaf:
                    put = _Put(graph.nodes[node].takes[which], len(by))
                    self._put_by(graph, piece, graph.nodes[node].nth).append(put)
                    for i in by:
                        self._read_by[i].append(put)

    def _put_by(self, graph: Graph, piece: int, made: int) -> list["_Put"]:
        """Returns the list that a tensor belongs to which a piece reads.

        That is the piece's own, that of one around it, or that of what the piece begins with.
        made: the number of the node that has made the tensor
        """
        within: int | None = piece
        while within is not None:
            if made >= graph.hidden[within][0][0]:
                return self._waits[within]
            within = self._around[within]
        return self._given[piece]

    def _base(self, read: tuple[int, int]) -> tuple[int, int]:
        """Returns the tensor that this one is a view of, or itself."""
        at, which = read
        while _stripped(self._nodes[at].name) in _VIEWS and self._nodes[at].gives:
            before, k = self._nodes[at].gives[0]
            if before < 0:
                break
            at, which = before, k
        return at, which

    def read_by(self, at: int) -> int:
        """Returns the bytes that are back while this node runs; then what it has read goes."""
        piece = self._piece.get(at)
        if piece is None:
            return self.nbytes
        given = self._put_back(piece)
        now = self.nbytes
        self.nbytes += given
        for put in self._read_by.pop(at, ()):
            put.readers -= 1
            if not put.readers:
                self.nbytes -= put.nbytes
        return now

    def _put_back(self, piece: int) -> int:
        """Puts back what a piece has saved, and what those around it have.

        Returns the bytes that it begins with.
        """
        if piece in self._are_back:
            return 0
        self._are_back.add(piece)
        around = self._around[piece]
        given = 0 if around is None else self._put_back(around)
        self.nbytes += sum(put.nbytes for put in self._waits[piece])
        return given + sum(put.nbytes for put in self._given[piece])


@dataclass
class _Put:
    """A tensor that a checkpoint puts back. readers: nodes that are still to read it."""

    nbytes: int
    readers: int


def _around(pieces: tuple[tuple[tuple[int, int], ...], ...]) -> list[int | None]:
    """Returns, for each piece, the smallest one that begins before it and ends after it."""
    spans = [(ranges[0][0], ranges[-1][1]) for ranges in pieces]
    found: list[int | None] = []
    for first, end in spans:
        around = [
            i for i, (a, b) in enumerate(spans) if a <= first and end <= b and b - a > end - first
        ]
        found.append(min(around, key=lambda i: spans[i][1] - spans[i][0], default=None))
    return found
