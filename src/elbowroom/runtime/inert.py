"""Ops that need not be looked at, step after step: nothing of theirs has to do with any action.

Under a plan most ops often save what is kept as it is. To find that out anew in every step takes
15 us of Python a save, and three times that between ops that fill the caches. One forward under the
plan tells which ops they are; from then on the hooks only keep and count what these save. If more
is held one day than was then, what nobody had looked at was needed after all: the rest of that
forward is looked at, and another one is learned from.

An op takes part, and is not inert, if
    it saves a storage that is not simply kept, or an input of a module that is recomputed
    it is among those that made such a storage, or saves what that is made again from
    it saves any storage that an op which takes part saves: a storage has one slot, or none
    its backward is one of ours that rounds otherwise, however what it reads is held
    it is no call from Python to torch, as a function of the user's own: it is looked at always
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from elbowroom.plan.plan import Plan
from elbowroom.plan.site import RECOMPUTE
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.identity import Identity, Origin, untouchable
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.slot import Slot

OpName = tuple[str, str]  # module and op, as in a `SiteName`
_Ops = set[OpName]
_FULL = 0.95  # of what the plan knows: a step that saves less may keep what it else does not
_SAME = 1.01  # what is held varies a little
_MOST_LESSONS = 3


class Inertness:
    """Which ops are inert under one plan.

    ops: None until a forward has taught it; none of them after lessons that did not hold.
    """

    def __init__(self, plan: Plan) -> None:
        kept = (line.nbytes for line in plan.lines if line.action != RECOMPUTE)
        self._full_nbytes = _FULL * sum(kept)
        self._acting = plan.acting_ops
        self._held_nbytes = self._highest_nbytes = self._lessons = 0
        self.ops: frozenset[OpName] | None = None

    def learn(self, ledger: Ledger, parts: "Parts | None", slots: Iterable[Slot]) -> None:
        """A forward has ended. parts: what it has shown; slots: all that are alive."""
        held = ledger.held_nbytes
        if parts is not None and ledger.before_nbytes >= self._full_nbytes:
            self.ops, self._held_nbytes = parts.inert(slots) - self._acting, held
            self._highest_nbytes = max(parts.highest_nbytes, held)
            self._lessons += 1
        elif parts is None and self.ops and held > _SAME * self._held_nbytes:
            self.forget()

    def is_more(self, held_nbytes: int) -> bool:
        """Whether so much is held at no time of a forward like that of the lesson."""
        return held_nbytes > _SAME * self._highest_nbytes

    def forget(self) -> None:
        """The lesson did not hold: another one, or none any more."""
        self.ops = None if self._lessons < _MOST_LESSONS else frozenset()


_known: "weakref.WeakKeyDictionary[Plan, Inertness]" = weakref.WeakKeyDictionary()


def inertness_of(plan: Plan) -> Inertness:
    """One for all steps of a plan, and of its equals."""
    found = _known.get(plan)
    if found is None:
        found = _known[plan] = Inertness(plan)
    return found


class Parts:
    """Finds out, in one forward, who takes part."""

    def __init__(self) -> None:
        self.highest_nbytes = 0  # that were held as an op saved something
        self._seen: _Ops = set()
        self._rounding: _Ops = set()
        self._saves: list[tuple[OpName, weakref.ref[Slot], _Ops]] = []  # and who made it
        self._made: dict[int, tuple[Origin, _Ops]] = {}  # by id, which is the origin's own

    def saved(self, op: OpName, slot: Slot, x: Tensor, identity: Identity, held: int) -> None:
        """The op has saved x, which `slot` stands for; so many bytes are held now."""
        self.highest_nbytes = max(self.highest_nbytes, held)
        makers = self._makers_of(identity.origin(x))
        self._saves.append((op, weakref.ref(slot), makers))

    def ended(self, op: OpName, call: Call, out: Any, identity: Identity) -> None:
        """The op has made `out`."""
        self._seen.add(op)
        if call.rounds:
            self._rounding.add(op)
        origin = _origin_of(out, None, identity)
        if origin is not None:
            ops = {op}
            for x in tree_leaves((call.args, call.kwargs)):
                version = call.version if x is call.arg(0, "input") else None
                ops |= self._makers_of(_origin_of(x, version, identity))
            self._made[id(origin)] = origin, ops

    def inert(self, slots: Iterable[Slot]) -> frozenset[OpName]:
        """The ops that take no part. slots: all that are alive; of one that died nobody knows."""
        part = set(self._rounding)
        savers: dict[Slot, _Ops] = defaultdict(set)
        makers: dict[Slot, _Ops] = defaultdict(set)
        for op, ref, made_by in self._saves:
            slot = ref()
            if slot is None:
                part |= {op} | made_by
                continue
            savers[slot].add(op)
            makers[slot] |= made_by
            if op[1] == RECOMPUTE or op not in self._seen:
                part.add(op)
        for slot in slots:
            if type(slot.value) is not KeepHandle or slot.bits is not None:
                for one in (slot, *_sources(slot)):
                    part |= savers[one] | makers[one]
        return frozenset(self._seen - _closed(part, savers.values()))

    def _makers_of(self, origin: Origin | None) -> _Ops:
        return set() if origin is None else self._made.get(id(origin), (origin, set()))[1]


def _closed(part: _Ops, together: Iterable[_Ops]) -> _Ops:
    """`part`, and whoever is in a set together with one of them, and so on."""
    sets: dict[OpName, list[_Ops]] = defaultdict(list)
    for ops in together:
        for op in ops:
            sets[op].append(ops)
    part, waiting = set(part), list(part)
    while waiting:
        new = set().union(*sets[waiting.pop()]) - part
        part |= new
        waiting += new
    return part


def _origin_of(x: Any, version: int | None, identity: Identity) -> Origin | None:
    if not isinstance(x, Tensor) or untouchable(x):
        return None
    return identity.origin(x, version)


def _sources(slot: Slot) -> list[Slot]:
    """The slots that what it holds is made again from."""
    ready = getattr(slot.value, "ready", None)
    return [] if ready is None else ready.slots
