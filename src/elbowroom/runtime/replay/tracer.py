"""Recording of a script: a learning context reports its actions, op by op, and they are noted.

When the forward has ended, a `Writer` assembles the script. Tensors that a checkpoint of the user
saves belong to no call. They are noted between two calls, as a step without arguments; calls inside
the checkpoint are guarded where their arguments decide whether its inputs may be codes.

A forward with an action that no script can express (it climbed) has no script, and the next ones
are examined, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elbowroom.plan import Action, Need, SiteName
from elbowroom.plan.site import CHECKPOINT, RECOMPUTE
from elbowroom.runtime import opened
from elbowroom.runtime.consumers import Call, Levels
from elbowroom.runtime.direct import Direct
from elbowroom.runtime.handles import RebuildHandle
from elbowroom.runtime.handles.rebuild import Op, Ready
from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.ledger import Ledger
from elbowroom.runtime.modules import Calls
from elbowroom.runtime.normal import Statistics
from elbowroom.runtime.observer import Listener
from elbowroom.runtime.replay.notes import (
    AFTER,
    AT_SAVE,
    BEFORE,
    LAST,
    NotedInstruction,
    NotedNorm,
    NotedOp,
    NotedRecipe,
    NotedSave,
    OnceUnwritable,
    Place,
    Remains,
    Trace,
    Unwritable,
    made_of,
)
from elbowroom.runtime.replay.script import NOWHERE, PLAIN_VALUES, Like, Script, state_of_torch
from elbowroom.runtime.replay.writer import Writer
from elbowroom.runtime.slot import Geometry, Slot, View
from elbowroom.runtime.storage import Origin, WeakStorage, storage_nbytes, untouchable, version_of

_NOTHING = Geometry((), (), 0)


def _gone() -> None:
    """Link to a slot of the forward that the script was written from."""


class Tracer(Listener):
    """Listener that records one forward of a learning context, and writes its script.

    script        once that has ended; None: there is none
    why           there is none; once: of this forward, but maybe of the next
    """

    def __init__(self, *, selects: bool = False) -> None:
        """selects: the arguments of the first op distinguish this forward from others."""
        self.script: Script | None = None
        self.why, self.once = "", False
        self._ops: list[NotedOp] = []
        self._makers: dict[int, tuple[weakref.ref[Op], int]] = {}  # of recipes, by id of their op
        self._traces: dict[int, Trace] = {}  # of slots, by id, while they exist
        self._stack: list[int] = []
        self._inputs: int | None = None  # the op that represents tensors saved between two calls
        self._region: int | None = None  # the op that represents the recomputed module that runs
        self._when = BEFORE
        self._done: list[NotedInstruction] = []
        self._seeds_before = 0
        self._ledger = Ledger()
        self._mark, self._stood = self._ledger.mark(), self._ledger.so_far()
        self._selects = selects
        self._numel = 0  # of all that no op has saved
        self._storages: dict[int, WeakStorage] = {}  # so that no address is used twice
        self._state = state_of_torch()

    # --- Events of a context

    def starts(self, ledger: Ledger, seeds: int) -> None:
        """Begins the record of a forward.

        ledger: that counts it; seeds: the count of its context's.
        """
        self._ledger, self._seeds_before = ledger, seeds
        self._mark, self._stood = ledger.mark(), ledger.so_far()

    def refuse(self, why: str, *, once: bool = False) -> None:
        """Notes that this forward has no script. once: the next one may have one."""
        self.once = once and (self.once or not self.why)
        self.why = self.why or why
        self._ops, self._stack, self._done = [], [], []
        self._storages, self._inputs = {}, None
        self._makers, self._traces = {}, {}

    def begins(self, call: Call) -> None:
        """Records that a call begins, and nothing of it has happened yet."""
        if self.why:
            return
        operands: list[Place] = []
        try:
            args = tuple([self._described(x, operands) for x in call.args])
            kwargs = tuple([(key, self._described(x, operands)) for key, x in call.kwargs.items()])
        except Unwritable:
            args, kwargs = (Unwritable,), ()
        self._stack.append(len(self._ops))
        self._ops.append(NotedOp(call.func, call.name, args, kwargs, operands, self._so_far()))
        self._when, self._inputs = BEFORE, None

    def _so_far(self) -> tuple[int, int]:
        """Bytes that this forward holds, in plain autograd and as it is held."""
        plain, held = self._ledger.so_far()
        return plain - self._stood[0], held - self._stood[1]

    def compares(self) -> None:
        """Records that the arguments of this call must be the same in forwards that follow."""
        if self._stack:
            self._ops[self._stack[-1]].compared = True

    def saves_between(self, *, of_checkpoint: bool) -> None:
        """Records that a tensor is saved between two calls: consecutive ones form one op."""
        name = CHECKPOINT if of_checkpoint else ""
        if self.why or (self._inputs is not None and self._ops[self._inputs].name == name):
            return
        if self._stack:
            self.refuse("a checkpoint, or a function of the user's, inside of one of torch's own")
            return
        self._inputs, self._when = len(self._ops), BEFORE
        self._ops.append(NotedOp(checkpoint, name, (), (), [], self._so_far(), is_between=True))

    def leaves(self) -> None:
        """Records the end of the forward; the tensors that wait for it are decided on."""
        self._inputs = None

    def runs(self, call: Call, run: Callable[..., Any], direct: Direct | None) -> None:
        """Records that the call runs as `run`."""
        if not self.why and run is not call.func:
            op = self._ops[self._stack[-1]]
            if call.name in opened.NAMES:
                op.opens = True
            else:
                op.run, op.direct = run, direct
        self._when = AT_SAVE

    def ends(self) -> None:
        """Records that the call has run; now the tensors that waited for it are decided on."""
        self._when = AFTER

    def makes(self, origin: Origin) -> None:
        """Records a result of the call with its origin, which may have a recipe."""
        recipe = origin.recipe
        if recipe is not None and self._stack:
            known = self._makers.get(id(recipe.op))
            if known is None or known[0]() is None:
                self._makers[id(recipe.op)] = weakref.ref(recipe.op), self._stack[-1]

    def needs_levels(self, op: Op, levels: int | None, scale: float) -> None:
        """Records the levels that the codes of a product's operands need."""
        known = self._makers.get(id(op))
        if known is not None and known[0]() is op:
            self._ops[known[1]].levels = Levels(levels, None, scale=scale)

    def ended(self, call: Call, out: Any) -> None:
        """Records that the call has ended, and all is decided on."""
        if self.why:
            return
        op = self._ops[self._stack.pop()]
        op.levels = call.fewest
        for saved in op.saves:
            held = None if saved.held is None else saved.held()
            view = held.held if type(held) is Deferred else held
            if type(view) is View:
                saved.seen = self._trace_of(view.slot), view.need
        if type(out) is Tensor:
            op.out, op.out_numel = self._place_of(out), out.numel()
        self._when = AT_SAVE if self._stack else BEFORE

    def begins_region(self, module: nn.Module) -> None:
        """Records that a call of a recomputed module begins."""
        if self.why:
            return
        self._region = len(self._ops)
        self._stack.append(self._region)
        op = NotedOp(type(module), RECOMPUTE, (), (), [], self._so_far())
        op.module = weakref.ref(module)
        self._ops.append(op)
        self._when, self._inputs = BEFORE, None

    def saves(self) -> None:
        """Records that inputs of a recomputed module, or tensors between calls, are saved now."""
        self._when = AT_SAVE

    def region_saved(self) -> None:
        """Notes that the inputs of a region are saved, and that it runs."""
        if self.why:
            return
        self._stack.pop()
        self._when = AT_SAVE if self._stack else BEFORE

    def region_ended(self, saves: int) -> None:
        """Records that a recomputed module has run."""
        if not self.why and self._region is not None:
            region = self._ops[self._region]
            region.calls, region.dropped = len(self._ops) - self._region - 1, saves

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
        is_seen = isinstance(held, View | Deferred)  # else it is only kept
        geometry, ref = (Geometry.of(x), weakref.ref(held)) if is_seen else (_NOTHING, None)
        place = self._place_of(x)
        op.saves.append(NotedSave(geometry, x.dtype, storage_nbytes(x), place, ref))

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
        """Records an action on a slot."""
        if self.why:
            return
        what = self._trace_of(slot), name, need, action, bits, covers, drawn - self._seeds_before
        kept = None if ready is None else weakref.ref(ready)  # its slots must not be kept alive
        where = None if norm is None else self._where(norm)
        at, when, save = self._stack[-1] if self._stack else self._inputs, self._when, 0
        if at is None:
            at, when = NOWHERE, LAST
        else:
            save = len(self._ops[at].saves)
        self._done.append(NotedInstruction(at, when, save, *what, kept, where))

    def _trace_of(self, slot: Slot) -> Trace:
        trace = self._traces.get(id(slot))
        if trace is None:
            trace = self._traces[id(slot)] = Trace(weakref.ref(slot))
            slot.when_ended = self._note_remains
        return trace

    def _note_remains(self, slot: Slot) -> None:
        """Notes what a slot was, which ends while a script may be written."""
        trace = self._traces.pop(id(slot), None)
        if trace is None:
            return
        # It may end between two calls: what is asked here is no op of the model.
        with torch._C.DisableTorchFunction():
            held, recipe = slot.value, None
            if isinstance(held, RebuildHandle):
                with suppress(Unwritable):
                    recipe = self.noted(held.ready)
            trace.remains = replace(Remains.of(slot), recipe=recipe, ended=len(self._ops))

    def noted(self, ready: Ready) -> NotedRecipe:
        """Returns the notes of a recipe. Raises Unwritable if no script may hold it."""
        op, makers = ready.op, []
        for one in (op, *op.equal_ops):
            known = self._makers.get(id(one))
            if known is None or known[0]() is not one:
                raise Unwritable("a recipe of no op")
            makers.append(known[1])
        if op.given and op.bound is None:
            raise Unwritable("a recipe that reads what only this forward has")

        def operand(one: Slot | Ready) -> Trace | NotedRecipe:
            return self.noted(one) if isinstance(one, Ready) else self._trace_of(one)

        others = tuple((_gone, seen) for _, seen in op.others)
        bare = replace(op, given=(), others=others, equal_ops=())
        if op.bound is not None:  # which makes what reads statistics
            bare = replace(bare, lossy=None, affine=None, of_normal=None)
        given = [((x.untyped_storage()._cdata, version_of(x)), Geometry.of(x)) for x in op.given]
        return NotedRecipe(
            *(bare, tuple(makers), operand(ready.source), ready.seen, ready.made, ready.bits),
            None if ready.noise is None else self._trace_of(ready.noise),
            tuple([operand(one) for one in ready.others]),
            tuple(given),
            op.works_lossy,
        )

    def _where(self, norm: Statistics) -> NotedNorm:
        mean, rstd = ((self._place_of(x), Geometry.of(x)) for x in (norm.mean, norm.rstd))
        return NotedNorm(mean, rstd, norm.inner, norm.rows)

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

    def _described(self, x: Any, operands: list[Place]) -> Any:
        if isinstance(x, Tensor):
            kind = type(x)
            if (kind is not Tensor and kind is not nn.Parameter) or untouchable(x):
                raise Unwritable
            traits = x.dtype, x.device, x.requires_grad, x.layout
            geometry = Geometry.of(x)
            if isinstance(x, nn.Parameter):
                return Like(kind, traits, geometry, NOWHERE, NOWHERE, x, x.data_ptr())
            operands.append(self._place_of(x))
            # `same` is the operand's number until the script is made
            return Like(kind, traits, geometry, len(operands) - 1)
        if isinstance(x, tuple | list) and type(x) in (tuple, list, torch.Size):
            each = [self._described(one, operands) for one in x]
            return made_of(each, x)
        if type(x) in PLAIN_VALUES:
            return x
        if type(x) is slice and {type(x.start), type(x.stop), type(x.step)} <= {int, type(None)}:
            return x
        raise Unwritable

    def _place_of(self, x: Tensor) -> Place:
        try:
            address = x.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return NOWHERE, 0
        if address not in self._storages:
            self._storages[address] = WeakStorage(x)
        return address, version_of(x)

    # --- What comes of it

    def finish(self, ledger: Ledger, seeds: int, calls: Calls) -> None:
        """Writes the script, if there is one, after the forward, while its graph exists.

        ledger, seeds: those that it has started with; calls: of outermost modules in this step
        """
        if ledger.backward_began:
            self.refuse("a backward has run inside")
        if not self.why:
            writer = Writer(self._ops, self._done, self.noted, self._state)
            try:
                script = writer.script(ledger, self._mark, self._numel, selects=self._selects)
                seen = tuple((weakref.ref(module), n) for module, n in calls.items())
                self.script = replace(script, seeds=seeds - self._seeds_before, calls=seen)
            except Unwritable as error:
                self.refuse(str(error), once=isinstance(error, OnceUnwritable))
        self._ops, self._done, self._storages = [], [], {}
        self._makers, self._traces = {}, {}
