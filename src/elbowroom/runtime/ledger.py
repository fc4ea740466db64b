"""Our own count of bytes: what autograd would hold, what we hold instead, and why.

Every saved storage that is not a parameter has one `Entry`, from the first op that saves it to the
last that lets go. The figures are those of the fullest moment: when the entries alive would take
most bytes in plain autograd, which is just before backward. Parameters are not counted; scalars and
small tensors are.
"""

import io
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elbowroom.plan.sequence import without_prefix
from elbowroom.units import show_nbytes


@dataclass(frozen=True)
class Row:
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


class Entry:
    """One storage: its bytes in plain autograd, and what is held for it now.

    away_nbytes: what is held for it in another tier, and not on its own device.
    """

    __slots__ = (
        "_ledger",
        "action",
        "after_nbytes",
        "away_nbytes",
        "before_nbytes",
        "born",
        "consumer",
        "died",
        "dtype",
        "module",
        "why",
    )

    def __init__(
        self, ledger: "Ledger", module: str, consumer: str, dtype: str, before_nbytes: int
    ) -> None:
        self._ledger = ledger._weak  # no cycle: a step's garbage would wake the collector
        self.module, self.consumer, self.dtype = module, consumer, dtype
        self.before_nbytes = before_nbytes
        self.after_nbytes = self.away_nbytes = 0
        self.action, self.why = "", ""
        self.born = self.died = 0

    def hold(self, nbytes: int) -> None:
        """So many bytes are held, here or away."""
        ledger = self._ledger()
        if ledger is not None:
            ledger._change(self, nbytes - self.away_nbytes, self.away_nbytes)

    def move_away(self, nbytes: int) -> None:
        """So many of them are away from now on, and not here. From any thread."""
        ledger = self._ledger()
        if ledger is not None:
            held = self.after_nbytes + self.away_nbytes
            ledger._change(self, held - nbytes, nbytes)

    def ask(self) -> None:
        """Backward asks for it."""
        ledger = self._ledger()
        if ledger is not None:
            ledger.was_asked = True

    def close(self) -> None:
        ledger = self._ledger()
        if ledger is not None:
            ledger._close(self)


class NoEntry:
    """In place of an `Entry`, for the slots of a replayed forward: nothing is counted."""

    __slots__ = ("action", "after_nbytes", "before_nbytes", "why")

    def __init__(self) -> None:
        self.action = self.why = ""
        self.before_nbytes = self.after_nbytes = 0

    def hold(self, nbytes: int) -> None:
        """So many bytes are held."""

    def move_away(self, nbytes: int) -> None:
        """So many bytes are elsewhere from now on."""

    def ask(self) -> None:
        """Backward asks for it."""

    def close(self) -> None:
        """Nobody waits for it any more."""


class _Graph:
    """Lives as long as the graph of a forward's results, whose nodes have it as a hook."""

    __slots__ = ("__weakref__", "over", "was_asked")

    def __init__(self) -> None:
        self.was_asked = False
        self.over: list[Callable[[], None]] = []

    def begins(self, *_: Any) -> None:
        """Backward has come to a result."""
        self.was_asked = True
        self.__del__()

    def __del__(self) -> None:
        while self.over:
            self.over.pop()()


class Tally:
    """What a forward holds that is not counted: as much as it was when that was learned.

    It is held from the end of forward until backward begins, or nobody waits for it any more.
    """

    def __init__(self, held_nbytes: int, before_nbytes: int) -> None:
        self.after_nbytes = self.most_nbytes = held_nbytes
        self.before_nbytes = before_nbytes
        self._graph: weakref.ref[_Graph] | None = None

    def follow(self, out: Any) -> None:
        """The forward has ended, with these results."""
        graph = _Graph()
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(graph.begins)
        self._graph = weakref.ref(graph)

    def when_over(self, call: Callable[[], None]) -> None:
        """Call once it is held no more."""
        graph = None if self._graph is None else self._graph()
        if graph is None or graph.was_asked:
            call()
        else:
            graph.over.append(call)

    @property
    def held_nbytes(self) -> int:
        """Bytes that are held now."""
        graph = None if self._graph is None else self._graph()
        return 0 if graph is None or graph.was_asked else self.after_nbytes


class Ledger:
    """Counts of one `saving` context. `before_nbytes` and `after_nbytes` are the two to compare.

    away_nbytes: what was in host memory or in a file instead, at the same moment.
    most_nbytes: the most that was held at any moment.
    was_asked: backward has begun.
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
        self.was_asked = False
        self.held_nbytes = self.most_nbytes = 0
        self.held_away_nbytes = 0
        self.before_nbytes = 0
        self.after_nbytes = 0
        self.away_nbytes = 0

    def open(self, module: str, consumer: str, dtype: str, before_nbytes: int) -> Entry:
        """A new entry for a storage of `before_nbytes`. Calls of one module are summed."""
        entry = Entry(self, without_prefix(module), consumer, dtype, before_nbytes)
        with self._lock:
            self._clock += 1
            entry.born = self._clock
            self._entries[entry.born] = entry
            self._plain_nbytes += before_nbytes
            self._note_fullest()
        return entry

    @property
    def rows(self) -> list[Row]:
        """The saved tensors of the fullest moment, in order of saving.

        They are summed by module, consumer, dtype and fate.
        """
        groups: dict[tuple[str, str, str, str, str], list[Entry]] = defaultdict(list)
        with self._lock:
            for entry in self._entries.values():
                if entry.born <= self._fullest and not 0 < entry.died <= self._fullest:
                    groups[
                        entry.module, entry.consumer, entry.dtype, entry.action, entry.why
                    ].append(entry)
        return [
            Row(
                *key,
                len(part),
                sum(e.before_nbytes for e in part),
                sum(e.after_nbytes for e in part),
                sum(e.away_nbytes for e in part),
            )
            for key, part in groups.items()
        ]

    def totals(self, by: str) -> dict[str, tuple[int, int]]:
        """(before, after) bytes by one of the fields of a row.

        That is "action", "module", "dtype", "consumer" or "why".
        """
        sums: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            before, after = sums.get(getattr(row, by), (0, 0))
            sums[getattr(row, by)] = before + row.before_nbytes, after + row.after_nbytes
        return sums

    def __str__(self) -> str:
        return _render(self)

    def __repr__(self) -> str:
        return f"Ledger({show_nbytes(self.before_nbytes)} -> {show_nbytes(self.after_nbytes)})"

    def _change(self, entry: Entry, nbytes: int, away_nbytes: int) -> None:
        with self._lock:
            if entry.died:
                return
            self.held_nbytes += nbytes - entry.after_nbytes
            self.most_nbytes = max(self.most_nbytes, self.held_nbytes)
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
        if self._plain_nbytes <= self.before_nbytes:
            return
        if self._dead:
            self._entries = {born: entry for born, entry in self._entries.items() if not entry.died}
            self._dead = 0
        self._fullest = self._clock
        self.before_nbytes = self._plain_nbytes
        self.after_nbytes, self.away_nbytes = self.held_nbytes, self.held_away_nbytes


def _render(ledger: Ledger) -> str:
    if not ledger.before_nbytes:
        return (
            "saved tensors: none. Forward ran without gradients, inside a compiled function "
            "(open the context around its call instead), by a plan that changes nothing, or not at "
            "all.\n"
        )
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
    for row in sorted(ledger.rows, key=lambda row: -row.before_nbytes):
        sizes = [show_nbytes(row.before_nbytes), show_nbytes(row.after_nbytes)]
        if any_away:
            sizes.append(show_nbytes(row.away_nbytes) if row.away_nbytes else "")
        table.add_row(
            row.module, row.consumer, row.dtype, row.action, str(row.count), *sizes, row.why
        )
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()
