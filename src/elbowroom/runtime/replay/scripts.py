"""Scripts of the forwards of one setting: which ones the next forward may replay.

`er.fit` knows the inputs of a forward before it begins. So a forward replays the script of earlier
ones whose inputs had the same shapes, or one of several numbers of rows (`generalize.py`). A
context of `er.saving` knows nothing of the forward that comes: all of its scripts may be the right
one, and that of the last step comes first.

If there is none, the forward is examined, and a script of it is written. Two forwards that differ
in numbers of rows alone, such as batches of texts of other lengths, get one script of both. Where
inputs are known, that script serves inputs that are no larger than those that it was written from:
larger ones might have more done to them. It may not serve smaller ones either: from some size on,
other functions stand in for ops. So there may be several.
"""

import sys
import threading
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from elbowroom.runtime.replay.generalize import generalized
from elbowroom.runtime.replay.script import Script

_MAX_GENERAL = 16  # times that two scripts become one
_MAX_LEFT = 4  # scripts that a forward has left, and that a later one may share
_MAX_SHARED = 4  # scripts of several numbers of rows, where inputs are known
_MANY = 4  # scripts, each of which may be of another length, where inputs are not known
_GROWN = 1.25  # times the nodes of an earlier forward: a loop runs longer now
_LOOKS_AGAIN = 256  # forwards after which one is examined again
_PAYS = 8  # forwards that scripts were replayed in: that the next one leaves its own is not counted


class Forward(NamedTuple):
    """What is known of a forward before it begins: its number in a step, and its inputs.

    inputs  equal for forwards that may have one script; None: nothing is known of the forward
    numel   elements of its inputs
    """

    at: int
    inputs: Hashable
    numel: int


UNKNOWN = Forward(0, None, 1)


@dataclass(eq=False)
class _CachedScript:
    """A script, and what it is the script of.

    forward  that it was written from; None: forwards of several numbers of rows
    largest  elements of the largest inputs that it was written from
    fails    elements of the largest inputs that it was not the script of
    owners   of the parameters that it refers to: it is forgotten with them
    """

    script: Script
    forward: Forward | None
    largest: int = sys.maxsize
    fails: int = 0
    owners: "list[weakref.ref[nn.Module]]" = field(default_factory=list)

    def serves(self, forward: Forward) -> bool:
        """Returns whether such a forward may replay the script.

        Other inputs of a later forward in a step may take more than any that was measured: those
        of the first one are never larger.
        """
        mine = self.forward
        if mine is not None:
            same = mine.inputs is forward.inputs or mine.inputs == forward.inputs
            return same and mine.at == forward.at
        return forward.at == 0 and self.fails < forward.numel <= self.largest


class Scripts:
    """Scripts of the forwards of one setting; the one that was written last comes first.

    unwritten  forwards that may yet turn out to have no script
    """

    def __init__(self, *, most: int, most_unwritten: int) -> None:
        """most: scripts at a time.

        most_unwritten: forwards that no script could be written of, or that left theirs, until none
        is written
        """
        self._most, self._most_unwritten = most, most_unwritten
        self._lock = threading.Lock()
        self._known: list[_CachedScript] = []
        self._left: list[
            _CachedScript
        ] = []  # as a forward was another one: in numbers of rows, maybe
        self._general, self.unwritten = _MAX_GENERAL, most_unwritten
        self._forwards = self._replayed = 0  # the latter since a script was written
        self._nodes: dict[Forward, int] = {}  # of forwards that are not compared

    def begin(self, forward: Forward = UNKNOWN) -> tuple[Script, ...]:
        """Begins a forward; returns the scripts that it may replay.

        If there are none, it is examined.
        """
        with self._lock:
            self._forwards += 1
            if self._forwards % _LOOKS_AGAIN == 0:  # unguarded differences would persist
                self.unwritten, self._general = self._most_unwritten, _MAX_GENERAL
                self._known[:] = [one for one in self._known if not one.serves(forward)]
                return ()
            found = self._of(forward)
            self._replayed += bool(found)
            return found

    def _of(self, forward: Forward) -> tuple[Script, ...]:
        own = [one for one in self._known if one.serves(forward)]
        if len(own) > 1:
            own.sort(key=lambda one: one.forward is None)  # of these inputs alone comes first
        return tuple([one.script for one in own])

    def forget_all(self) -> None:
        """Forgets all scripts."""
        self._known.clear()
        self._left.clear()

    @property
    def all(self) -> list[Script]:
        """The scripts, those that were written last before others."""
        return [one.script for one in self._known]

    @property
    def wanted(self) -> bool:
        """True if an examined forward should be recorded as a script."""
        return self.unwritten > 0

    def lacks(self, forward: Forward) -> bool:
        """Returns whether such a forward has no script, and one should be written."""
        return self.wanted and not self._of(forward)

    def was_followed(self, script: Script) -> None:
        """Notes that a forward has replayed a script to its end: it is the first now."""
        with self._lock:
            if self._known and self._known[0].script is not script:
                self._known.sort(key=lambda one: one.script is not script)

    def has_run(self, nodes: int, forward: Forward) -> None:
        """Notes that a forward was not compared with its script, and how many nodes it has made.

        If these are many more than before, the next forward is examined.
        """
        before = self._nodes.setdefault(forward, nodes)
        if nodes > _GROWN * before:
            self._nodes[forward] = nodes
            self._forwards = -1

    def was_left(self, script: Script, forward: Forward = UNKNOWN) -> None:
        """Notes that a forward was another one than this script says."""
        with self._lock:
            self.unwritten -= self._replayed < _PAYS
            for one in [one for one in self._known if one.script is script]:
                if one.forward is None:
                    one.fails = forward.numel
                    continue
                self._remove(one)
                self._left.append(one)
                del self._left[:-_MAX_LEFT]

    def has_none(self) -> None:
        """Notes that no script could be written of a forward."""
        self.unwritten -= 1

    def add(
        self, script: Script, forward: Forward = UNKNOWN, owners: Iterable[nn.Module] = ()
    ) -> None:
        """Adds the script of a forward that was examined.

        owners: modules with the parameters that it refers to, if nothing else forgets it
        """
        with self._lock:
            self._replayed = 0
            script, is_there = self._shared(script, forward)
            if is_there:
                return
            del self._known[self._most - 1 :]
            gone = weakref.WeakMethod(self._owner_is_gone)

            def forget(owner: weakref.ref[nn.Module]) -> None:
                if (forgets := gone()) is not None:
                    forgets(owner)

            refs = [weakref.ref(module, forget) for module in owners]
            self._known.insert(0, _CachedScript(script, forward, owners=refs))

    def _shared(self, script: Script, forward: Forward) -> tuple[Script, bool]:
        """Returns a script of this forward, and of one before that had other numbers of rows.

        Also whether it serves such forwards already. Where inputs are unknown, scripts that may
        come again are left as they are, which is faster, until they are many.
        """
        replaced = [one for one in reversed(self._left) if one.serves(forward)]
        if forward.inputs is None and len(self._known) >= _MANY:
            replaced += self._known
        for one in replaced:
            both = self._both(one.script, script)
            if both is not None:
                self._remove(one)
                return both, False
        is_there = forward.inputs is not None and forward.at == 0 and self._share(script, forward)
        return script, is_there

    def _share(self, script: Script, forward: Forward) -> bool:
        """Makes one script of this one and of a forward with other numbers of rows, if it can."""
        shared = [one for one in self._known if one.forward is None]
        for one in shared:
            both = self._both(one.script, script)
            if both is not None:
                one.script, one.largest = both, max(one.largest, forward.numel)
                one.fails = min(one.fails, forward.numel - 1)
                return True
        for one in self._known:
            if one.forward is None or one.forward.at or one.script.sizes:
                continue
            both = self._both(one.script, script)
            if both is not None:
                largest = max(one.forward.numel, forward.numel)
                self._known.insert(0, _CachedScript(both, None, largest))
                for last in shared[_MAX_SHARED - 1 :]:
                    self._remove(last)
                return True
        return False

    def _both(self, one: Script, other: Script) -> Script | None:
        both = generalized(one, other) if self._general else None
        if both is not None:
            self._general -= 1
            self.unwritten = min(self.unwritten + 1, self._most_unwritten)
        return both

    def _owner_is_gone(self, owner: "weakref.ref[nn.Module]") -> None:
        # Without the lock: the collector may run this inside any line that holds it. Each of these
        # steps is one operation of a list.
        for one in (*self._known, *self._left):
            if any(ref is owner for ref in one.owners):
                self._remove(one)

    def _remove(self, known: _CachedScript) -> None:
        for some in (self._known, self._left):
            some[:] = [one for one in some if one is not known]
