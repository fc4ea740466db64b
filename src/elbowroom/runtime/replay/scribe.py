"""Writing a script: a learning context tells what it does, op by op, and `script` puts it together.

Only what is done matters. A tensor that is kept needs no slot, and an op all of whose tensors are
kept needs no guard. What is guarded follows from what is done:

    an op that saves something that is acted on    its arguments
    an op whose result is made again               its arguments, and where its operands come from
    an op that such an operand comes from          its output: others are compared with it

What a checkpoint of the user's saves is no call's. It stands between two of them, as a step without
arguments; calls inside the checkpoint are guarded where it depends on their arguments whether its
inputs may be codes.

A forward that does what no script can say (it climbed) has none, and the next ones are looked at,
too.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elbowroom.plan import Action, Encode, Keep, Need, SiteName
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.plan.site import CHECKPOINT, RECOMPUTE
from elbowroom.runtime import opened
from elbowroom.runtime.consumers import Call, Levels
from elbowroom.runtime.direct import Direct
from elbowroom.runtime.handles import EncodeHandle, KeepHandle
from elbowroom.runtime.handles.keep import storage_nbytes, version_of
from elbowroom.runtime.identity import Identity, is_touchable, untouchable
from elbowroom.runtime.ledger import Ledger, Mark
from elbowroom.runtime.listener import Listener
from elbowroom.runtime.modules import Calls
from elbowroom.runtime.normal import Statistics
from elbowroom.runtime.recipes import Op, Ready
from elbowroom.runtime.replay.script import (
    NOWHERE,
    PLAIN_VALUES,
    Deed,
    Like,
    Norm,
    Ref,
    Remade,
    Save,
    Script,
    Step,
    state_of_torch,
)
from elbowroom.runtime.slot import Deferred, Geometry, Slot, View
from elbowroom.runtime.weak import WeakStorage

_Place = tuple[int, int]  # a storage's address, and its version
_Makers = dict[int, tuple["weakref.ref[Op]", int]]  # of recipes, by the id of their op
_NOTHING = Geometry((), (), 0)  # of what is only kept
_AT_SAVE, _BEFORE, _AFTER, _LAST = range(4)


class Unwritable(Exception):
    """Raised if there is no script of this forward; the message says why."""


class OnceUnwritable(Unwritable):
    """Raised if there is no script of this forward, but maybe of the next."""


@dataclass
class _Saved:
    """One tensor that was saved."""

    geometry: Geometry
    dtype: torch.dtype
    nbytes: int
    at: _Place
    held: weakref.ref[View | Deferred] | None


@dataclass
class _Op:
    """One call from Python to torch."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: list[_Place]
    saves: list[_Saved] = field(default_factory=list)
    run: Callable[..., Any] | None = None
    direct: Direct | None = None
    opens: bool = False
    out: _Place | None = None
    levels: Levels | None = None
    module: weakref.ref[nn.Module] | None = None
    copies: list[tuple[int, weakref.ref[Slot]]] = field(default_factory=list)
    compared: bool = False
    numel: int = 0  # of all that it has saved

    @property
    def addresses(self) -> Iterator[int]:
        """Addresses of the parameters among the arguments."""
        for x in (*self.args, *(value for _, value in self.kwargs)):
            if type(x) is Like and x.parameter is not None:
                yield x.address


class _Norm(NamedTuple):
    """Places of the statistics that something was normalized with."""

    mean: tuple[_Place, Geometry]
    rstd: tuple[_Place, Geometry]
    inner: int
    rows: int


@dataclass(frozen=True)
class _Done:
    """Record of what was done with a slot, and when."""

    op: int
    when: int
    save: int
    slot: weakref.ref[Slot]
    deed: Deed
    ready: weakref.ref[Ready] | None = None
    norm: _Norm | None = None


class Scribe(Listener):
    """Listener that is told of one forward by its learning context, and writes its script.

    script        once that has ended; None: there is none
    why           there is none; once: of this forward, but maybe of the next
    """

    def __init__(self, *, selects: bool = False) -> None:
        """selects: what the first op is given tells this forward from others, if nothing else."""
        self.script: Script | None = None
        self.why, self.once = "", False
        self._ops: list[_Op] = []
        self._stack: list[int] = []
        self._inputs: int | None = None  # the op that stands for what checkpoints save now
        self._when = _BEFORE
        self._done: list[_Done] = []
        self._seeds_before = 0
        self._mark = Ledger().mark()
        self._selects = selects
        self._numel = 0  # of all that no op has saved
        self._storages: dict[int, WeakStorage] = {}  # so that no address is used twice
        self._makers: _Makers = {}
        self._state = state_of_torch()

    # --- What a context tells

    def starts(self, ledger: Ledger, seeds: int) -> None:
        """Begins the record of a forward.

        ledger: that counts it; seeds: the count of its context's.
        """
        self._mark, self._seeds_before = ledger.mark(), seeds

    def refuse(self, why: str, *, once: bool = False) -> None:
        """Notes that there is no script of this forward. once: there may be one of the next."""
        self.once = once and (self.once or not self.why)
        self.why = self.why or why
        self._ops, self._stack, self._done, self._makers = [], [], [], {}
        self._storages, self._inputs = {}, None

    def begins(self, call: Call) -> None:
        """Records that a call begins, and nothing of it has happened yet."""
        if self.why:
            return
        operands: list[_Place] = []
        try:
            args = tuple(self._described(x, operands) for x in call.args)
            kwargs = tuple((key, self._described(x, operands)) for key, x in call.kwargs.items())
        except Unwritable:
            args, kwargs = (Unwritable,), ()
        self._ops.append(_Op(call.func, call.name, args, kwargs, operands))
        self._stack.append(len(self._ops) - 1)
        self._when, self._inputs = _BEFORE, None

    def compares(self) -> None:
        """Records that the arguments of this call must be the same in forwards that follow."""
        if self._stack:
            self._ops[self._stack[-1]].compared = True

    def begins_inputs(self) -> None:
        """Records that a checkpoint of the user's saves one of its inputs."""
        if self.why or self._inputs is not None:
            return
        if self._stack:
            self.refuse("a checkpoint inside of a function of torch's own")
            return
        self._ops.append(_Op(checkpoint, CHECKPOINT, (), (), []))
        self._inputs, self._when = len(self._ops) - 1, _BEFORE

    def leaves(self) -> None:
        """Records that the forward has ended; what waits for that is decided on."""
        self._inputs = None

    def runs(self, call: Call, run: Callable[..., Any], direct: Direct | None) -> None:
        """Records that the call runs as `run`."""
        if self.why:
            return
        op = self._ops[self._stack[-1]]
        if call.name in opened.NAMES and run is not call.func:
            op.opens = True
        elif run is not call.func:
            op.run, op.direct = run, direct
        self._when = _AT_SAVE

    def ends(self) -> None:
        """Records that the call has run; now it is decided on what waited for that."""
        self._when = _AFTER

    def makes(self, x: Any, identity: Identity) -> None:
        """Records that the call has made x. identity: knows how that can be made again."""
        origin = identity.origin(x) if is_touchable(x) else None
        recipe = None if origin is None else origin.recipe
        if recipe is not None and self._stack:
            known = self._makers.get(id(recipe.op))
            if known is None or known[0]() is None:
                self._makers[id(recipe.op)] = weakref.ref(recipe.op), self._stack[-1]

    def ended(self, call: Call, out: Any) -> None:
        """Records that the call has ended, and all is decided on."""
        if self.why:
            return
        op = self._ops[self._stack.pop()]
        op.levels = call.fewest
        if type(out) is Tensor:
            op.out = self._place_of(out)
        self._when = _AT_SAVE if self._stack else _BEFORE

    def begins_region(self, module: nn.Module) -> None:
        """Records that a call begins of a module that runs again in backward."""
        if self.why:
            return
        self._ops.append(_Op(type(module), RECOMPUTE, (), (), [], module=weakref.ref(module)))
        self._stack.append(len(self._ops) - 1)
        self._when, self._inputs = _BEFORE, None

    def saves(self) -> None:
        """Records that inputs of a module that runs again, or of a checkpoint, are saved now."""
        self._when = _AT_SAVE

    def region_saved(self) -> None:
        """Notes that the inputs of a region are saved, and that it runs."""
        if self.why:
            return
        self._stack.pop()
        self._when = _AT_SAVE if self._stack else _BEFORE

    def failed(self) -> None:
        """Records that the call has raised."""
        self.refuse("an op has raised")

    def saved(self, x: Tensor, held: Any) -> None:
        """Records that autograd saves x, and holds `held` for it."""
        at = self._stack[-1] if self._stack else self._inputs
        if at is None:
            self._numel += x.numel()
            return
        op = self._ops[at]
        op.numel += x.numel()
        nbytes, place = storage_nbytes(x), self._place_of(x)
        is_looked_at = isinstance(held, View | Deferred)
        geometry = Geometry.of(x) if is_looked_at else _NOTHING
        seen = weakref.ref(held) if is_looked_at else None
        op.saves.append(_Saved(geometry, x.dtype, nbytes, place, seen))

    def does(
        self,
        slot: Slot,
        name: SiteName,
        need: Need,
        action: Action | None,
        *,
        ready: Ready | None = None,
        norm: Statistics | None = None,
        bits: str = "",
        covers: bool = False,
        drawn: int = 0,
    ) -> None:
        """Records that something is done with a slot."""
        if self.why:
            return
        draw = drawn - self._seeds_before
        deed = Deed(NOWHERE, name, need, action, bits=bits, covers=covers, draw=draw)
        kept = None if ready is None else weakref.ref(ready)  # its slots must be free to die
        where = None if norm is None else self._where(norm)
        at, when, save = self._stack[-1] if self._stack else self._inputs, self._when, 0
        if at is None:
            at, when = NOWHERE, _LAST
        else:
            save = len(self._ops[at].saves)
        self._done.append(_Done(at, when, save, weakref.ref(slot), deed, kept, where))

    def _where(self, norm: Statistics) -> _Norm:
        mean, rstd = ((self._place_of(x), Geometry.of(x)) for x in (norm.mean, norm.rstd))
        return _Norm(mean, rstd, norm.inner, norm.rows)

    def copies(self, slot: Slot, y: Tensor, call: Call | None) -> None:
        """Records that a slot stands for a constant among the arguments of an ended call."""
        if call is None or not self._stack:
            return
        op = self._ops[self._stack[-1]]
        for position, x in enumerate(call.args):
            if x is y:
                op.copies.append((position, weakref.ref(slot)))  # most are not used
                return
        self.refuse("a constant that is given by name")

    def _described(self, x: Any, operands: list[_Place]) -> Any:
        if isinstance(x, Tensor):
            if type(x) not in (Tensor, nn.Parameter) or untouchable(x):
                raise Unwritable
            if type(x) is nn.Parameter:
                address = x.data_ptr()
                return _like(x)._replace(parameter=x, address=address)
            operands.append(self._place_of(x))
            # `same` is the operand's number until the script is made
            return _like(x)._replace(same=len(operands) - 1)
        if isinstance(x, tuple | list) and type(x) in (tuple, list, torch.Size):
            each = [self._described(one, operands) for one in x]
            return _made_of(each, x)
        if type(x) in PLAIN_VALUES:
            return x
        if type(x) is slice and {type(x.start), type(x.stop), type(x.step)} <= {int, type(None)}:
            return x
        raise Unwritable

    def _place_of(self, x: Tensor) -> _Place:
        try:
            address = x.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return NOWHERE, 0
        if address not in self._storages:
            self._storages[address] = WeakStorage(x)
        return address, version_of(x)

    # --- What comes of it

    def finish(self, ledger: Ledger, seeds: int, calls: Calls) -> None:
        """Writes the script, if there is one: the forward has ended, and its graph is still there.

        ledger, seeds: those that it has started with; calls: of outermost modules in this step
        """
        if ledger.was_asked:
            self.refuse("a backward has run inside")
        if not self.why:
            writer = _Writer(self._ops, self._done, self._makers, self._state)
            try:
                script = writer.script(ledger, self._mark, self._numel, selects=self._selects)
                seen = tuple((weakref.ref(module), n) for module, n in calls.items())
                self.script = replace(script, seeds=seeds - self._seeds_before, calls=seen)
            except Unwritable as error:
                self.refuse(str(error), once=isinstance(error, OnceUnwritable))
        self._ops, self._done, self._makers, self._storages = [], [], {}, {}


class _Writer:
    """Writer that puts a script together from what was told."""

    def __init__(
        self,
        ops: list[_Op],
        done: list[_Done],
        makers: _Makers,
        state: tuple[Any, ...],
    ) -> None:
        self._ops, self._makers, self._state = ops, makers, state
        self._done = [(one, slot) for one in done if (slot := one.slot()) is not None]
        self._numbers: dict[int, int] = {}  # of slots, by id
        self._slots: list[Slot] = []
        self._noted: dict[tuple[int, int], int] = {}  # of what is saved, by op and place in it
        self._places: dict[_Place, int] = {}
        self._guarded: set[int] = set()  # ops whose arguments are compared
        self._sourced: set[int] = set()  # ops whose operands are compared, too
        self._compared: set[int] = set()  # ops whose arguments tell this forward from others
        self._fixed: set[tuple[int, int]] = set()  # where the parameters lie that recipes read
        self._views: dict[tuple[int, int], View] = {}
        self._first: dict[int, tuple[int, int]] = {}  # of a slot: where it is saved first
        self._saved_at: dict[_Place, tuple[int, int]] = {}
        self._made_at: dict[_Place, int] = {}

    def script(self, ledger: Ledger, since: Mark, numel: int, *, selects: bool) -> Script:
        """Returns all of it. since: what the ledger had come to as the forward began.

        numel: elements that no op has saved
        """
        for at, op in enumerate(self._ops):
            for i, saved in enumerate(op.saves):
                self._saved_at.setdefault(saved.at, (at, i))
                view = None if saved.held is None else _view_of(saved.held())
                if view is not None:
                    self._views[at, i] = view
                    self._first.setdefault(id(view.slot), (at, i))
            if op.out is not None:
                self._made_at.setdefault(op.out, at)
        deeds = self._deeds()
        self._close_sources()
        self._compared |= {at for at, op in enumerate(self._ops) if op.compared}
        self._guarded |= {at for (at, _), v in self._views.items() if id(v.slot) in self._numbers}
        self._guarded |= {one.op for one, _ in deeds if one.op != NOWHERE and one.when == _AT_SAVE}
        self._note_places(deeds)
        if selects:
            self._compare_first()
        steps = tuple(
            replace(step, numel=None if op.run is not None and step.run is None else op.numel)
            for op, step in ((op, self._step(at, op, deeds)) for at, op in enumerate(self._ops))
        )
        last = tuple(deed for one, deed in deeds if one.when == _LAST)
        sizes = len(self._slots), len(self._noted), len(self._places)
        entries = {id(slot.entry): number for number, slot in enumerate(self._slots)}
        counts = ledger.counts(lambda entry: entries.get(id(entry), NOWHERE), since)
        numel += sum(step.numel or 0 for step in steps)
        return Script(steps, *sizes, last, counts, numel, 0, self._state)

    def _deeds(self) -> list[tuple[_Done, Deed]]:
        """Returns what is done with slots that are not just kept, and with their sources."""
        of_slot: dict[int, list[tuple[int, _Done, Slot]]] = {}
        for order, (one, slot) in enumerate(self._done):
            if type(slot.value) is KeepHandle and slot.bits is None:
                continue  # whatever it was before: in the end it is kept
            before = of_slot.setdefault(id(slot), [])
            if before or not isinstance(one.deed.action, Keep):  # kept is what it begins with
                before.append((order, one, slot))
        for mine in of_slot.values():
            if mine:
                self._number(mine[0][2])
                _check_kept([one for _, one, _ in mine])
        found: list[tuple[int, _Done, Deed]] = []
        for slot in self._slots:  # which grows meanwhile
            for order, one, _ in of_slot.get(id(slot), []):
                found.append((order, one, self._deed(one, slot)))
        self._check_raw()
        for _, one, deed in found:
            self._check_order(one.op, deed)
        found.sort(key=lambda each: each[0])
        read = {number for _, _, deed in found for number in _read_bits(deed)}
        return [(one, deed) for _, one, deed in found if not self._is_needless(one, deed, read)]

    def _is_needless(self, one: _Done, deed: Deed, read: set[int]) -> bool:
        """Returns whether bits are taken of a tensor whose code will have them.

        The tensor is kept until then, which takes no memory: the op that has it encoded reads it.
        read: slots whose bits others take
        """
        slot = self._slots[deed.slot]
        is_brought = slot.bits is not None and slot.bits is getattr(slot.value, "bitmap", None)
        at_first = one.when == _AT_SAVE and self._first.get(id(slot)) == (one.op, one.save)
        return bool(deed.bits) and is_brought and at_first and deed.slot not in read

    def _check_order(self, at: int, deed: Deed) -> None:
        """Checks that no op `at` makes something of what is saved later. Raises Unwritable.

        It was saved before, too, but by no op that is seen: as the input of the user's checkpoint.
        """
        numbers = [] if deed.mask == NOWHERE else [deed.mask]
        remade: int | Remade | None = deed.remade
        while isinstance(remade, Remade):
            numbers += [n for n in (remade.bits, remade.noise, remade.other) if n != NOWHERE]
            remade = remade.source
        numbers += [] if remade is None else [remade]
        for slot in (self._slots[number] for number in numbers):
            first = self._first.get(id(slot))
            if at != NOWHERE and first is not None and first[0] > at:
                raise Unwritable("a recipe of what no op has saved so far")

    def _check_raw(self) -> None:
        """Raise OnceUnwritable where readers took for exact what is a code in other forwards.

        A lossy codec holds a tensor raw that has a NaN or an Inf. What reads it after the first, or
        is made of it, may have asked for more than the code gives.
        """
        read = Counter(id(view.slot) for view in self._views.values())
        for slot in self._slots:
            held = slot.value
            if not isinstance(held, EncodeHandle) or held.codec.lossless or not held.exact:
                continue
            if slot.is_source or read[id(slot)] > 1:
                raise OnceUnwritable("several read a tensor that has no code: of a NaN or an Inf")

    def _number(self, slot: Slot) -> int:
        number = self._numbers.get(id(slot))
        if number is None:
            if id(slot) not in self._first and not self._copied(slot):
                raise Unwritable("a slot that no op of the forward saves")
            number = self._numbers[id(slot)] = len(self._slots)
            self._slots.append(slot)
        return number

    def _copied(self, slot: Slot) -> bool:
        return any(ref() is slot for op in self._ops for _, ref in op.copies)

    def _deed(self, one: _Done, slot: Slot) -> Deed:
        deed, mask, remade = one.deed, NOWHERE, None
        if one.ready is not None:
            ready = one.ready()
            if ready is None:
                raise Unwritable("a recipe that is not held any more")
            remade = self._remade(ready)
        action = deed.action
        if isinstance(action, Encode):
            bits = action.facts.mask
            if bits is not None:
                mask = self._holder_of(bits)
                action = replace(action, facts=replace(action.facts, mask=None))
        return replace(
            deed,
            slot=self._number(slot),
            action=action,
            remade=remade,
            norm=None if one.norm is None else self._norm(one.norm),
            mask=mask,
        )

    def _holder_of(self, bits: Tensor) -> int:
        for _, slot in self._done:
            if slot.bits is not None and slot.bits.data_ptr() == bits.data_ptr():
                return self._number(slot)
        raise Unwritable("bits that no slot holds")

    def _remade(self, ready: Ready) -> Remade:
        made = self._makers.get(id(ready.op))
        if made is None or made[0]() is not ready.op:
            raise Unwritable("a recipe of no op")
        self._sourced.add(made[1])
        given = tuple(
            self._ref((x.untyped_storage()._cdata, version_of(x)), Geometry.of(x))
            for x in ready.op.given
        )
        if given and ready.op.bound is None:
            raise Unwritable("a recipe that reads what only this forward has")
        source = ready.source
        bits = NOWHERE if ready.bits is None else self._holder_of(ready.bits)
        op = replace(ready.op, given=())
        if op.bound is not None:  # which makes what reads statistics
            op = replace(op, lossy=None, affine=None)
        self._fixed |= {(x.untyped_storage()._cdata, x.data_ptr()) for x in op.fixed}
        return Remade(
            op,
            self._remade(source) if isinstance(source, Ready) else self._number(source),
            ready.seen,
            ready.made,
            bits,
            NOWHERE if ready.noise is None else self._number(ready.noise),
            NOWHERE if ready.other is None else self._number(ready.other),
            given,
        )

    def _norm(self, norm: _Norm) -> Norm:
        return Norm(self._ref(*norm.mean), self._ref(*norm.rstd), norm.inner, norm.rows)

    def _ref(self, place: _Place, geometry: Geometry) -> Ref:
        at = self._saved_at.get(place)
        if at is None:
            raise Unwritable("a statistic that no op of the forward saves")
        self._guarded.add(at[0])
        return Ref(self._noted.setdefault(at, len(self._noted)), geometry)

    def _close_sources(self) -> None:
        """Compare the operands of ops that make what a compared op reads, and so on."""
        waiting = list(self._sourced)
        while waiting:
            at = waiting.pop()
            op = self._ops[at]
            own = {saved.at for saved in op.saves}
            for place in op.operands:
                if place in own:
                    continue
                maker = self._made_at.get(place)
                saved = self._saved_at.get(place)
                if saved is not None and saved[0] < at:
                    self._guarded.add(saved[0])
                elif maker is not None and maker < at and maker not in self._sourced:
                    self._sourced.add(maker)
                    waiting.append(maker)
        self._guarded |= self._sourced
        self._check_fixed()

    def _check_fixed(self) -> None:
        """Raise Unwritable unless what recipes read are parameters, which are compared as such.

        A view of a parameter is compared by its shape alone: the next may be one of another.
        """
        storages = {storage for storage, _ in self._fixed}
        compared = (self._ops[at].addresses for at in self._sourced)
        known = {address for some in compared for address in some}
        views = {place[0] for at in self._guarded for place in self._ops[at].operands}
        if not {address for _, address in self._fixed} <= known or storages & views:
            raise Unwritable("a recipe that reads a weight that is no parameter")

    def _note_places(self, deeds: list[tuple[_Done, Deed]]) -> None:
        """Give numbers to the storages that others are compared with."""
        for one, deed in deeds:
            is_lossy = isinstance(deed.action, Encode) and not deed.action.codec.lossless
            if (is_lossy or deed.remade is not None) and one.op != NOWHERE:
                for saved in self._ops[one.op].saves:
                    if self._is_made_before(one.op, saved.at):
                        self._places.setdefault(saved.at, len(self._places))
        for at, op in enumerate(self._ops):
            for saved in op.saves if op.name == CHECKPOINT else ():
                if self._is_made_before(at, saved.at):
                    self._places.setdefault(saved.at, len(self._places))
        for at in sorted(self._sourced):
            op = self._ops[at]
            own = {saved.at for saved in op.saves}
            for place in op.operands:
                if place not in own:
                    self._places.setdefault(place, len(self._places))
        for (at, i), view in self._views.items():
            if id(view.slot) in self._numbers and self._first[id(view.slot)] != (at, i):
                self._places.setdefault(self._ops[at].saves[i].at, len(self._places))

    def _compare_first(self) -> None:
        """Compare what is given to the ops up to the first one that is given a tensor."""
        for at, op in enumerate(self._ops):
            is_call = op.module is None and op.name != CHECKPOINT
            if is_call and op.args != (Unwritable,) and not op.opens:
                self._compared.add(at)
            if op.operands:
                return

    def _step(self, at: int, op: _Op, deeds: list[tuple[_Done, Deed]]) -> Step:
        mine = [(one, deed) for one, deed in deeds if one.op == at]
        before = tuple(deed for one, deed in mine if one.when == _BEFORE)
        after = tuple(deed for one, deed in mine if one.when == _AFTER)
        copies = tuple(
            (position, self._numbers[id(slot)])
            for position, ref in op.copies
            if (slot := ref()) is not None and id(slot) in self._numbers
        )
        place = NOWHERE if op.out is None else self._places.get(op.out, NOWHERE)
        if place != NOWHERE and self._made_at.get(op.out or (0, 0)) != at:
            place = NOWHERE
        keeps_run = op.direct is not None and not op.direct.exact
        keeps_run = keeps_run or (op.direct is not None and op.direct.always)
        if op.name == CHECKPOINT:
            inputs = tuple(self._save(at, i, saved, mine) for i, saved in enumerate(op.saves))
            return Step(op.func, inputs, before=before, inputs=True)
        if op.module is not None:
            given = tuple(self._save(at, i, saved, mine) for i, saved in enumerate(op.saves))
            is_acting = any(s is not None and (s.slot, s.noted) != (NOWHERE,) * 2 for s in given)
            return Step(op.func, given if is_acting else None, before=before, module=op.module)
        if not (at in self._guarded or at in self._compared or keeps_run):
            return Step(
                op.func, opens=op.opens, place=place, copies=copies, before=before, after=after
            )
        if op.args == (Unwritable,):
            raise Unwritable(f"'{op.name}' has an argument that cannot be compared")
        saves = None
        if at in self._guarded:
            if op.opens:
                raise Unwritable("a function of torch's own that saves by itself")
            saves = tuple(self._save(at, i, saved, mine) for i, saved in enumerate(op.saves))
        seen: set[_Place] = set()
        direct = op.direct if op.direct is not None and op.name == ATTENTION else None
        run = op.run
        return Step(
            op.func,
            saves,
            tuple(self._placed(x, at, seen) for x in op.args),
            tuple((key, self._placed(x, at, seen)) for key, x in op.kwargs),
            run,
            direct,
            op.levels,
            op.opens,
            place,
            copies,
            before,
            after,
        )

    def _placed(self, x: Any, at: int, seen: set[_Place]) -> Any:
        """Returns what an argument must be, with the number of the place that it is compared with.

        seen: the places among the arguments of this op that came before
        """
        if type(x) in (tuple, list):
            each = [self._placed(one, at, seen) for one in x]
            return _made_of(each, x)
        if type(x) is not Like or x.parameter is not None:
            return x
        op, same, new = self._ops[at], NOWHERE, NOWHERE
        operand = op.operands[x.same]
        if at in self._sourced and all(saved.at != operand for saved in op.saves):
            number = self._places[operand]
            is_known = operand in seen or self._is_known_before(at, operand)
            same, new = (number, NOWHERE) if is_known else (NOWHERE, number)
            seen.add(operand)
        return x._replace(same=same, place=new)

    def _is_made_before(self, at: int, place: _Place) -> bool:
        """Returns whether an earlier op than number `at` has made what lies there."""
        maker = self._made_at.get(place)
        return maker is not None and maker < at

    def _is_known_before(self, at: int, place: _Place) -> bool:
        """Returns whether an earlier op has noted this place."""
        saved, made = self._saved_at.get(place), self._made_at.get(place)
        if saved is not None and saved[0] < at:
            return True
        if made is not None and made < at:
            return True
        for earlier in sorted(self._sourced):
            if earlier >= at:
                return False
            op = self._ops[earlier]
            if place in op.operands and place not in {saved.at for saved in op.saves}:
                return True
        return False

    def _save(self, at: int, i: int, saved: _Saved, mine: list[tuple[_Done, Deed]]) -> Save | None:
        view = self._views.get((at, i))
        noted = self._noted.get((at, i), NOWHERE)
        number = None if view is None else self._numbers.get(id(view.slot))
        is_first = self._saved_at.get(saved.at) == (at, i)
        place = self._places.get(saved.at, NOWHERE)
        note = place if is_first and not self._is_made_before(at, saved.at) else NOWHERE
        if view is None or number is None:
            is_kept = noted == note == NOWHERE
            return None if is_kept else Save(saved.geometry, saved.dtype, noted=noted, place=note)
        slot, fresh = view.slot, self._first[id(view.slot)] == (at, i)
        deeds = [
            deed
            for one, deed in mine
            if one.when == _AT_SAVE and one.save == i and deed.slot == number
        ]
        if len(deeds) > 1:
            raise Unwritable("a tensor with which two things are done at once")
        if slot.is_window and deeds:
            raise Unwritable("a window onto a larger storage")
        return Save(
            saved.geometry,
            saved.dtype,
            number,
            fresh,
            saved.geometry if saved.geometry == slot.base else slot.base,
            saved.nbytes,
            view.need,
            deeds[0] if deeds else None,
            any(one.when == _AFTER and deed.slot == number for one, deed in mine),
            noted,
            note,
            place if not fresh or self._is_made_before(at, saved.at) else NOWHERE,
        )


def _check_kept(mine: list[_Done]) -> None:
    """Raise Unwritable where a slot is acted on at the end, and nothing is kept of it until then.

    It was acted on as it was saved by no call (by a function of the user's); calls that came later
    were served by what that gave.
    """
    for before, one in pairwise(mine):
        leaves_it = isinstance(before.deed.action, Keep)
        leaves_it = leaves_it or (bool(before.deed.bits) and before.when != _AT_SAVE)
        if one.op == NOWHERE and not leaves_it:
            raise Unwritable("what no call saves is made of what is not kept")


def _read_bits(deed: Deed) -> Iterator[int]:
    """Numbers of the slots whose bits a deed takes."""
    yield deed.mask
    remade: int | Remade | None = deed.remade
    while isinstance(remade, Remade):
        yield remade.bits
        remade = remade.source


def _view_of(held: Any) -> View | None:
    if isinstance(held, Deferred):
        held = held.held
    return held if isinstance(held, View) else None


def _like(x: Tensor) -> Like:
    return Like(type(x), (x.dtype, x.device, x.requires_grad, x.layout), Geometry.of(x))


def _made_of(each: list[Any], x: Any) -> Any:
    """A tuple or list of these, in the kind of x: x itself if it is one that stays as it is.

    For to be the same object is what is compared first, and most often true.
    """
    stays = type(x) is tuple and all(map(operator.is_, each, x))
    return x if stays else type(x)(each)
