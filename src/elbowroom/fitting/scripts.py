"""Scripts of the settled forwards of one plan: which one a forward replays, and what becomes of it.

A forward replays the script of earlier ones whose inputs had the same shapes. If there is none, it
replays one of other shapes that differed from each other in numbers of rows alone, such as batches
of texts of other lengths (`runtime/replay/generalize.py`). If there is none either, it is examined,
and a script of it is written.

A script of several numbers of rows is followed by inputs that are no larger than those that it was
written from: larger ones might have more done to them. It may not serve smaller ones either: from
some size on, other functions stand in for ops. So there may be several.
"""

from dataclasses import dataclass, field
from typing import Any

from elbowroom.fitting.signature import Signature
from elbowroom.runtime.replay.generalize import generalized
from elbowroom.runtime.replay.script import Script

_MAX_SCRIPTS = 16  # for calls of several sizes, and for the forwards of a step
_MAX_SHARED = 4  # scripts of several numbers of rows
_MAX_GENERAL = 16  # times that two scripts become one
_GROWN = 1.25  # times the nodes of an earlier forward: a loop runs longer now
_LOOKS_AGAIN = 256  # forwards that are known, until one is examined all the same
_MAX_UNWRITTEN = 4  # forwards without a script, or that diverged from it, until none is written
_PAYS = 8  # forwards that scripts were replayed in: that the next one diverges is not counted then

Key = tuple[int, Signature]  # which forward of a step it is, and its inputs


@dataclass
class _Shared:
    """A script of first forwards with several numbers of rows.

    largest  elements of the largest inputs that it was written from
    fails    elements of the largest inputs that it was not the script of
    """

    script: Script
    largest: int
    fails: int = 0

    def serves(self, numel: int) -> bool:
        return self.fails < numel <= self.largest


@dataclass
class Scripts:
    """Scripts of settled forwards, by their numbers in a step and their inputs.

    unwritten  forwards that may yet turn out to have no script
    """

    known: dict[Key, Script] = field(default_factory=dict)
    shared: list[_Shared] = field(default_factory=list)
    unwritten: int = _MAX_UNWRITTEN
    _left: dict[Key, Script] = field(default_factory=dict)  # as a forward was another one
    _general: int = _MAX_GENERAL
    _forwards: int = 0
    _replayed: int = 0  # since a script was written
    _nodes: dict[Key, int] = field(default_factory=dict)  # of forwards that are not compared
    _followed: Key | None = None

    def __bool__(self) -> bool:
        return bool(self.known or self.shared)

    def lacks(self, *key: Any) -> bool:
        """Returns whether such a forward has no script, and one should be written."""
        return self.unwritten > 0 and key not in self.known and self._shared_by(key) is None

    def next(self, *key: Any) -> Script | None:
        """Returns the script that such a forward replays now; None: it is examined."""
        self._forwards += 1
        if self._forwards % _LOOKS_AGAIN == 0:  # unguarded differences would persist
            self.unwritten = _MAX_UNWRITTEN
            return None
        self._followed, script = key, self.known.get(key)
        if script is None:
            shared = self._shared_by(key)
            script = None if shared is None else shared.script
        self._replayed += script is not None
        return script

    def _shared_by(self, key: Any) -> _Shared | None:
        """Returns the first script of other numbers of rows that such a forward may replay.

        Other inputs of a later forward in a step may take more than any that was measured: those
        of the first one are never larger.
        """
        at, signature = key
        serve = (one for one in self.shared if at == 0 and one.serves(signature.numel))
        return next(serve, None)

    def has_run(self, nodes: int, *key: Any) -> None:
        """Notes that a forward was not compared with its script, and how many nodes it has made.

        If these are many more than before, the next forward is examined.
        """
        before = self._nodes.setdefault(key, nodes)
        if nodes > _GROWN * before:
            self._nodes[key] = nodes
            self._forwards = -1

    def diverged(self) -> None:
        """Notes that the forward was another one than the script says that it followed."""
        key = self._followed
        if key is not None:
            script = self.known.pop(key, None)
            if script is not None:
                self._left[key] = script
            elif (shared := self._shared_by(key)) is not None:
                shared.fails = key[1].numel
        self.unwritten -= self._replayed < _PAYS

    def has_none(self) -> None:
        """Notes that no script could be written of a forward."""
        self.unwritten -= 1

    def add(self, at: int, signature: Signature, script: Script) -> None:
        """Adds the script of a forward that was examined."""
        self._replayed, key = 0, (at, signature)
        before = self._left.pop(key, None)
        both = None if before is None else self._both(before, script)
        if both is None and at == 0 and self._share(signature.numel, script):
            return
        while len(self.known) >= _MAX_SCRIPTS:
            del self.known[next(iter(self.known))]
        self.known[key] = script if both is None else both

    def _share(self, numel: int, script: Script) -> bool:
        """Makes one script of this one and of a forward with other numbers of rows, if it can."""
        for shared in self.shared:
            both = self._both(shared.script, script)
            if both is not None:
                shared.script, shared.largest = both, max(shared.largest, numel)
                shared.fails = min(shared.fails, numel - 1)
                return True
        for (at, other), one in self.known.items():
            both = self._both(one, script) if at == 0 and not one.sizes else None
            if both is not None:
                self.shared.insert(0, _Shared(both, max(other.numel, numel)))
                del self.shared[_MAX_SHARED:]
                return True
        return False

    def _both(self, one: Script, other: Script) -> Script | None:
        both = generalized(one, other) if self._general else None
        if both is not None:
            self._general -= 1
            self.unwritten = min(self.unwritten + 1, _MAX_UNWRITTEN)
        return both
