"""One script of two forwards that differ in numbers of rows alone.

Both scripts are compared step by step. Their actions must be the same. Where shapes, strides or
offsets differ, the common script has a `Size`, and numbers that differ in the same way share one
`Size`; everything else is taken from the later script. The assumption that two numbers are one
`Size` may be wrong. Then a forward that contradicts it ends, as at any guard, and the next common
script has two.

Functions that were made for one number of rows must not be taken over: an op that runs again says
whether its functions know any (`Op.any_size`), a node of ours is asked again whether it may stand
in for each call, and a number among arguments may not differ at all.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from elbowroom.plan import Encode
from elbowroom.plan.precision_floor import FEW
from elbowroom.runtime.contents import are_equal
from elbowroom.runtime.handles.rebuild import Op
from elbowroom.runtime.replay.script import (
    NOWHERE,
    Instruction,
    Like,
    NormStatistics,
    NumberedRecipe,
    Ref,
    Script,
    ScriptedCall,
    ScriptedSave,
    instructions_of,
)
from elbowroom.runtime.replay.sizes import FEWEST, Size, Varying
from elbowroom.runtime.slot import Geometry


class _Different(Exception):
    """Raised where two scripts differ in more than numbers of rows."""


def generalized(one: Script, other: Script) -> Script | None:
    """Returns a script of both forwards, by `other` where that is free; None: there is none.

    one: may have sizes already. other: has none
    """
    alike = ("slots", "noted", "places", "seeds", "state")
    if any(getattr(one, name) != getattr(other, name) for name in alike) or other.sizes:
        return None
    merger = _Merger(
        is_lossy=any(
            instruction.is_lossy for instruction in instructions_of(other.steps, other.last)
        )
    )
    try:
        if len(one.steps) != len(other.steps):
            return None
        steps = tuple(map(merger.step, one.steps, other.steps))
        last = merger.all(one.last, other.last)
    except _Different:
        return None
    if not merger.sizes:
        return None
    max_numel = max(one.max_numel, one.numel, other.numel)
    sizes = len(merger.sizes)
    larger = max(one, other, key=lambda script: script.before_nbytes)
    changed: dict[str, Any] = {"sizes": sizes, "numel": NOWHERE, "max_numel": max_numel}
    return replace(other, steps=steps, last=last, counts=larger.counts, **changed)


class _Merger:
    """The sizes that two scripts have shown so far, by what they are in both.

    known    those that a tensor was compared with already, in the order of a forward
    varying  slots of storages that are of another size in each forward
    open     slots of what an op saves whose first tensor is one: an index has no fixed bound
    """

    def __init__(self, *, is_lossy: bool) -> None:
        self.sizes: dict[tuple[Any, int], Size] = {}
        self.known: set[int] = set()
        self.varying: set[int] = set()
        self.open: set[int] = set()
        self._is_lossy = is_lossy

    def step(self, a: ScriptedCall, b: ScriptedCall) -> ScriptedCall:
        """Returns a step that is both."""
        same = ("func", "run", "replaced_by", "opens", "place", "copies", "inputs", "inside")
        _check(all(getattr(a, name) == getattr(b, name) for name in same))
        _check((a.module and a.module()) is (b.module and b.module()))
        args, kwargs = self.all(a.args, b.args), self.all(a.kwargs, b.kwargs)
        varies = _varies((args, kwargs))
        if varies and b.run is not None:
            _check(b.replaced_by is not None and a.levels == b.levels)
        if _varies(next((x for x in args or () if isinstance(x, Like)), None)):
            self.open |= {save.slot for save in b.saves or () if save is not None}
        before = self.all(a.before, b.before)
        saves, after = self.all(a.saves, b.saves), self.all(a.after, b.after)
        changed: dict[str, Any] = {"so_far": max(a.so_far, b.so_far)}
        changed |= {"direct": b.replaced_by} if varies and b.run is not None else {}
        return replace(
            b, args=args, kwargs=kwargs, before=before, saves=saves, after=after, **changed
        )

    def all(self, a: Any, b: Any) -> Any:
        """Returns what is both, be it one thing or several."""
        kind = type(b)
        _check(type(a) is kind or (isinstance(a, Varying) and kind is Geometry))
        if kind is tuple or kind is list:
            _check(len(a) == len(b))
            each = [self.all(x, y) for x, y in zip(a, b, strict=True)]
            stays = all(x is y for x, y in zip(each, b, strict=True))
            return b if stays else kind(each)
        known = _KINDS.get(kind)
        if known is not None:
            return known(self, a, b)
        _check(kind is not Tensor and (a is b or are_equal(a, b)))
        return b

    def _like(self, a: Like, b: Like) -> Like:
        _check(a[:2] == b[:2] and a[3:5] == b[3:5] and a.address == b.address)
        _check(a.parameter is b.parameter)
        return b._replace(geometry=self._known_geometry(a.geometry, b.geometry))

    def _save(self, a: ScriptedSave, b: ScriptedSave) -> ScriptedSave:
        same = ("dtype", "slot", "fresh", "need", "waits", "noted", "place", "same")
        _check(all(getattr(a, name) == getattr(b, name) for name in same))
        geometry = self._known_geometry(a.geometry, b.geometry)
        whole, nbytes = None, b.nbytes
        _check((a.whole is None) == (b.whole is None))
        if a.whole is not None and b.whole is not None:
            whole = self._whole(a, b)
        if a.nbytes != b.nbytes:  # of all that its geometry covers, or of more
            _check(isinstance(whole, Varying) and b.whole is not None)
            assert b.whole is not None
            _check(b.nbytes == prod(b.whole.shape) * b.dtype.itemsize)
            nbytes = NOWHERE
        if isinstance(whole, Varying):
            self.varying.add(b.slot)
        instruction = self.all(a.instruction, b.instruction)
        return b._replace(geometry=geometry, whole=whole, nbytes=nbytes, instruction=instruction)

    def _whole(self, a: ScriptedSave, b: ScriptedSave) -> Geometry:
        """Returns the geometry of what a tensor is a view of, where its storage may tell a size."""
        assert a.whole is not None
        assert b.whole is not None
        both = self._geometry(a.whole, b.whole)
        if isinstance(both, Varying) and b.fresh and a.nbytes != b.nbytes:
            told = both.unknown(self.known)
            self.known |= {told.nth} if told is not None else set()
        _check(not isinstance(both, Varying) or both.sizes <= self.known)
        return both

    def _instruction(self, a: Instruction, b: Instruction) -> Instruction:
        same = ("slot", "name", "need", "action", "mask", "bits", "covers")
        _check(all(getattr(a, name) == getattr(b, name) for name in same))
        _check(max(a.draw, 0) == max(b.draw, 0))  # of what takes no seed it is any number
        if isinstance(b.action, Encode):
            facts = b.action.facts
            has_bounds = facts.largest is not None or facts.window is not None
            _check(not (has_bounds and b.slot in self.open))
        recipe, norm = self.all(a.recipe, b.recipe), self.all(a.norm, b.norm)
        return replace(b, recipe=recipe, norm=norm, varies=b.slot in self.varying)

    def _recipe(self, a: NumberedRecipe, b: NumberedRecipe) -> NumberedRecipe:
        _check((a.bits, a.noise, a.works_lossy) == (b.bits, b.noise, b.works_lossy))
        made = replace(
            b,
            source=self.all(a.source, b.source),
            seen=self._of_known(a.seen, b.seen),
            made=self._of_known(a.made, b.made),
            others=self.all(a.others, b.others),
            given=self.all(a.given, b.given),
        )
        one, op = a.op, b.op
        _check(len(one.others) == len(op.others) and len(one.fixed) == len(op.fixed))
        _check(_where(one) == _where(op) and (one.bound is None) == (op.bound is None))
        seen = [self._of_known(x, y) for (_, x), (_, y) in zip(one.others, op.others, strict=True)]
        if _varies((made.seen, made.made, made.given, seen)):
            _check(op.any_size and (op.bound is None or not seen))
            links = tuple((link, x) for (link, _), x in zip(op.others, seen, strict=True))
            made = replace(made, op=op.changed(others=links))
        return made

    def _ref(self, a: Ref, b: Ref) -> Ref:
        _check(a.noted == b.noted)
        is_whole = a.is_whole and b.is_whole
        return Ref(b.noted, self._of_known(a.geometry, b.geometry), is_whole)

    def _norm(self, a: NormStatistics, b: NormStatistics) -> NormStatistics:
        mean, rstd = self._ref(a.mean, b.mean), self._ref(a.rstd, b.rstd)
        _check(a.inner == b.inner)
        rows = self._number(a.rows, b.rows)
        _check(not isinstance(rows, Size) or rows.nth in self.known)
        return NormStatistics(mean, rstd, b.inner, rows)

    def _known_geometry(self, a: Geometry, b: Geometry) -> Geometry:
        """Returns the geometry of a tensor that is compared with it, which tells its sizes."""
        both = self._geometry(a, b)
        if isinstance(both, Varying):
            self.known |= both.sizes
        return both

    def _of_known(self, a: Geometry, b: Geometry) -> Geometry:
        """Returns a geometry that is made of sizes that tensors before have told."""
        both = self._geometry(a, b)
        _check(not isinstance(both, Varying) or both.sizes <= self.known)
        return both

    def _geometry(self, a: Geometry, b: Geometry) -> Geometry:
        if a == b:
            return b
        _check(len(a.shape) == len(b.shape) and len(a.stride) == len(b.stride))
        shape: Any = tuple([self._number(x, y) for x, y in zip(a.shape, b.shape, strict=True)])
        stride: Any = tuple([self._number(x, y) for x, y in zip(a.stride, b.stride, strict=True)])
        return Varying(shape, stride, self._number(a.offset, b.offset))

    def _number(self, a: Any, b: int) -> Any:
        if type(a) is int and a == b:
            return b
        return self.sizes.setdefault(
            (a, b), Size(len(self.sizes), self._minimum(a, b), _maximum(a, b))
        )

    def _minimum(self, a: Any, b: int) -> int:
        """Returns the least number of rows that codes of both are fine enough for."""
        if not self._is_lossy:
            return FEWEST
        fewest = min(a.minimum if isinstance(a, Size) else a, b)
        return FEW if fewest >= FEW else max(FEWEST, fewest if isinstance(a, Size) else fewest // 2)


def _maximum(a: Any, b: int) -> int:
    """Returns twice the rows that a script of both was written from."""
    return max(a.maximum, 2 * b) if isinstance(a, Size) else 2 * max(a, b)


_KINDS: dict[type, Any] = {
    Like: _Merger._like,
    ScriptedSave: _Merger._save,
    Instruction: _Merger._instruction,
    NumberedRecipe: _Merger._recipe,
    Ref: _Merger._ref,
    NormStatistics: _Merger._norm,
    Geometry: _Merger._geometry,
}


def _check(is_same: bool) -> None:
    if not is_same:
        raise _Different


def _where(op: Op) -> list[tuple[int, Any]]:
    """Returns where the parameters lie that an op reads."""
    return [(x.data_ptr(), x.shape) for x in op.fixed]


def _varies(x: Any) -> bool:
    """Returns whether some geometry in it has a size."""
    if isinstance(x, Varying):
        return True
    if isinstance(x, Like | Ref):
        return isinstance(x.geometry, Varying)
    return isinstance(x, tuple | list) and any(map(_varies, x))
