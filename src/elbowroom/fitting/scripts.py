"""Scripts of the settled forwards of one plan: which one a forward replays, and what becomes of it.

A forward replays the script of earlier ones whose inputs had the same shapes. If there is none, it
replays one of other shapes that differed from each other in numbers of rows alone, such as batches
of texts of other lengths (`runtime/replay/generalize.py`). If there is none either, it is examined,
and a script of it is written.
"""

from elbowroom.fitting.signature import Signature
from elbowroom.runtime.replay.generalize import generalized
from elbowroom.runtime.replay.script import Script

_MAX_SCRIPTS = 16  # for calls of several sizes, and for the forwards of a step
_MAX_GENERAL = 16  # times that two scripts become one
_GROWN = 1.25  # times the nodes of an earlier forward: a loop runs longer now
_LOOKS_AGAIN = 256  # forwards that are known, until one is examined all the same
_MAX_UNWRITTEN = 4  # forwards without a script, or that diverged from it, until none is written
_PAYS = 8  # forwards that scripts were replayed in: that the next one diverges is not counted then

# Which forward of a step it is, and its inputs; None: of any shapes, in one bucket.
Key = tuple[int, Signature | None]
_ANY: Key = (0, None)


class Scripts:
    """Scripts of settled forwards, by their numbers in a step and their inputs."""

    def __init__(self) -> None:
        self.known: dict[Key, Script] = {}
        self.unwritten = _MAX_UNWRITTEN  # forwards that may yet turn out to have no script
        self._left: dict[Key, Script] = {}  # as a forward was another one
        self._general = _MAX_GENERAL
        self._forwards = self._replayed = 0  # all of them; those since a script was written
        self._nodes: dict[Key, int] = {}  # of forwards that are not compared
        self._followed: Key | None = None

    def __bool__(self) -> bool:
        return bool(self.known)

    def lacks(self, at: int, signature: Signature) -> bool:
        """Returns whether such a forward has no script, and one should be written."""
        return self._key(at, signature) is None and self.unwritten > 0

    def next(self, at: int, signature: Signature) -> Script | None:
        """Returns the script that such a forward replays now; None: it is examined."""
        self._forwards += 1
        if self._forwards % _LOOKS_AGAIN == 0:  # unguarded differences would persist
            self.unwritten = _MAX_UNWRITTEN
            return None
        self._followed = self._key(at, signature)
        if self._followed is None:
            return None
        self._replayed += 1
        return self.known[self._followed]

    def _key(self, at: int, signature: Signature) -> Key | None:
        if (at, signature) in self.known:
            return at, signature
        return _ANY if at == 0 and _ANY in self.known else None

    def has_run(self, at: int, signature: Signature, nodes: int) -> None:
        """Notes that a forward was not compared with its script, and how many nodes it has made.

        If these are many more than before, the next forward is examined.
        """
        before = self._nodes.setdefault((at, signature), nodes)
        if nodes > _GROWN * before:
            self._nodes[at, signature] = nodes
            self._forwards = -1

    def diverged(self) -> None:
        """Forgets the script that was followed last: the forward was another one than it says."""
        if self._followed is not None:
            script = self.known.pop(self._followed, None)
            if script is not None:
                self._left[self._followed] = script
        self.unwritten -= self._replayed < _PAYS

    def has_none(self) -> None:
        """Notes that no script could be written of a forward."""
        self.unwritten -= 1

    def add(self, at: int, signature: Signature, script: Script) -> None:
        """Adds the script of a forward that was examined."""
        while len(self.known) >= _MAX_SCRIPTS:
            del self.known[next(iter(self.known))]
        key, script = self._general_of((at, signature), script)
        self.known[key] = script
        self._replayed = 0

    def _general_of(self, key: Key, script: Script) -> tuple[Key, Script]:
        """Returns a script of this forward and of one with other numbers of rows, if there is one.

        That may have had these inputs, or others. Other inputs of a later forward in a step may
        take more than any that was measured: those of the first one are never larger.
        """
        others: list[tuple[Key, Script | None]] = [(key, self._left.pop(key, None))]
        if key[0] == 0:
            others.append((_ANY, self._left.pop(_ANY, None)))
            known = reversed(self.known.items())
            others += [(_ANY, one) for (at, _), one in known if at == 0]
        for its_key, one in others if self._general else ():
            both = None if one is None else generalized(one, script)
            if both is not None:
                self._general -= 1
                self.unwritten = min(self.unwritten + 1, _MAX_UNWRITTEN)
                return its_key, both
        return key, script
