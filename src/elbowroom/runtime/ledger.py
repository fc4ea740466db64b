"""Elbowroom's own count of bytes: what autograd would hold, what is held instead, and why.

Every saved storage that is not a parameter has one `Entry`, from the first op that saves it until
the last one releases it. The figures are those of the fullest moment: when the entries alive would
take most bytes in plain autograd, which is just before backward. Parameters are not counted;
scalars and small tensors are.
"""

import io
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elbowroom.plan.site import NO_MODULE, SMALL, without_prefix
from elbowroom.units import show_nbytes


@dataclass(frozen=True)
class LedgerRow:
    """Sums over the saved tensors that share module, consumer, dtype and fate."""

    module: str
    consumer: str
    dtype: str
    action: str
    why: str
    count: int
    before_nbytes: int
    after_nbytes: int
    away_nbytes: int = 0


@dataclass(eq=False)
class Entry:
    """One storage: its bytes in plain autograd, and what is held for it now.

    away_nbytes: what is held for it in another tier, and not on its own device.
    counts: whether it counts the held bytes
    notes_requests: whether it notes that backward asks for the storage
    """

    _ledger: "weakref.ref[Ledger]"  # no cycle: garbage of each step would start the collector
    module: str
    consumer: str
    dtype: str
    before_nbytes: int

    # Not fields: most entries have these values when they are made.
    counts = notes_requests = True
    action = why = ""
    after_nbytes = away_nbytes = 0
    born = died = 0  # by the ledger's clock; 0: not yet

    def hold(self, nbytes: int) -> None:
        """Sets the bytes that are held, here or away."""
        ledger = self._ledger()
        if ledger is not None:
            ledger._change(self, nbytes - self.away_nbytes, self.away_nbytes)

    def move_away(self, nbytes: int) -> None:
        """Sets how many of them are away from now on, and not here. From any thread."""
        ledger = self._ledger()
        if ledger is not None:
            held = self.after_nbytes + self.away_nbytes
            ledger._change(self, held - nbytes, nbytes)

    def ask(self) -> None:
        """Notes that backward requests the storage."""
        ledger = self._ledger()
        if ledger is not None:
            ledger.backward_began = True
            ledger.ends = ledger.ends or not torch.is_grad_enabled()

    def close(self) -> None:
        ledger = self._ledger()
        if ledger is not None:
            ledger._close(self)


class Counted(NamedTuple):
    """Figures of an entry at the fullest moment of a forward that others repeat.

    slot   number of the slot whose bytes these are; negative: the slot is not acted on
    ended  it has ended before the forward did
    """

    module: str
    consumer: str
    dtype: str
    action: str
    why: str
    before_nbytes: int
    after_nbytes: int
    away_nbytes: int
    slot: int
    ended: bool = False


@dataclass(frozen=True)
class Counts:
    """Final figures of a ledger. held_nbytes: at the end of forward."""

    entries: tuple[Counted, ...]
    before_nbytes: int
    after_nbytes: int
    away_nbytes: int
    max_nbytes: int
    held_nbytes: int

    @cached_property
    def by_slot(self) -> dict[int, Counted]:
        """The slots that are acted on, by their numbers."""
        return {e.slot: e for e in self.entries if e.slot >= 0}

    @cached_property
    def kept_nbytes(self) -> int:
        """Bytes that are held for all others."""
        return self.held_nbytes - sum(e.after_nbytes for e in self.by_slot.values() if not e.ended)


class LedgerMark(NamedTuple):
    """Figures of a ledger at a moment; later counts belong to another forward."""

    clock: int
    before_nbytes: int
    after_nbytes: int
    away_nbytes: int
    max_nbytes: int
    held_nbytes: int


class NoEntry:
    """Entry of a slot in a replayed forward, in place of an `Entry`: it counts nothing."""

    counts = notes_requests = False
    action = why = ""
    before_nbytes = after_nbytes = 0

    def hold(self, nbytes: int) -> None:
        """Ignores the bytes that are held."""

    def move_away(self, nbytes: int) -> None:
        """Ignores the bytes that are elsewhere from now on."""

    def ask(self) -> None:
        """Does nothing when backward requests the storage."""

    def close(self) -> None:
        """Does nothing when the slot is not used any more."""


NOT_COUNTED = NoEntry()


class _GraphToken:
    """Token that lives as long as the graph of a forward's results, as a hook of its nodes.

    Where a backward makes a graph (create_graph=True), this graph may read what the forward has
    saved when the results are gone. So the token becomes a hook of all nodes of the forward.
    """

    __slots__ = ("__weakref__", "_known", "_numbers", "backward_began", "ends", "over")

    def __init__(self, numbers: range) -> None:
        """numbers: of the nodes that the forward has made."""
        self.backward_began = self.ends = False
        self.over: list[Callable[[], None]] = []
        self._numbers, self._known = numbers, set[int]()

    def begins(self, *_: Any) -> None:
        """Called when backward has come to a result."""
        self.backward_began = True
        self.comes()
        if not self.ends:
            self._follow_from(torch._C._current_autograd_node())

    def comes(self, *_: Any) -> None:
        """Called when a backward has come to one of the nodes."""
        if not torch.is_grad_enabled():  # else create_graph=True: another backward follows
            self.ends = True
            self.__del__()

    def _follow_from(self, node: Any) -> None:
        todo = [node]
        while todo:
            for fn, _ in todo.pop().next_functions:
                nth = -1 if fn is None else fn._sequence_nr()
                if nth in self._numbers and nth not in self._known:
                    self._known.add(nth)
                    fn.register_prehook(self.comes)
                    todo.append(fn)

    def __del__(self) -> None:
        while self.over:
            self.over.pop()()


class Tally:
    """Bytes of a forward that are not counted anew: as many as when its script was learned.

    They are held from the end of forward until backward begins, or the graph is freed.
    """

    def __init__(self, held_nbytes: int, before_nbytes: int) -> None:
        self.after_nbytes = self.max_nbytes = held_nbytes
        self.before_nbytes = before_nbytes
        self._graph: weakref.ref[_GraphToken] | None = None
        self._since = torch._C._autograd._get_sequence_nr()

    def follow(self, out: Any) -> None:
        """Follows the graph of a forward that has run since this was made, with these results."""
        graph = _GraphToken(range(self._since, torch._C._autograd._get_sequence_nr()))
        for x in (out,) if type(out) is Tensor else tree_leaves(out):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(graph.begins)
        self._graph = weakref.ref(graph)

    def when_over(self, call: Callable[[], None]) -> None:
        """Calls `call` once the bytes are held no more."""
        graph = None if self._graph is None else self._graph()
        if graph is None or graph.ends:
            call()
        else:
            graph.over.append(call)

    def move_to(self, ledger: "Ledger") -> None:
        """Lets a ledger count the bytes from now on."""
        entry = ledger.open("", "replayed", "", self.before_nbytes)
        entry.hold(self.after_nbytes)
        self.after_nbytes = 0
        self.when_over(entry.close)

    @property
    def waits(self) -> bool:
        """True if the graph is there, and no backward has come to its results."""
        graph = None if self._graph is None else self._graph()
        return graph is not None and not graph.backward_began

    @property
    def waits_again(self) -> bool:
        """True if a backward has come with create_graph=True, and the next is still to come."""
        graph = None if self._graph is None else self._graph()
        return graph is not None and graph.backward_began and not graph.ends

    @property
    def held_nbytes(self) -> int:
        """Bytes that are held now."""
        graph = None if self._graph is None else self._graph()
        return 0 if graph is None or graph.ends else self.after_nbytes


class Account(ABC):
    """Base class of ledgers that are shown; compare `before_nbytes` with `after_nbytes`.

    away_nbytes  what was in host memory or in a file instead, at the same moment
    max_nbytes  the most that was held at any moment
    held_nbytes  what is held now
    """

    before_nbytes: int
    after_nbytes: int
    away_nbytes: int
    max_nbytes: int
    held_nbytes: int

    @property
    @abstractmethod
    def rows(self) -> list[LedgerRow]:
        """The saved tensors of the fullest moment, in order of saving.

        They are summed by module, consumer, dtype and fate.
        """

    def totals(self, by: str) -> dict[str, tuple[int, int]]:
        """Returns bytes in plain autograd and bytes held, summed by one field of the rows.

        by: "action", "module", "dtype", "consumer" or "why"
        """
        sums: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            before, after = sums.get(getattr(row, by), (0, 0))
            sums[getattr(row, by)] = before + row.before_nbytes, after + row.after_nbytes
        return sums

    def __str__(self) -> str:
        return _render(self)

    def __repr__(self) -> str:
        before, after = show_nbytes(self.before_nbytes), show_nbytes(self.after_nbytes)
        return f"Ledger({before} -> {after})"  # whatever the kind: readers do not distinguish them


class Ledger(Account):
    """Counts of one `saving` context.

    backward_began: backward has begun.
    ends: one has begun that makes no graph (create_graph=True does), so that no other follows.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close an entry inside any of our own lines.
        self._lock = threading.RLock()
        self._weak = weakref.ref(self)
        self._entries: dict[int, Entry] = {}
        self._clock = 0
        self._plain_nbytes = 0
        self._fullest = 0
        self._dead = 0
        self.backward_began = self.ends = False
        self.held_nbytes = self.max_nbytes = 0
        self.held_away_nbytes = 0
        self.before_nbytes = 0
        self.after_nbytes = 0
        self.away_nbytes = 0

    def open(self, module: str, consumer: str, dtype: str, before_nbytes: int) -> Entry:
        """A new entry for a storage of `before_nbytes`."""
        entry = Entry(self._weak, module, consumer, dtype, before_nbytes)
        with self._lock:
            self._clock += 1
            entry.born = self._clock
            self._entries[entry.born] = entry
            self._plain_nbytes += before_nbytes
            if self._plain_nbytes > self.before_nbytes:
                self._note_fullest()
        return entry

    @property
    def rows(self) -> list[LedgerRow]:
        """The saved tensors of the fullest moment."""
        return summed(self._of_fullest())

    @property
    def times_less(self) -> float:
        """Ratio of the bytes that plain autograd would hold now to those that are held."""
        return self._plain_nbytes / max(self.held_nbytes, 1)

    def so_far(self) -> tuple[int, int]:
        """Bytes that plain autograd would hold now, and those that are held."""
        return self._plain_nbytes, self.held_nbytes

    def mark(self) -> LedgerMark:
        """Returns a mark of the current moment."""
        sums = self.before_nbytes, self.after_nbytes, self.away_nbytes
        return LedgerMark(self._clock, *sums, self.max_nbytes, self.held_nbytes)

    def counts(self, slot_of: Callable[[Entry], int], since: LedgerMark) -> Counts:
        """Returns what a forward has added to the ledger, for forwards that repeat it.

        slot_of: entry -> the number of its slot, or a negative one
        since: the mark of the ledger before that forward
        """
        entries = tuple(
            Counted(
                *(e.module, e.consumer, e.dtype, e.action, e.why),
                *(e.before_nbytes, e.after_nbytes, e.away_nbytes, slot_of(e), e.died > 0),
            )
            for e in self._of_fullest()
            if e.born > since.clock
        )
        _, *now = self.mark()
        _, *before = since
        return Counts(entries, *(x - y for x, y in zip(now, before, strict=True)))

    def _of_fullest(self) -> list[Entry]:
        with self._lock:
            return [
                entry
                for entry in self._entries.values()
                if entry.born <= self._fullest and not 0 < entry.died <= self._fullest
            ]

    def _change(self, entry: Entry, nbytes: int, away_nbytes: int) -> None:
        with self._lock:
            if entry.died:
                return
            self.held_nbytes += nbytes - entry.after_nbytes
            self.max_nbytes = max(self.max_nbytes, self.held_nbytes)
            self.held_away_nbytes += away_nbytes - entry.away_nbytes
            entry.after_nbytes, entry.away_nbytes = nbytes, away_nbytes
            if entry.born <= self._fullest and self._plain_nbytes == self.before_nbytes:
                self.after_nbytes, self.away_nbytes = self.held_nbytes, self.held_away_nbytes

    def _close(self, entry: Entry) -> None:
        with self._lock:
            if entry.died:
                return
            self._clock += 1
            entry.died = self._clock
            self.held_nbytes -= entry.after_nbytes
            self.held_away_nbytes -= entry.away_nbytes
            self._plain_nbytes -= entry.before_nbytes
            if entry.born > self._fullest:
                del self._entries[entry.born]
            else:
                self._dead += 1

    def _note_fullest(self) -> None:
        if self._dead:
            self._entries = {born: entry for born, entry in self._entries.items() if not entry.died}
            self._dead = 0
        self._fullest = self._clock
        self.before_nbytes = self._plain_nbytes
        self.after_nbytes, self.away_nbytes = self.held_nbytes, self.held_away_nbytes


def summed(entries: Iterable[Entry | Counted]) -> list[LedgerRow]:
    """Returns sums by module, consumer, dtype and fate, in order of saving.

    Several calls of one module are one.
    """
    groups: dict[tuple[str, str, str, str, str], list[Entry | Counted]] = defaultdict(list)
    for entry in entries:
        module = without_prefix(entry.module)
        key = module, entry.consumer, entry.dtype, entry.action, entry.why
        groups[key].append(entry)
    return [
        LedgerRow(
            *key,
            len(part),
            sum(e.before_nbytes for e in part),
            sum(e.after_nbytes for e in part),
            sum(e.away_nbytes for e in part),
        )
        for key, part in groups.items()
    ]


class Ledgers(Account):
    """The counts of several contexts, whose graphs wait for the same backward."""

    def __init__(self, parts: Sequence[Account]) -> None:
        self._parts = parts

    @property
    def rows(self) -> list[LedgerRow]:
        """The saved tensors of the fullest moment of each."""
        return [row for part in self._parts for row in part.rows]

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_nbytes"):
            raise AttributeError(name)
        return sum(getattr(part, name) for part in self._parts)


def _render(ledger: Account) -> str:
    if not ledger.before_nbytes:
        return (
            "saved tensors: none. Forward ran without gradients, inside a compiled function "
            "(open the context around its call instead), by a plan that changes nothing, or not at "
            "all.\n"
        )
    from rich.console import Console  # most trainings draw no table
    from rich.table import Table
    from rich.text import Text

    before, after = show_nbytes(ledger.before_nbytes), show_nbytes(ledger.after_nbytes)
    any_away = ledger.away_nbytes > 0
    away = f", and {show_nbytes(ledger.away_nbytes)} away" if any_away else ""
    table = Table(title=f"saved tensors: {before} -> {after}{away}")
    for name in ("module", "saved by", "dtype", "action", "n"):
        table.add_column(name, justify="right" if name == "n" else "left")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    if any_away:
        table.add_column("away", justify="right")
    table.add_column("left alone because")
    for row in _shown(ledger.rows):
        sizes = [show_nbytes(row.before_nbytes), show_nbytes(row.after_nbytes)]
        if any_away:
            sizes.append(show_nbytes(row.away_nbytes) if row.away_nbytes else "")
        why = row.why if row.action == "keep" else ""
        named = row.module or NO_MODULE, row.consumer, row.dtype, row.action, str(row.count)
        cells = (*named, *sizes, why)
        table.add_row(*(Text(cell) for cell in cells))  # "[mask]" is a name, and no markup
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def _shown(rows: Iterable[LedgerRow]) -> list[LedgerRow]:
    """Returns the rows of the table, largest first; all small tensors share the last one."""
    rows = sorted(rows, key=lambda row: -row.before_nbytes)
    small = [row for row in rows if row.why == SMALL]
    if len(small) < 2:
        return rows
    names = ("count", "before_nbytes", "after_nbytes", "away_nbytes")
    sums = {name: sum(getattr(row, name) for row in small) for name in names}
    others = LedgerRow("", "others", "", small[0].action, SMALL, **sums)
    return [*(row for row in rows if row.why != SMALL), others]
