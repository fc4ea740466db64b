"""What a script does with saved tensors: the tracer's notes of actions, as instructions.

Slots get numbers, in the order in which actions need them: what is acted on, and what recipes read.
Tensors that are kept need none. The ops that this needs to be compared are noted for `writer.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from elbowroom.plan import Encode, Keep
from elbowroom.runtime.handles.rebuild import Ready
from elbowroom.runtime.replay.notes import (
    AT_SAVE,
    NotedInstruction,
    NotedNorm,
    NotedOp,
    NotedRecipe,
    OnceUnwritable,
    Place,
    Remains,
    Seen,
    Trace,
    Unwritable,
)
from elbowroom.runtime.replay.script import (
    NOWHERE,
    Instruction,
    NormStatistics,
    NumberedRecipe,
    Ref,
)
from elbowroom.runtime.slot import Geometry, Slot, View


class InstructionWriter:
    """Writes the instructions of a script, and notes which ops they need to be compared."""

    def __init__(
        self,
        ops: list[NotedOp],
        done: list[NotedInstruction],
        noted: Callable[[Ready], NotedRecipe],
    ) -> None:
        self._ops, self._note = ops, noted
        self._done = [(one, slot) for one in done if (slot := one.slot()) is not None]
        self._numbers: dict[int, int] = {}  # of slots, by id
        self._slots: list[Slot | Remains] = []
        self._noted: dict[tuple[int, int], int] = {}  # of what is saved, by op and place in it
        self._guarded: set[int] = set()  # ops whose arguments are compared
        self._sourced: set[int] = set()  # ops whose operands are compared, too
        self._fixed: set[tuple[int, int]] = set()  # where the parameters lie that recipes read
        self._views: dict[tuple[int, int], View | Seen] = {}
        self._first: dict[int, tuple[int, int]] = {}  # of a slot: where it is saved first
        self._saved_at: dict[Place, tuple[int, int]] = {}

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

    def _norm(self, norm: NotedNorm) -> NormStatistics:
        return NormStatistics(
            self._statistic(*norm.mean), self._statistic(*norm.rstd), norm.inner, norm.rows
        )

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


def read_by(instruction: Instruction) -> Iterator[int]:
    """Numbers of the slots that a instruction takes anything of."""
    yield instruction.mask
    for recipe in instruction.recipe or ():
        yield from recipe.slots


def _read_bits(instruction: Instruction) -> Iterator[int]:
    """Numbers of the slots whose bits a instruction takes."""
    yield instruction.mask
    for recipe in instruction.recipe or ():
        yield recipe.bits
