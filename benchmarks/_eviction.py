"""Online eviction over a recorded step, with addresses: DTR against Coop.

A trace is the ops of a step in order. Each reads tensors and makes some; a tensor dies after its
last reader. Memory is a line of `budget` bytes; a tensor takes the narrowest gap that it
fits. Where none does, tensors that can be rebuilt are evicted; when an op reads one of
those, its own op runs again first, and so on.

    dtr   evicts the tensor with the least  seconds / (bytes * staleness),  again and again, until
          some gap is wide enough: bytes all over memory may go before that
    coop  evicts one stretch: of all runs of neighbors (gaps and what can be evicted) that are wide
          enough together, the one with the least sum of the same scores

What was freed beyond what was asked for, because no gap was wide enough, is `wasted`. DTR: arXiv
2006.09616. Coop: Zhang et al., NeurIPS 2023, arXiv 2311.00591, whose sliding window over addresses
this is; its rules on where a tensor is placed are not here. Pure arithmetic: the seconds are those
of the trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Rule = Literal["dtr", "coop"]


@dataclass(frozen=True)
class TracedOp:
    """One op: the tensors that it reads and makes, by number, and its seconds."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Trace:
    """A step. nbytes: of each tensor; those that no op makes are there throughout, elsewhere."""

    ops: tuple[TracedOp, ...]
    nbytes: tuple[int, ...]


@dataclass
class Outcome:
    """Outcome of a rule on a trace. fits: False if it ran out of memory for good."""

    fits: bool = True
    seconds: float = 0.0
    reruns: int = 0
    evicted_nbytes: int = 0
    wasted_nbytes: int = 0


@dataclass
class _Held:
    """A tensor in memory."""

    tensor: int
    start: int
    nbytes: int
    read_s: float
    pinned: int = 0


class _NoRoomError(Exception):
    """Raised if nothing that may go makes enough room."""


@dataclass
class _Run:
    trace: Trace
    budget: int
    rule: Rule
    out: Outcome = field(default_factory=Outcome)
    held: list[_Held] = field(default_factory=list)  # by address

    def __post_init__(self) -> None:
        self.maker = {t: op for op in self.trace.ops for t in op.makes}
        self.last = {t: at for at, op in enumerate(self.trace.ops) for t in (*op.reads, *op.makes)}
        self.by_tensor: dict[int, _Held] = {}

    def all(self) -> Outcome:
        """Runs every op; returns the outcome."""
        try:
            for at, op in enumerate(self.trace.ops):
                self._run(op)
                # What ran again for this op may have had its last reader long ago.
                for tensor in [one.tensor for one in self.held if self.last[one.tensor] <= at]:
                    self._free(tensor)
        except (_NoRoomError, RecursionError):
            self.out.fits = False
        return self.out

    def _run(self, op: TracedOp) -> None:
        pinned = []
        try:
            for tensor in op.reads:
                pinned.append(self._present(tensor))
            for tensor in op.makes:
                if tensor not in self.by_tensor:
                    pinned.append(self._place(tensor))
        finally:
            for one in pinned:
                if one is not None:
                    one.pinned -= 1
        self.out.seconds += op.seconds
        for one in pinned:
            if one is not None:
                one.read_s = self.out.seconds

    def _present(self, tensor: int) -> _Held | None:
        """The tensor in memory, pinned; None for one that lies elsewhere."""
        if tensor not in self.maker:
            return None
        if tensor not in self.by_tensor:
            self.out.reruns += 1
            self._run(self.maker[tensor])
        one = self.by_tensor[tensor]
        one.pinned += 1
        return one

    def _place(self, tensor: int) -> _Held:
        nbytes = self.trace.nbytes[tensor]
        start = self._gap(nbytes)
        if start is None:
            free = self.budget - sum(one.nbytes for one in self.held)
            gone = self._one_by_one(nbytes) if self.rule == "dtr" else self._stretch(nbytes)
            self.out.evicted_nbytes += gone
            self.out.wasted_nbytes += max(0, gone - max(0, nbytes - free))
            start = self._gap(nbytes)
            if start is None:
                raise _NoRoomError
        one = _Held(tensor, start, nbytes, self.out.seconds, pinned=1)
        self.held.append(one)
        self.held.sort(key=lambda other: other.start)
        self.by_tensor[tensor] = one
        return one

    def _gaps(self) -> list[tuple[int, int]]:
        """Free parts (start, bytes), by address."""
        gaps, at = [], 0
        for one in self.held:
            if one.start > at:
                gaps.append((at, one.start - at))
            at = one.start + one.nbytes
        return [*gaps, (at, self.budget - at)] if at < self.budget else gaps

    def _gap(self, nbytes: int) -> int | None:
        fitting = [(size, start) for start, size in self._gaps() if size >= nbytes]
        return min(fitting)[1] if fitting else None

    def _free(self, tensor: int) -> None:
        one = self.by_tensor.pop(tensor, None)
        if one is not None:
            self.held.remove(one)

    def _score(self, one: _Held) -> float:
        stale_s = self.out.seconds - one.read_s + 1e-9
        return self.maker[one.tensor].seconds / (one.nbytes * stale_s)

    def _one_by_one(self, nbytes: int) -> int:
        gone = 0
        while self._gap(nbytes) is None:
            free = [one for one in self.held if not one.pinned]
            if not free:
                raise _NoRoomError
            worst = min(free, key=self._score)
            gone += worst.nbytes
            self._free(worst.tensor)
        return gone

    def _stretch(self, nbytes: int) -> int:
        """Evicts the cheapest run of neighbors with room for `nbytes`; returns its bytes."""
        best: tuple[float, list[_Held]] | None = None
        for run, low, high in self._runs():
            first, total = 0, 0.0
            scores = [self._score(one) for one in run]
            for last in range(len(run)):
                total += scores[last]
                end = run[last + 1].start if last + 1 < len(run) else high
                while first <= last and end - self._begin(run, first + 1, low) >= nbytes:
                    total -= scores[first]
                    first += 1
                is_wide = end - self._begin(run, first, low) >= nbytes
                if is_wide and (best is None or total < best[0]):
                    best = total, run[first : last + 1]
        if best is None:
            raise _NoRoomError
        for one in best[1]:
            self._free(one.tensor)
        return sum(one.nbytes for one in best[1])

    @staticmethod
    def _begin(run: Sequence[_Held], first: int, low: int) -> int:
        """Returns where the room begins that evicting run[first:] makes, with the gap before it."""
        return low if first == 0 else run[first - 1].start + run[first - 1].nbytes

    def _runs(self) -> list[tuple[list[_Held], int, int]]:
        """Returns runs of neighbors that may go, between two that may not.

        They come with the addresses of their walls.
        """
        runs, run, low = [], list[_Held](), 0
        for one in self.held:
            if one.pinned:
                runs.append((run, low, one.start))
                run, low = [], one.start + one.nbytes
            else:
                run.append(one)
        return [each for each in [*runs, (run, low, self.budget)] if each[0]]


def evict(trace: Trace, budget: int, rule: Rule) -> Outcome:
    """Runs a step in `budget` bytes under a rule."""
    return _Run(trace, budget, rule).all()


def plain_peak(trace: Trace) -> int:
    """Bytes at the worst moment if nothing is evicted and there are no gaps."""
    last = {t: at for at, op in enumerate(trace.ops) for t in (*op.reads, *op.makes)}
    alive: set[int] = set()
    peak = level = 0
    for at, op in enumerate(trace.ops):
        for tensor in op.makes:
            if tensor not in alive:
                alive.add(tensor)
                level += trace.nbytes[tensor]
        peak = max(peak, level)
        for tensor in {*op.reads, *op.makes}:
            if last[tensor] <= at and tensor in alive:
                alive.remove(tensor)
                level -= trace.nbytes[tensor]
    return peak
