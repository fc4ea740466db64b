"""Fetches offloaded tensors a little before backward needs them.

Tensors that are offloaded before one of them is requested form a round: usually one forward. In the
next round of the same sites, they are requested in the same order, so each request starts those
that came next. Before that, or where the order differs, the guess is autograd's usual order: last
in, first out. (An op's own tensors come first in, first out: all of attention's would be missed.)

    put      a b c d          a round; it ends with the first request
    asked    d b c a          remembered under the sites of a b c d
    request for d: starts b, c, as far as the window reaches

A wrong guess only costs time. A tensor that was fetched too early, and not requested while others
were, is released again when its memory is needed. Nothing here holds a handle: rounds refer to them
weakly, and only numbers are remembered.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol
from weakref import WeakValueDictionary

from elbowroom.runtime.tiers.window import MAX_NBYTES, MAX_TENSORS

_LOOKAHEAD = 8  # number of candidates to check for one worth starting
_MAX_ORDERS = 32
_MAX_PASSES = 4  # of one round, under retain_graph: the order is known by then


class Movable(Protocol):
    """Interface of a handle whose tensor can be brought back early."""

    @property
    def away_nbytes(self) -> int:
        """Bytes that must be brought back before it can be restored; 0: none, now."""
        ...

    @property
    def is_early(self) -> bool:
        """True if it is back, or on its way, and was not requested yet."""
        ...

    def prefetch(self) -> None:
        """Starts to bring the tensor back."""
        ...

    def let_go(self) -> None:
        """Drops the prefetched tensor."""
        ...


class Round:
    """Handles in the order in which they were put, and the order of their requests."""

    def __init__(self) -> None:
        self.handles: WeakValueDictionary[int, Movable] = WeakValueDictionary()
        self.count = 0
        self.signature = 0
        self.asked: list[int] | None = None
        self._guess: list[int] = []
        self._at = 0

    def put(self, handle: Movable, name: Hashable) -> int:
        self.handles[self.count] = handle
        self.signature = hash((self.signature, name))
        self.count += 1
        return self.count - 1

    def begin(self, guess: list[int]) -> list[int]:
        """Begins with the first request; returns the list that will hold the order."""
        self._guess, self.asked = guess, []
        return self.asked

    def after(self, index: int) -> Iterator[int]:
        """Yields the indices of handles that are probably requested next."""
        guess = self._guess
        for start in (self._at, 0):
            try:
                self._at = guess.index(index, start) + 1
            except ValueError:
                continue
            yield from islice(guess, self._at, None)
            break
        yield from range(index - 1, -1, -1)


@dataclass(frozen=True)
class RoundPosition:
    """Position of one handle in its round."""

    round: Round
    index: int


class Orders:
    """Orders of requests in earlier rounds, by the signature of a round."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, around: Round) -> None:
        """Begins the requests of a round: their order is known for the next one of these sites."""
        with self._lock:
            guess = self._known.pop(around.signature, [])
            self._known[around.signature] = around.begin(guess)
            while len(self._known) > _MAX_ORDERS:
                self._known.popitem(last=False)


ORDERS = Orders()  # of the process: a context with a seed of its own may last for one step


class Prefetcher:
    """Prefetcher of one training: the tensors that are prefetched at present.

    found, missed   requests for what was back early, or on its way; and for what was not
    """

    def __init__(
        self,
        max_tensors: int = MAX_TENSORS,
        max_nbytes: int = MAX_NBYTES,
        orders: Orders = ORDERS,
    ) -> None:
        self.max_tensors, self.max_nbytes = max_tensors, max_nbytes
        self.found = self.missed = 0
        self._round = Round()
        self._orders = orders
        self._early: WeakValueDictionary[int, Movable] = WeakValueDictionary()
        self._busy = threading.Lock()  # if it is taken, nothing is started

    def put(self, handle: Movable, name: Hashable) -> RoundPosition:
        """Adds a handle that was made; returns its place."""
        if self._round.asked is not None:
            self._round = Round()
        return RoundPosition(self._round, self._round.put(handle, name))

    def asked(self, place: RoundPosition, handle: Movable, *, was_early: bool | None) -> None:
        """Starts what is probably needed next, while a handle is being restored.

        was_early: None if nothing had to be fetched for it.
        """
        self.found += was_early is True
        self.missed += was_early is False
        if not self._busy.acquire(blocking=False):
            return
        try:
            self._early.pop(id(handle), None)
            self._note(place)
            self._start(place, was_early)
        finally:
            self._busy.release()

    def _note(self, place: RoundPosition) -> None:
        around = place.round
        if around.asked is None:
            self._orders.begin(around)
        if around.asked is not None and len(around.asked) < _MAX_PASSES * around.count:
            around.asked.append(place.index)

    def _start(self, place: RoundPosition, was_early: bool | None) -> None:
        handles = place.round.handles
        ahead = [handles.get(index) for index in islice(place.round.after(place.index), _LOOKAHEAD)]
        if was_early is False:
            self._let_go_of_all_but(ahead)
        for handle in ahead:
            if handle is None or handle.is_early or not handle.away_nbytes:
                continue
            if not self._has_room(handle.away_nbytes):
                return
            self._early[id(handle)] = handle
            handle.prefetch()

    def _let_go_of_all_but(self, ahead: list[Movable | None]) -> None:
        for handle in list(self._early.values()):
            if all(handle is not one for one in ahead):
                handle.let_go()
                self._early.pop(id(handle), None)

    def _has_room(self, nbytes: int) -> bool:
        early = [one.away_nbytes for one in list(self._early.values()) if one.is_early]
        return not early or (
            len(early) < self.max_tensors and sum(early) + nbytes <= self.max_nbytes
        )
