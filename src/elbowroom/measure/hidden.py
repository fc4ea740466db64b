"""Finds the nodes whose saved tensors hooks of other code hold: mostly the user's checkpoints.

Hooks of a checkpoint hold for a piece of forward, from when they are put on the stack until they
are taken off. Others may lie over them meanwhile: those of a checkpoint inside of the piece, which
in backward begins with what the outer one puts back. So the range of the outer piece reaches over
that of the inner one, also if nothing but the inner one has made nodes at its beginning or end.
"""

import weakref
from collections.abc import Callable
from inspect import ismethod

import torch

from elbowroom.runtime.saving import Saving

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_DEEPEST = 64  # checkpoints of the user's that may begin and end inside of one of them

Ranges = list[tuple[int, int]]  # of autograd's numbers of nodes: from, and up to


class _Piece:
    """A piece of forward that one pair of hooks holds for. around: the pieces that it is in."""

    def __init__(self, pack: object, first: int, around: "list[_Piece]") -> None:
        self.pack, self.around = _weakly(pack), around
        self.first = self.end = first
        self._ranges: Ranges = []

    def add(self, first: int, end: int) -> None:
        """Adds nodes that were made under these very hooks."""
        if self._ranges and self._ranges[-1][1] == first:
            first = self._ranges.pop()[0]
        self._ranges.append((first, end))
        self.end = end

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Its nodes; an empty range where pieces inside of it have made the first or the last."""
        found = self._ranges
        begins = [] if found and found[0][0] == self.first else [(self.first, self.first)]
        ends = [] if found and found[-1][1] == self.end else [(self.end, self.end)]
        return (*begins, *found, *ends)


class HiddenNodes:
    """The nodes of a forward for which hooks of other code hold."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def note(self, first: int, end: int) -> None:
        """Records under whose hooks an op has made these nodes."""
        pack = foreign_pack()
        if pack is None or first == end:
            return
        piece = self._known(pack)
        if piece is None:
            piece = self._began(pack, first, self._below(first))
        piece.add(first, end)
        for around in piece.around:
            around.end = end

    def ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Returns, for each pair of hooks, the ranges of nodes whose tensors they hold."""
        return tuple(piece.ranges for piece in self._pieces)

    def _below(self, first: int) -> list[_Piece]:
        """Returns the pieces of the hooks below the uppermost ones, and begins those not known."""
        found: list[_Piece] = []
        for pack in _packs_below():
            piece = self._known(pack)
            if piece is None:
                piece = self._began(pack, first, [*found])
            found.append(piece)
        return found

    def _known(self, pack: object) -> _Piece | None:
        return next((one for one in self._pieces[-_DEEPEST:] if one.pack() == pack), None)

    def _began(self, pack: object, first: int, around: list[_Piece]) -> _Piece:
        piece = _Piece(pack, first, around)
        self._pieces.append(piece)
        return piece


def foreign_pack() -> object:
    """Returns what packs the tensor that is saved next, if hooks of other code lie over ours."""
    hooks = _top_hooks(True)
    pack = None if hooks is None else hooks[0]
    return None if isinstance(getattr(pack, "__self__", None), Saving) else pack


def _packs_below() -> list[object]:
    """Returns what hooks of other code pack with that lie below the uppermost, outermost first."""
    taken, found = [], []
    try:
        while foreign_pack() is not None:
            taken.append(_top_hooks(True))
            _pop_hooks()
        found = [pack for pack, _ in reversed(taken[1:])]
    finally:
        for pack, unpack in reversed(taken):
            _push_hooks(pack, unpack)
    return found


def _weakly(pack: object) -> Callable[[], object]:
    """Returns a reference to hooks, which hold what their forward began with."""
    try:
        return weakref.WeakMethod(pack) if ismethod(pack) else weakref.ref(pack)
    except TypeError:  # a slotted object, or a bound function of C
        return lambda: None
