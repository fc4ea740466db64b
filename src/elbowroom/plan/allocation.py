"""Chooses a setting for each tensor: the fewest bytes within an error, or the least error in bytes.

    minimize    sum of bytes      subject to   sum of variances <= allowed      (`cheapest`)
    minimize    sum of variances  subject to   sum of bytes     <= allowed      (`quietest`)

Both walk the same path. All tensors start at their mildest setting; each move takes one tensor one
setting further along the lower convex hull of its settings, always the move that adds the least
variance for a byte saved. On the hull such moves only get worse, so at every point of the path no
other choice of its bytes has less variance: the answer is optimal up to the one move that would
cross the limit (Lagrange; the greedy of ActNN, arXiv 2104.14129, and GACT is the same walk over
numbers of bits).
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class CodeChoice(NamedTuple):
    """One setting of one tensor: the bytes it holds, and the gradient variance it adds."""

    nbytes: float
    variance: float


class _PricedMove(NamedTuple):
    """A move of tensor `which` to option `to`; price: variance added for a byte saved."""

    price: float
    which: int
    to: int
    variance: float
    nbytes: float  # saved


def cheapest(tensors: Sequence[Sequence[CodeChoice]], allowed_variance: float) -> list[int]:
    """An option for each tensor, with the fewest bytes in all that the variance allows.

    If even the mildest ones exceed it, these are returned.
    """
    chosen = [_mildest(options) for options in tensors]
    left = allowed_variance - sum(
        options[i].variance for options, i in zip(tensors, chosen, strict=True)
    )
    stuck: set[int] = set()
    for move in _path(tensors):
        if move.which in stuck:
            continue
        if move.variance > left:  # this tensor stays; a smaller move of another may still fit
            stuck.add(move.which)
            continue
        left -= move.variance
        chosen[move.which] = move.to
    return chosen


def quietest(tensors: Sequence[Sequence[CodeChoice]], allowed_nbytes: float) -> list[int]:
    """An option for each tensor, with the least variance in all that the bytes allow.

    If even the smallest ones exceed them, these are returned.
    """
    chosen = [_mildest(options) for options in tensors]
    held = sum(options[i].nbytes for options, i in zip(tensors, chosen, strict=True))
    for move in _path(tensors):
        if held <= allowed_nbytes:
            break
        held -= move.nbytes
        chosen[move.which] = move.to
    return chosen


def _path(tensors: Sequence[Sequence[CodeChoice]]) -> Iterator[_PricedMove]:
    """Returns all moves from the mildest to the smallest, the best price first."""
    steps = [_steps(which, options) for which, options in enumerate(tensors)]
    heap = [first for moves in steps if (first := next(moves, None)) is not None]
    heapq.heapify(heap)
    while heap:
        move = heap[0]
        after = next(steps[move.which], None)
        if after is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, after)
        yield move


def _steps(which: int, options: Sequence[CodeChoice]) -> Iterator[_PricedMove]:
    """The moves of one tensor along its hull."""
    at = _mildest(options)
    while True:
        best: _PricedMove | None = None
        for to, option in enumerate(options):
            saved = options[at].nbytes - option.nbytes
            if saved > 0:
                added = option.variance - options[at].variance
                move = _PricedMove(added / saved, which, to, added, saved)
                best = move if best is None or move < best else best
        if best is None:
            return
        yield best
        at = best.to


def _mildest(options: Sequence[CodeChoice]) -> int:
    return min(range(len(options)), key=lambda i: (options[i].variance, options[i].nbytes))
