"""Instructions of a script as functions: each sets the value of a slot of the forward that runs.

do      as a tensor is saved: (replay, slot, whole, x); `whole` is all of its storage
late    before or after a later op has run: (replay); until then the tensor is kept
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from elbowroom.plan import Need
from elbowroom.plan.action import Encode, Keep, Rebuild
from elbowroom.runtime.handles import CastHandle, KeepHandle, RebuildHandle
from elbowroom.runtime.handles.rebuild import InScript, Op, Ready
from elbowroom.runtime.masks import mask_bits
from elbowroom.runtime.replay.held import encoder, performer
from elbowroom.runtime.replay.script import NOWHERE, Instruction, NumberedRecipe
from elbowroom.runtime.replay.sizes import Varying, now
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.storage import versions_of

if TYPE_CHECKING:
    from elbowroom.runtime.replay.replay import Replay

Do = Callable[["Replay", Slot, Tensor, Tensor], None]
Late = Callable[["Replay"], None]


def late(instruction: Instruction, is_exact: bool) -> Late:
    """Sets a slot's value after the tensor was saved: it is kept until then."""
    number, set_now = instruction.slot, do(instruction, is_exact)

    def set_value(replay: Replay) -> None:
        slot = replay.slots[number]
        kept = slot.value
        if isinstance(kept, KeepHandle) and not kept.was_changed:
            x = kept.restore()
            set_now(replay, slot, x, x)

    return set_value


def do(instruction: Instruction, is_exact: bool) -> Do:
    """Returns the function that performs an instruction on a slot."""
    action = instruction.action
    if instruction.bits:
        return _pack_bits(instruction)
    if action is None:
        return _hold_shape if instruction.need is Need.SHAPE else _cast_or_keep(instruction)
    if isinstance(action, Encode):
        return _encode(instruction)
    if isinstance(action, Rebuild):
        return _rebuild(instruction, is_exact)
    return _perform(instruction)


def _pack_bits(instruction: Instruction) -> Do:
    op, covers = instruction.bits, instruction.covers

    def pack_bits(replay: Replay, slot: Slot, whole: Tensor, x: Tensor) -> None:
        bits = mask_bits(whole, op, only_output=covers)
        if bits is None:
            slot.hold(KeepHandle(whole, "a NaN, of which a bit cannot tell"))
        else:
            slot.mask_of = op
            slot.hold_bits(bits)

    return pack_bits


def _hold_shape(replay: Replay, slot: Slot, whole: Tensor, x: Tensor) -> None:
    slot.value = None
    slot.hold_shape()


def _cast_or_keep(instruction: Instruction) -> Do:
    is_exact = instruction.need is Need.EXACT

    def cast_or_keep(replay: Replay, slot: Slot, whole: Tensor, x: Tensor) -> None:
        cast = CastHandle.of(x, whole, replay.began) if is_exact else None
        slot.hold(cast or KeepHandle(whole, "no cast of a parameter"))

    return cast_or_keep


def _encode(instruction: Instruction) -> Do:
    encode: Callable[[Replay, Tensor], Any] = encoder(instruction)

    def encode_in_slot(replay: Replay, slot: Slot, whole: Tensor, x: Tensor) -> None:
        slot.hold(encode(replay, whole))

    return encode_in_slot


def _rebuild(instruction: Instruction, is_exact: bool) -> Do:
    """Holds the recipe; in an exact script without the statistics that it reads of codes alone."""
    assert instruction.recipe is not None
    make_ready, must_be_exact = _ready(instruction.recipe, is_exact), instruction.need is Need.EXACT
    steps = tuple(instruction.recipe)
    sources = tuple({number for step in steps for number in step.sources})

    def rebuild_exactly(replay: Replay, slot: Slot, whole: Tensor, x: Tensor) -> None:
        slots = replay.slots
        for number in sources:
            slots[number].is_source = True
        slot.value = RebuildHandle(make_ready(replay), whole)  # its entry knows what it holds

    if is_exact:
        return rebuild_exactly
    # What works on codes is known, but for ops that need bits, which are not there in every step.
    may_be_lossy = all(step.noise != NOWHERE or _works_lossy(step, is_exact) for step in steps)
    needed = {step.bits for step in steps if step.op.needs_bits and step.noise == NOWHERE}
    may_be_lossy, needed = may_be_lossy and NOWHERE not in needed, needed - {NOWHERE}

    def rebuild(replay: Replay, slot: Slot, whole: Tensor, x: Tensor) -> None:
        slots, works_lossy = replay.slots, may_be_lossy
        for number in needed:
            works_lossy = works_lossy and slots[number].bits is not None
        ready = make_ready(replay)
        if not (works_lossy or ready.exact):
            slot.hold(KeepHandle(whole, "what it would be made of has no bits for it in this step"))
            return
        if must_be_exact or not works_lossy:
            ready.pin()
        for number in sources:
            slots[number].is_source = True
        slot.hold(RebuildHandle(ready, whole))

    return rebuild


def _is_bound(op: Op, is_exact: bool) -> bool:
    """Returns whether an op is made anew of the statistics of each forward."""
    return op.bound is not None and (op.of_given is not None or not is_exact)


def _works_lossy(step: NumberedRecipe, is_exact: bool) -> bool:
    return step.works_lossy if _is_bound(step.op, is_exact) else step.op.works_lossy


def _ready(recipe: NumberedRecipe, is_exact: bool) -> Callable[[Replay], Ready]:
    """Returns the recipe with the slots of the forward that runs."""
    op, source, fixed = recipe.op, recipe.source, recipe.op.fixed
    number = source if isinstance(source, int) else NOWHERE
    seen, made, given = recipe.seen, recipe.made, recipe.given
    bits, noise = recipe.bits, recipe.noise
    below = None if isinstance(source, int) else _ready(source, is_exact)
    others = tuple(
        _slot(one) if isinstance(one, int) else _ready(one, is_exact) for one in recipe.others
    )
    bound = op.bound if _is_bound(op, is_exact) else None
    seens = tuple(geometry for _, geometry in op.others)
    known = InScript(is_exact=is_exact)
    if any(isinstance(one, Varying) for one in (seen, made, *seens)):
        return _ready_varying(recipe, below, others, bound, known)

    def make_ready(replay: Replay) -> Ready:
        slots = replay.slots
        again = op if bound is None else bound(*[ref.tensor(replay) for ref in given])
        if fixed:
            replay.record.fingerprints.note(again.fixed)
        return Ready(
            again,
            slots[number] if below is None else below(replay),
            seen,
            made,
            tuple(versions_of(fixed)) if fixed else (),
            None if bits == NOWHERE else slots[bits].bits,
            None if noise == NOWHERE else slots[noise],
            tuple([other(replay) for other in others]),
            (),
            replay.record.fingerprints,
            (),
            known,
        )

    return make_ready


def _ready_varying(
    recipe: NumberedRecipe,
    below: Callable[[Replay], Ready] | None,
    others: tuple[Callable[[Replay], Slot | Ready], ...],
    bound: Callable[..., Op] | None,
    known: InScript,
) -> Callable[[Replay], Ready]:
    """Returns the recipe as `_ready` does, for tensors whose number of rows varies."""
    op, source, bits, noise = recipe.op, recipe.source, recipe.bits, recipe.noise

    def make_ready(replay: Replay) -> Ready:
        slots, sizes = replay.slots, replay.sizes
        links = tuple([(link, now(seen, sizes)) for link, seen in op.others])
        again = op.changed(others=links) if bound is None else bound(*_given(recipe, replay))
        replay.record.fingerprints.note(again.fixed)
        return Ready(
            again,
            slots[source] if isinstance(source, int) else below(replay),  # type: ignore[misc]
            now(recipe.seen, sizes),
            now(recipe.made, sizes),
            tuple(versions_of(op.fixed)),
            None if bits == NOWHERE else slots[bits].bits,
            None if noise == NOWHERE else slots[noise],
            tuple([other(replay) for other in others]),
            (),
            replay.record.fingerprints,
            (),
            known,
        )

    return make_ready


def _given(recipe: NumberedRecipe, replay: Replay) -> list[Tensor]:
    return [ref.tensor(replay) for ref in recipe.given]


def _slot(number: int) -> Callable[[Replay], Slot]:
    return lambda replay: replay.slots[number]


def _perform(instruction: Instruction) -> Do:
    """Performs an action that has no specialized function."""
    perform_it, stays_itself = performer(instruction), isinstance(instruction.action, Keep)

    def perform_in_slot(replay: Replay, slot: Slot, whole: Tensor, x: Tensor) -> None:
        slot.hold(perform_it(replay, whole))
        if not stays_itself:  # between two codes, without dropping bits
            slot.drop_needless_bits()

    return perform_in_slot
