"""Assembly of a script from the tracer's notes.

Only actions matter. A tensor that is kept needs no slot, and an op all of whose tensors are kept
needs no guard. The actions determine the guards:

    an op that saves something that is acted on    its arguments
    an op whose result is rebuilt               its arguments, and where its operands come from an
    op that such an operand comes from          its output: others are compared with it
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from elbowroom.plan import Encode, Keep
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.plan.site import CHECKPOINT
from elbowroom.runtime.handles import KeepHandle, OffloadHandle
from elbowroom.runtime.handles.rebuild import Ready
from elbowroom.runtime.ledger import Ledger, Mark
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
    Seen,
    Trace,
    Unwritable,
    made_of,
)
from elbowroom.runtime.replay.script import (
    NOWHERE,
    Instruction,
    Like,
    Norm,
    NumberedRecipe,
    Ref,
    Save,
    Script,
    Step,
)
from elbowroom.runtime.slot import Geometry, Slot, View


class Writer:
    """Writer that assembles a script from notes."""

    def __init__(
        self,
        ops: list[NotedOp],
        done: list[NotedInstruction],
        noted: Callable[[Ready], NotedRecipe],
        state: tuple[Any, ...],
    ) -> None:
        self._ops, self._note, self._state = ops, noted, state
        self._done = [(one, slot) for one in done if (slot := one.slot()) is not None]
        self._numbers: dict[int, int] = {}  # of slots, by id
        self._slots: list[Slot | Remains] = []
        self._noted: dict[tuple[int, int], int] = {}  # of what is saved, by op and place in it
        self._places: dict[Place, int] = {}
        self._guarded: set[int] = set()  # ops whose arguments are compared
        self._sourced: set[int] = set()  # ops whose operands are compared, too
        self._compared: set[int] = set()  # ops whose arguments distinguish this forward from others
        self._fixed: set[tuple[int, int]] = set()  # where the parameters lie that recipes read
        self._views: dict[tuple[int, int], View | Seen] = {}
        self._first: dict[int, tuple[int, int]] = {}  # of a slot: where it is saved first
        self._saved_at: dict[Place, tuple[int, int]] = {}
        self._made_at: dict[Place, int] = {}
        self._compared_at: dict[Place, int] = {}  # the first op whose operands are compared with it

    def script(self, ledger: Ledger, since: Mark, numel: int, *, selects: bool) -> Script:
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

    def _with_closed_regions(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
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

    def _leave_out_ended(self) -> None:
        """Leaves out what was done with slots that have ended, where it need not be done again.

        A slot that has ended before another op began is kept as long as it takes.
        """
        left_out: set[int] = set()
        for one, slot in self._done:
            if not isinstance(slot, Remains):
                continue
            first = self._first.get(id(slot))
            if first is None or slot.ended <= first[0] + 1 or one.op == NOWHERE:
                left_out.add(id(slot))
        self._done = [(one, slot) for one, slot in self._done if id(slot) not in left_out]

    def _frees(
        self, instructions: list[tuple[NotedInstruction, Instruction]]
    ) -> dict[int, tuple[int, ...]]:
        """Returns the numbers of the slots that have ended, by the op after which they had.

        What a replay has of them is let go then, or when the last of others has read it.
        """
        last: dict[int, int] = {}
        for one, instruction in instructions:
            at = len(self._ops) if one.op == NOWHERE else one.op
            for number in _read_by(instruction):
                last[number] = max(last.get(number, 0), at)
        calls = [at for at, op in enumerate(self._ops) if not (op.is_between or op.module)]
        frees: dict[int, list[int]] = {}
        for number, slot in enumerate(self._slots):
            if isinstance(slot, Remains):
                at = bisect_left(calls, max(slot.ended - 1, last.get(number, 0)))
                if at < len(calls):
                    frees.setdefault(calls[at], []).append(number)
        return {at: tuple(numbers) for at, numbers in frees.items()}

    def _instructions(self) -> list[tuple[NotedInstruction, Instruction]]:
        """Returns the actions on slots that are not just kept, and on their sources."""
        of_slot: dict[int, list[tuple[int, NotedInstruction, Slot | Remains]]] = {}
        for order, (one, slot) in enumerate(self._done):
            if Remains.of(slot).is_kept:
                continue  # whatever it was before: in the end it is kept
            before = of_slot.setdefault(id(slot), [])
            if before or not isinstance(one.action, Keep):  # kept is what it begins with
                before.append((order, one, slot))
        for mine in of_slot.values():
            if mine:
                self._number(mine[0][2])
                _check_kept([one for _, one, _ in mine])
        found: list[tuple[int, NotedInstruction, Instruction]] = []
        for slot in self._slots:  # which grows meanwhile
            for order, one, _ in of_slot.get(id(slot), []):
                found.append((order, one, self._instruction(one, slot)))
        self._check_raw()
        for _, one, instruction in found:
            self._check_order(one.op, instruction)
        found.sort(key=lambda each: each[0])
        read = {number for _, _, instruction in found for number in _read_bits(instruction)}
        return [
            (one, instruction)
            for _, one, instruction in found
            if not self._is_needless(one, instruction, read)
        ]

    def _is_needless(self, one: NotedInstruction, instruction: Instruction, read: set[int]) -> bool:
        """Returns whether bits are taken of a tensor whose code will have them.

        The tensor is kept until then, which takes no memory: the op that has it encoded reads it.
        read: slots whose bits others take
        """
        slot = self._slots[instruction.slot]
        is_brought = Remains.of(slot).brings
        at_first = one.when == AT_SAVE and self._first.get(id(slot)) == (one.op, one.save)
        return bool(instruction.bits) and is_brought and at_first and instruction.slot not in read

    def _check_order(self, at: int, instruction: Instruction) -> None:
        """Checks that no op `at` uses a tensor that is saved later.

        Raises Unwritable. Such a tensor was saved before by an unseen op: as the input of the
        user's checkpoint.
        """
        numbers = [instruction.mask]
        for recipe in instruction.recipe or ():
            numbers += recipe.slots
        for slot in (self._slots[number] for number in numbers if number != NOWHERE):
            first = self._first.get(id(slot))
            if at != NOWHERE and first is not None and first[0] > at:
                raise Unwritable("a recipe of what no op has saved so far")

    def _check_raw(self) -> None:
        """Raises OnceUnwritable where readers took for exact what is a code in other forwards.

        A lossy codec holds a tensor with a NaN or an Inf raw. Later readers of it or of its results
        may need more accuracy than the code has.
        """
        read = Counter(id(view.slot) for view in self._views.values())
        for slot in self._slots:
            if Remains.of(slot).is_raw and (slot.is_source or read[id(slot)] > 1):
                raise OnceUnwritable("several read a tensor that has no code: of a NaN or an Inf")

    def _number(self, slot: Slot | Remains) -> int:
        number = self._numbers.get(id(slot))
        if number is None:
            if id(slot) not in self._first and not self._copied(slot):
                raise Unwritable("a slot that no op of the forward saves")
            number = self._numbers[id(slot)] = len(self._slots)
            self._slots.append(slot)
        return number

    def _copied(self, slot: Slot | Remains) -> bool:
        return any(ref() is slot for op in self._ops for _, ref in op.copies)

    def _instruction(self, one: NotedInstruction, slot: Slot | Remains) -> Instruction:
        action, mask, recipe = one.action, NOWHERE, None
        if one.ready is not None:
            ready = one.ready()
            noted = None if ready is None else self._note(ready)
            if noted is None and isinstance(slot, Remains):
                noted = slot.recipe
            if noted is None:
                raise Unwritable("a recipe that is not held any more")
            recipe = self._recipe(noted)
        if isinstance(action, Encode):
            bits = action.facts.mask
            if bits is not None:
                mask = self._holder_of(bits)
                action = replace(action, facts=replace(action.facts, mask=None))
        norm = None if one.norm is None else self._norm(one.norm)
        number, how = self._number(slot), (mask, one.bits, one.covers, one.draw)
        return Instruction(number, one.name, one.need, action, recipe, norm, *how)

    def _holder_of(self, bits: Tensor) -> int:
        # The last one, for the bits of one that has ended may have lain there before.
        for _, slot in reversed(self._done):
            if Remains.of(slot).bits == bits.data_ptr():
                return self._number(slot)
        raise Unwritable("bits that no slot holds")

    def _recipe(self, recipe: NotedRecipe) -> NumberedRecipe:
        self._sourced.update(recipe.makers)
        given = tuple([self._ref(*one) for one in recipe.given])
        source, bits, noise, op = recipe.source, recipe.bits, recipe.noise, recipe.op
        self._fixed |= {(x.untyped_storage()._cdata, x.data_ptr()) for x in op.fixed}
        return NumberedRecipe(
            op,
            self._operand(source),
            recipe.seen,
            recipe.made,
            NOWHERE if bits is None else self._holder_of(bits),
            NOWHERE if noise is None else self._number_of(noise),
            tuple([self._operand(one) for one in recipe.others]),
            given,
            recipe.works_lossy,
        )

    def _operand(self, one: Trace | NotedRecipe) -> int | NumberedRecipe:
        return self._number_of(one) if isinstance(one, Trace) else self._recipe(one)

    def _number_of(self, trace: Trace) -> int:
        slot = trace()
        if slot is None:
            raise Unwritable("a recipe whose source is not held any more")
        return self._number(slot)

    def _norm(self, norm: NotedNorm) -> Norm:
        return Norm(self._statistic(*norm.mean), self._statistic(*norm.rstd), norm.inner, norm.rows)

    def _statistic(self, place: Place, geometry: Geometry) -> Ref:
        """Returns a statistic, of which only the order in memory counts, as it was saved."""
        saved = self._geometry_of(place)
        return self._ref(place, saved if saved.is_run_like(geometry) else geometry)

    def _ref(self, place: Place, geometry: Geometry) -> Ref:
        is_whole = self._geometry_of(place) == geometry
        at = self._saved_at[place]
        self._guarded.add(at[0])
        return Ref(self._noted.setdefault(at, len(self._noted)), geometry, is_whole)

    def _geometry_of(self, place: Place) -> Geometry:
        """Returns the geometry in which an op saves what lies there."""
        at = self._saved_at.get(place)
        if at is None:
            raise Unwritable("a statistic that no op of the forward saves")
        op, i = at
        return self._ops[op].saves[i].geometry

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
    ) -> Step:
        """Returns the step of a script for one op.

        frees: numbers of slots that have ended when it has run
        """
        acts: dict[str, Any]
        before = tuple([instruction for one, instruction in mine if one.when == BEFORE])
        after = tuple([instruction for one, instruction in mine if one.when == AFTER])
        if op.is_between:
            inputs = self._saves(at, op, mine)
            return Step(
                op.func, inputs, before=before, inputs=True, numel=op.numel, so_far=op.so_far
            )
        if op.module is not None:
            given = self._saves(at, op, mine)
            is_acting = any(s is not None and (s.slot, s.noted) != (NOWHERE,) * 2 for s in given)
            held = given if is_acting else None
            acts = {"before": before, "module": op.module, "so_far": op.so_far}
            return Step(op.func, held, numel=op.numel, **acts)
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
            return Step(op.func, numel=None if op.run is not None else op.numel, **acts)
        if op.args == (Unwritable,):
            raise Unwritable(f"'{op.name}' has an argument that cannot be compared")
        saves = None
        if at in self._guarded:
            if op.opens:
                raise Unwritable("a function of torch's own that saves by itself")
            saves = self._saves(at, op, mine)
        seen: set[Place] = set()
        direct = op.direct if op.direct is not None and op.name == ATTENTION else None
        return Step(
            op.func,
            saves,
            tuple([self._placed(x, at, seen) for x in op.args]),
            tuple([(key, self._placed(x, at, seen)) for key, x in op.kwargs]),
            op.run,
            direct,
            op.levels if self._codes_any(at, op) else None,
            numel=op.numel,
            stands=op.direct,
            **acts,
        )

    def _saves(
        self, at: int, op: NotedOp, mine: list[tuple[NotedInstruction, Instruction]]
    ) -> tuple[Save | None, ...]:
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
    ) -> Save | None:
        view = self._views.get((at, i))
        noted = self._noted.get((at, i), NOWHERE)
        number = None if view is None else self._numbers.get(id(view.slot))
        is_first = self._saved_at.get(saved.at) == (at, i)
        place = self._places.get(saved.at, NOWHERE)
        is_noted = self._is_noted_before(at, saved.at)
        note = place if is_first and not is_noted else NOWHERE
        if view is None or number is None:
            is_kept = noted == note == NOWHERE
            return None if is_kept else Save(saved.geometry, saved.dtype, noted=noted, place=note)
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
        return Save(
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


def _check_kept(mine: list[NotedInstruction]) -> None:
    """Raises Unwritable where a slot is acted on at the end, and nothing is kept of it until then.

    It was acted on as it was saved by no call (by a function of the user's); calls that came later
    were served by what that gave.
    """
    for before, one in pairwise(mine):
        leaves_it = isinstance(before.action, Keep)
        leaves_it = leaves_it or (bool(before.bits) and before.when != AT_SAVE)
        if one.op == NOWHERE and not leaves_it:
            raise Unwritable("what no call saves is made of what is not kept")


def _read_by(instruction: Instruction) -> Iterator[int]:
    """Numbers of the slots that a instruction takes anything of."""
    yield instruction.mask
    for recipe in instruction.recipe or ():
        yield from recipe.slots


def _read_bits(instruction: Instruction) -> Iterator[int]:
    """Numbers of the slots whose bits a instruction takes."""
    yield instruction.mask
    for recipe in instruction.recipe or ():
        yield recipe.bits
