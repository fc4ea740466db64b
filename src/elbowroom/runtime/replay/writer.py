"""Assembly of a script from the tracer's notes.

Only actions matter. A tensor that is kept needs no slot, and an op all of whose tensors are kept
needs no guard. The actions determine the guards:

    an op that saves something that is acted on    its arguments
    an op whose result is rebuilt               its arguments, and where its operands come from an
    op that such an operand comes from          its output: others are compared with it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elbowroom.plan import Encode
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.plan.site import CHECKPOINT
from elbowroom.runtime.handles import KeepHandle, OffloadHandle
from elbowroom.runtime.handles.rebuild import Ready
from elbowroom.runtime.ledger import Ledger, LedgerMark
from elbowroom.runtime.replay.instruction_writer import InstructionWriter, read_by
from elbowroom.runtime.replay.notes import (
    AFTER,
    AT_SAVE,
    BEFORE,
    LAST,
    NotedInstruction,
    NotedOp,
    NotedRecipe,
    NotedSave,
    Place,
    Remains,
    Unwritable,
    made_of,
)
from elbowroom.runtime.replay.script import (
    NOWHERE,
    Instruction,
    Like,
    Script,
    ScriptedCall,
    ScriptedSave,
)


class Writer(InstructionWriter):
    """Writer that assembles a script from notes."""

    def __init__(
        self,
        ops: list[NotedOp],
        done: list[NotedInstruction],
        noted: Callable[[Ready], NotedRecipe],
        state: tuple[Any, ...],
    ) -> None:
        super().__init__(ops, done, noted)
        self._state = state
        self._places: dict[Place, int] = {}
        self._compared: set[int] = set()  # ops whose arguments distinguish this forward from others
        self._made_at: dict[Place, int] = {}
        self._compared_at: dict[Place, int] = {}  # the first op whose operands are compared with it

    def script(self, ledger: Ledger, since: LedgerMark, numel: int, *, selects: bool) -> Script:
        """Returns the script. since: figures of the ledger as the forward began.

        numel: elements that no op has saved
        """
        for at, op in enumerate(self._ops):
            for i, saved in enumerate(op.saves):
                self._saved_at.setdefault(saved.at, (at, i))
                view = saved.view
                if view is not None:
                    self._views[at, i] = view
                    self._first.setdefault(id(view.slot), (at, i))
            if op.out is not None:
                self._made_at.setdefault(op.out, at)
        self._leave_out_ended()
        instructions = self._instructions()
        self._close_sources()
        self._compared |= {at for at, op in enumerate(self._ops) if op.compared}
        self._guarded |= {at for (at, _), v in self._views.items() if id(v.slot) in self._numbers}
        self._guarded |= {
            one.op for one, _ in instructions if one.op != NOWHERE and one.when == AT_SAVE
        }
        self._note_places(instructions)
        if selects:
            self._compare_first()
        of_op: dict[int, list[tuple[NotedInstruction, Instruction]]] = {}
        for each in instructions:
            of_op.setdefault(each[0].op, []).append(each)
        frees = self._frees(instructions)
        steps = tuple(
            self._step(at, op, of_op.get(at, []), frees.get(at, ()))
            for at, op in enumerate(self._ops)
        )
        steps = self._with_closed_regions(steps)
        if not any(step.inputs and step.acts for step in steps):  # as many as there may be
            numel += sum(step.numel or 0 for step in steps if step.inputs)
            steps = tuple(step for step in steps if not step.inputs)
        last = tuple(instruction for one, instruction in instructions if one.when == LAST)
        sizes = len(self._slots), len(self._noted), len(self._places)
        entries = {id(slot.entry): number for number, slot in enumerate(self._slots)}
        counts = ledger.counts(lambda entry: entries.get(id(entry), NOWHERE), since)
        numel += sum(step.numel or 0 for step in steps)
        return Script(steps, *sizes, last, counts, numel, 0, self._state)

    def _with_closed_regions(self, steps: tuple[ScriptedCall, ...]) -> tuple[ScriptedCall, ...]:
        """Returns the steps without those of recomputed modules in which nothing is done."""
        left, end = [], 0
        for at, (step, op) in enumerate(zip(steps, self._ops, strict=True)):
            if at < end:
                continue
            inside = steps[at + 1 : at + 1 + op.calls]
            if inside and all(one.is_plain for one in inside):
                step, end = replace(step, inside=op.dropped), at + 1 + op.calls
            left.append(step)
        return tuple(left)

    def _frees(
        self, instructions: list[tuple[NotedInstruction, Instruction]]
    ) -> dict[int, tuple[int, ...]]:
        """Returns the numbers of the slots that have ended, by the op after which they had.

        What a replay has of them is let go then, or when the last of others has read it.
        """
        last: dict[int, int] = {}
        for one, instruction in instructions:
            at = len(self._ops) if one.op == NOWHERE else one.op
            for number in read_by(instruction):
                last[number] = max(last.get(number, 0), at)
        calls = [at for at, op in enumerate(self._ops) if not (op.is_between or op.module)]
        frees: dict[int, list[int]] = {}
        for number, slot in enumerate(self._slots):
            if isinstance(slot, Remains):
                at = bisect_left(calls, max(slot.ended - 1, last.get(number, 0)))
                if at < len(calls):
                    frees.setdefault(calls[at], []).append(number)
        return {at: tuple(numbers) for at, numbers in frees.items()}

    def _close_sources(self) -> None:
        """Compares the operands of ops that compute the inputs of a compared op, and so on."""
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
        """Raises Unwritable unless what recipes read are parameters, which are compared as such.

        A view of a parameter is compared by its shape alone: the next may be one of another.
        """
        storages = {storage for storage, _ in self._fixed}
        compared = (self._ops[at].addresses for at in self._sourced)
        known = {address for some in compared for address in some}
        views = {place[0] for at in self._guarded for place in self._ops[at].operands}
        if not {address for _, address in self._fixed} <= known or storages & views:
            raise Unwritable("a recipe that reads a weight that is no parameter")

    def _note_places(self, instructions: list[tuple[NotedInstruction, Instruction]]) -> None:
        """Gives numbers to the storages that others are compared with."""
        for one, instruction in instructions:
            is_lossy = (
                isinstance(instruction.action, Encode) and not instruction.action.codec.lossless
            )
            if (is_lossy or instruction.recipe is not None) and one.op != NOWHERE:
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
                    self._compared_at.setdefault(place, at)
        for (at, i), view in self._views.items():
            if id(view.slot) in self._numbers and self._first[id(view.slot)] != (at, i):
                self._places.setdefault(self._ops[at].saves[i].at, len(self._places))

    def _compare_first(self) -> None:
        """Compares what is given to the ops up to the first one that is given a tensor."""
        for at, op in enumerate(self._ops):
            is_call = op.module is None and not op.is_between
            if is_call and op.args != (Unwritable,) and not op.opens:
                self._compared.add(at)
            if op.operands:
                return

    def _step(
        self,
        at: int,
        op: NotedOp,
        mine: list[tuple[NotedInstruction, Instruction]],
        frees: tuple[int, ...],
    ) -> ScriptedCall:
        """Returns the step of a script for one op.

        frees: numbers of slots that have ended when it has run
        """
        acts: dict[str, Any]
        before = tuple([instruction for one, instruction in mine if one.when == BEFORE])
        after = tuple([instruction for one, instruction in mine if one.when == AFTER])
        if op.is_between:
            inputs = self._saves(at, op, mine)
            return ScriptedCall(
                op.func, inputs, before=before, inputs=True, numel=op.numel, so_far=op.so_far
            )
        if op.module is not None:
            given = self._saves(at, op, mine)
            is_acting = any(s is not None and (s.slot, s.noted) != (NOWHERE,) * 2 for s in given)
            held = given if is_acting else None
            acts = {"before": before, "module": op.module, "so_far": op.so_far}
            return ScriptedCall(op.func, held, numel=op.numel, **acts)
        acts = {
            "opens": op.opens,
            "place": self._place_made(at, op),
            "copies": self._copies(op),
            "before": before,
            "after": after,
            "frees": frees,
            "so_far": op.so_far,
        }
        keeps_run = op.direct is not None and (op.direct.always or not op.direct.exact)
        if not (at in self._guarded or at in self._compared or keeps_run):
            numel = None if op.run is not None else op.numel
            return ScriptedCall(op.func, numel=numel, out_numel=op.out_numel, **acts)
        if op.args == (Unwritable,):
            raise Unwritable(f"'{op.name}' has an argument that cannot be compared")
        saves = None
        if at in self._guarded:
            if op.opens:
                raise Unwritable("a function of torch's own that saves by itself")
            saves = self._saves(at, op, mine)
        seen: set[Place] = set()
        direct = op.direct if op.direct is not None and op.name == ATTENTION else None
        return ScriptedCall(
            op.func,
            saves,
            tuple([self._placed(x, at, seen) for x in op.args]),
            tuple([(key, self._placed(x, at, seen)) for key, x in op.kwargs]),
            op.run,
            direct,
            op.levels if self._codes_any(at, op) else None,
            numel=op.numel,
            replaced_by=op.direct,
            **acts,
        )

    def _saves(
        self, at: int, op: NotedOp, mine: list[tuple[NotedInstruction, Instruction]]
    ) -> tuple[ScriptedSave | None, ...]:
        """Returns what the script says of each tensor that an op saves."""
        return tuple(self._save(at, i, saved, mine) for i, saved in enumerate(op.saves))

    def _place_made(self, at: int, op: NotedOp) -> int:
        """Returns the place of the op's result, if that was not there before; else `NOWHERE`."""
        if op.out is None or self._made_at.get(op.out) != at:
            return NOWHERE
        return self._places.get(op.out, NOWHERE)

    def _copies(self, op: NotedOp) -> tuple[tuple[int, int], ...]:
        """Returns the positions of the arguments that slots are copies of, with their numbers."""
        return tuple(
            [
                (position, self._numbers[id(slot)])
                for position, ref in op.copies
                if (slot := ref()) is not None and id(slot) in self._numbers
            ]
        )

    def _codes_any(self, at: int, op: NotedOp) -> bool:
        """Returns whether any saved tensor of an op may be held in another form."""
        views = [self._views.get((at, i)) for i, one in enumerate(op.saves) if one.held is not None]
        return any(
            v is None or Remains.of(v.slot).kind not in (KeepHandle, OffloadHandle) for v in views
        )

    def _placed(self, x: Any, at: int, seen: set[Place]) -> Any:
        """Returns what an argument must be, with the number of the place that it is compared with.

        seen: the places among the arguments of this op that came before
        """
        if type(x) in (tuple, list):
            each = [self._placed(one, at, seen) for one in x]
            return made_of(each, x)
        if type(x) is not Like or x.parameter is not None:
            return x
        op, same, new = self._ops[at], NOWHERE, NOWHERE
        operand = op.operands[x.same]
        if at in self._sourced and all(saved.at != operand for saved in op.saves):
            number = self._places[operand]
            is_known = operand in seen or self._is_known_before(at, operand)
            same, new = (number, NOWHERE) if is_known else (NOWHERE, number)
            seen.add(operand)
        return Like(x.kind, x.traits, x.geometry, same, new)

    def _is_made_before(self, at: int, place: Place) -> bool:
        """Returns whether an earlier op than number `at` has made what lies there."""
        maker = self._made_at.get(place)
        return maker is not None and maker < at

    def _is_noted_before(self, at: int, place: Place) -> bool:
        """Returns whether an earlier op has made what lies there, or was compared with it."""
        return self._is_made_before(at, place) or self._compared_at.get(place, at) < at

    def _is_known_before(self, at: int, place: Place) -> bool:
        """Returns whether an earlier op has noted this place."""
        saved = self._saved_at.get(place)
        return (saved is not None and saved[0] < at) or self._is_noted_before(at, place)

    def _save(
        self, at: int, i: int, saved: NotedSave, mine: list[tuple[NotedInstruction, Instruction]]
    ) -> ScriptedSave | None:
        view = self._views.get((at, i))
        noted = self._noted.get((at, i), NOWHERE)
        number = None if view is None else self._numbers.get(id(view.slot))
        is_first = self._saved_at.get(saved.at) == (at, i)
        place = self._places.get(saved.at, NOWHERE)
        is_noted = self._is_noted_before(at, saved.at)
        note = place if is_first and not is_noted else NOWHERE
        if view is None or number is None:
            is_kept = noted == note == NOWHERE
            return (
                None
                if is_kept
                else ScriptedSave(saved.geometry, saved.dtype, noted=noted, place=note)
            )
        slot, fresh = view.slot, self._first[id(view.slot)] == (at, i)
        instructions = [
            instruction
            for one, instruction in mine
            if one.when == AT_SAVE and one.save == i and instruction.slot == number
        ]
        if len(instructions) > 1:
            raise Unwritable("a tensor with which two things are done at once")
        if slot.is_window and instructions:
            raise Unwritable("a window onto a larger storage")
        return ScriptedSave(
            saved.geometry,
            saved.dtype,
            number,
            fresh,
            saved.geometry if saved.geometry == slot.base else slot.base,
            saved.nbytes,
            view.need,
            instructions[0] if instructions else None,
            any(one.when == AFTER and instruction.slot == number for one, instruction in mine),
            noted,
            note,
            place if not fresh or is_noted else NOWHERE,
            Remains.of(slot).shared,
        )
