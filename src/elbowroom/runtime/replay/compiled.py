"""A script as functions: one for each comparison and action of a replayed step.

    guard(replay, args, kwargs) -> bool     whether a call is the one
    Hold                                    what a saved tensor must be, and the function
                                            (replay, x) -> held that makes what autograd holds of it
    instruction(replay, slot, whole, x)     sets the value of a slot

All that is known beforehand is bound: kinds, shapes, sizes, numbers of slots and seeds, the codec's
coder. So a replayed step needs no lookups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elbowroom.codecs.compact import Coder, Compact
from elbowroom.plan import Need
from elbowroom.plan.action import Encode, Keep, Rebuild
from elbowroom.runtime.handles import (
    CastHandle,
    EncodeHandle,
    Handle,
    KeepHandle,
    RebuildHandle,
)
from elbowroom.runtime.handles.rebuild import Op, Ready
from elbowroom.runtime.masks import mask_bits
from elbowroom.runtime.replay.held import Coded, Flat, Unheld, kept
from elbowroom.runtime.replay.script import (
    NOWHERE,
    Instruction,
    Like,
    NumberedRecipe,
    Save,
    Step,
    instructions_of,
)
from elbowroom.runtime.replay.sizes import Varying, now
from elbowroom.runtime.serving import is_normalized, normalized, perform
from elbowroom.runtime.slot import Geometry, Slot, View
from elbowroom.runtime.storage import versions_of

if TYPE_CHECKING:
    from elbowroom.runtime.replay.replay import Replay

Guard = Callable[["Replay", tuple[Any, ...], dict[str, Any]], bool]
Check = Callable[["Replay", Any], bool]
# Shape, strides, offset, dtype, place to be in (`same`), bytes of a fresh storage, place and number
# to be noted by, number as a source, and the function that holds it; that of a shape of None
# compares it, too, and returns None for another one. A function of None: it is only kept.
Hold = tuple[Any, Any, int, Any, int, int, int, int, int, Callable[["Replay", Tensor], Any] | None]
Do = Callable[["Replay", Slot, Tensor, Tensor], None]
Late = Callable[["Replay"], None]


class Act:
    """A step of a script, compiled.

    holds  one for each tensor that it saves, None for what is only kept; None: all of it is
    ends   an action follows when it has run
    most   elements that the forward has saved at most when it has run
    """

    __slots__ = (
        *("after", "before", "copies", "ends", "frees", "func", "guard", "holds", "inputs"),
        *("inside", "is_plain", "module", "most", "numel", "opens", "place", "run", "saves"),
    )

    def __init__(self, step: Step, flat: Flat, most: int = 0, *, is_exact: bool = True) -> None:
        """flat: what is held without slots. is_exact: nothing in its script is lossy."""
        self.func: Callable[..., Any] = step.func
        self.is_plain: bool = step.is_plain
        self.guard: Guard | None = None if step.args is None else _guard(step)
        self.saves: tuple[Save | None, ...] | None = step.saves
        self.holds: tuple[Hold | None, ...] | None = (
            None
            if step.saves is None
            else tuple(s and _hold(s, is_exact, flat) for s in step.saves)
        )
        self.run: Callable[..., Any] = step.run or step.func
        self.before, self.after = (
            tuple(_late(instruction, is_exact) for instruction in some)
            for some in (step.before, step.after)
        )
        self.opens, self.place, self.copies = step.opens, step.place, step.copies
        self.frees = step.frees
        self.ends = bool(step.place != NOWHERE or step.copies or step.after or step.frees)
        self.module: weakref.ref[nn.Module] | None = step.module
        self.inside = step.inside
        self.inputs, self.numel, self.most = step.inputs, step.numel, most


class Compiled:
    """The acts of a script, and the actions at the end of the forward."""

    def __init__(
        self, steps: Sequence[Step], last: Sequence[Instruction], mosts: Sequence[int]
    ) -> None:
        exact = not any(instruction.is_lossy for instruction in instructions_of(steps, last))
        self.flat = flat = Flat(steps, last)
        acts = [
            Act(step, flat, most, is_exact=exact) for step, most in zip(steps, mosts, strict=True)
        ]
        # The last one is no call: nothing is equal to its function.
        self.acts = (*acts, Act(Step(_nothing), flat))
        self.last = tuple(_late(instruction, exact) for instruction in last)


def _nothing() -> None:
    """No call is this one."""


# --- What a call must be


def _guard(step: Step) -> Guard:
    """Compares the arguments of a call: constants by identity first, then all tensors at once."""
    assert step.args is not None
    count, names = len(step.args), tuple(name for name, _ in step.kwargs)
    wants = (*step.args, *(want for _, want in step.kwargs))
    others = tuple((i, x, _fits(x)) for i, x in enumerate(wants) if not _is_compared(x))
    are_alike = _alike([(i, want) for i, want in enumerate(wants) if _is_compared(want)])
    saves, runs_itself, needs_more = bool(step.saves), step.run is None, step.direct is not None

    def guard(replay: Replay, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if len(args) != count or tuple(kwargs) != names:
            return False
        values = (*args, *kwargs.values()) if names else args
        for i, want, fits in others:
            value = values[i]
            if value is not want and not fits(replay, value):
                return False
        if not are_alike(replay, values):
            return False
        if not saves and runs_itself:
            return True  # it saves nothing: a mask that is made without gradients, too
        if not torch.is_grad_enabled() or (saves and not replay.is_innermost()):
            return False
        return not needs_more or replay.may_stand(step, args, kwargs)

    return guard


def _is_compared(want: Any) -> bool:
    """Returns whether an argument may have changed although it is the same object."""
    kind = type(want)
    return kind is Like or kind is list or (kind is tuple and any(map(_is_compared, want)))


def _fits(want: Any) -> Check:
    kind = type(want)
    if kind is Like:
        are_alike = _alike([(0, want)])
        return lambda replay, value: are_alike(replay, (value,))
    if kind is tuple or kind is list:
        each = tuple(map(_fits, want))
        stays = not _is_compared(want)

        def fits_all(replay: Replay, value: Any) -> bool:
            if stays and value is want:
                return True
            if type(value) is not kind or len(value) != len(each):
                return False
            return all(fits(replay, x) for fits, x in zip(each, value, strict=True))

        return fits_all

    def equals(replay: Replay, value: Any) -> bool:
        return value is want or (type(value) is kind and bool(want == value))

    return equals


def _alike(wants: Sequence[tuple[int, Any]]) -> Check:
    """Compares values with those wanted, by position, in this order: it notes their places."""
    if any(type(want) is not Like or isinstance(want.geometry, Varying) for _, want in wants):
        checks = [
            (i, _fits_varying(want, want.geometry))
            if type(want) is Like and isinstance(want.geometry, Varying)
            else (i, _fits(want))
            for i, want in wants
        ]
        return lambda replay, values: all(fits(replay, values[i]) for i, fits in checks)
    rows = tuple(
        (i, one.kind, one.traits, *one.geometry, one.parameter, one.address, one.same, one.place)
        for i, one in wants
    )

    def are_alike(replay: Replay, values: Any) -> bool:
        for i, kind, traits, shape, stride, offset, parameter, address, same, place in rows:
            x = values[i]
            dtype, device, requires_grad, layout = traits
            if (
                type(x) is not kind
                or x.dtype is not dtype
                or x.requires_grad is not requires_grad
                or x.layout is not layout
                or x.device != device
                or x.shape != shape
                or x.stride() != stride
                or x.storage_offset() != offset
            ):
                return False
            if parameter is not None:
                if x is not parameter or x.data_ptr() != address:
                    return False
                continue
            if same != NOWHERE and not replay.places.has(same, x):
                return False
            if place != NOWHERE:
                replay.places.note(place, x)
        return True

    return are_alike


def _fits_varying(like: Like, geometry: Varying) -> Check:
    kind: Any = like.kind
    (dtype, device, requires_grad, layout), same, place = like.traits, like.same, like.place

    def fits(replay: Replay, x: Any) -> bool:
        if (
            type(x) is not kind
            or x.dtype is not dtype
            or x.requires_grad is not requires_grad
            or x.layout is not layout
            or x.device != device
            or not geometry.fits(replay.sizes, x)
            or (same != NOWHERE and not replay.places.has(same, x))
        ):
            return False
        if place != NOWHERE:
            replay.places.note(place, x)
        return True

    return fits


# --- What is held of a tensor


def _hold(save: Save, is_exact: bool, flat: Flat) -> Hold:
    varies = isinstance(save.geometry, Varying) or isinstance(save.whole, Varying)
    hold: Callable[[Replay, Tensor], Any] | None
    if varies:
        hold = _hold_varying(save, is_exact)
    elif save.slot in flat.coded:
        hold = _hold_code(save, is_exact)
    else:
        hold = flat.holder(save) or _hold_in_slot(save, is_exact)
        hold = None if hold is kept else hold
    if save.slot == 0 and save.fresh:
        hold = _hold_first(hold)
    if varies:
        return None, None, 0, None, NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE, hold
    nbytes, source = (
        number if wanted else NOWHERE
        for number, wanted in ((save.nbytes, save.fresh), (save.slot, flat.is_source(save)))
    )
    return *save.geometry, save.dtype, save.same, nbytes, save.place, save.noted, source, hold


def _hold_first(
    hold: Callable[[Replay, Tensor], Any] | None,
) -> Callable[[Replay, Tensor], Any]:
    def hold_first(replay: Replay, x: Tensor) -> Any:
        replay.check_for_compiled()
        return kept if hold is None else hold(replay, x)

    return hold_first


def _hold_in_slot(save: Save, is_exact: bool) -> Callable[[Replay, Tensor], Any]:
    number, fresh, geometry, need = save.slot, save.fresh, save.geometry, save.need
    whole = geometry if save.whole is None else save.whole
    instruction = None if save.instruction is None else _do(save.instruction, is_exact)
    keeps, shared = save.waits or (fresh and instruction is None), save.shared

    def hold(replay: Replay, x: Tensor) -> View:
        if fresh:
            slot = replay.slots[number] = replay.new_slot(number, x, whole)
            if shared is not None:
                slot.shared = replay.context.planned if shared else replay.context.made_again
        else:
            slot = replay.slots[number]
        base = x if whole is geometry else whole.on(x)
        if keeps:
            slot.value = KeepHandle(base, "")
        if instruction is not None:
            instruction(replay, slot, base, x)
        return View(slot, geometry, need)

    return hold


def _hold_code(save: Save, is_exact: bool) -> Callable[[Replay, Tensor], Any]:
    """Holds a code by itself, and in a slot what the codec holds exactly: more bytes than known."""
    instruction, hold_in_slot = save.instruction, _hold_in_slot(save, is_exact)
    assert instruction is not None
    encode = _encoder(instruction, alone=True)

    def hold(replay: Replay, x: Tensor) -> Any:
        held = encode(replay, x)
        if type(held) is Coded:
            return held
        if type(held) is not EncodeHandle or held.exact:
            return hold_in_slot(replay, x)
        held.is_shared, held.token = False, replay.token
        return held

    return hold


def _hold_varying(save: Save, is_exact: bool) -> Callable[[Replay, Tensor], Any]:
    """Holds what has another number of rows in each forward."""
    wanted, dtype, same, need = save.geometry, save.dtype, save.same, save.need
    number, fresh, nbytes = save.slot, save.fresh, save.nbytes
    all_of_it = save.geometry if save.whole is None else save.whole
    place, noted = save.place, save.noted
    instruction = None if save.instruction is None else _do(save.instruction, is_exact)
    keeps, shared = save.waits or (fresh and instruction is None), save.shared

    def fits(replay: Replay, x: Tensor, geometry: Geometry) -> bool:
        if isinstance(wanted, Varying):
            return wanted.fits(replay.sizes, x)
        return geometry == wanted

    def hold(replay: Replay, x: Tensor) -> Any:
        geometry = Geometry.of(x)
        if (
            x.dtype is not dtype
            or replay.has_grown
            or not fits(replay, x, geometry)
            or (same != NOWHERE and not replay.places.has(same, x))
        ):
            return None
        whole = now(all_of_it, replay.sizes)
        takes = prod(whole.shape) * dtype.itemsize if nbytes == NOWHERE else nbytes
        if fresh and x.untyped_storage().nbytes() != takes:
            return None
        if place != NOWHERE:
            replay.places.note(place, x)
        if noted != NOWHERE:
            replay.noted[noted] = x.detach()
        if number == NOWHERE:
            return kept
        if fresh:
            replay.slots[number] = replay.new_slot(number, x, whole)
            if shared is not None:
                context = replay.context
                replay.slots[number].shared = context.planned if shared else context.made_again
        slot, base = replay.slots[number], whole.on(x)
        if keeps:
            slot.value = KeepHandle(base, "")
        if instruction is not None:
            instruction(replay, slot, base, x)
        return View(slot, geometry, need)

    return hold


# --- What a slot is given


def _late(instruction: Instruction, is_exact: bool) -> Late:
    """Sets a slot's value after the tensor was saved: it is kept until then."""
    number, do = instruction.slot, _do(instruction, is_exact)

    def late(replay: Replay) -> None:
        slot = replay.slots[number]
        kept = slot.value
        if isinstance(kept, KeepHandle) and not kept.was_changed:
            x = kept.restore()
            do(replay, slot, x, x)

    return late


def _do(instruction: Instruction, is_exact: bool) -> Do:
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
    encode: Callable[[Replay, Tensor], Any] = _encoder(instruction)

    def encode_in_slot(replay: Replay, slot: Slot, whole: Tensor, x: Tensor) -> None:
        slot.hold(encode(replay, whole))

    return encode_in_slot


def _encoder(
    instruction: Instruction, *, alone: bool = False
) -> Callable[[Replay, Tensor], Handle | Coded]:
    """Encodes by a coder of tensors of this shape, where the codec has one.

    There is no reference to the encoded tensor, unless one of this site has lasted until backward.

    alone: a slot is not needed
    """
    action, perform_it, name = instruction.action, _performer(instruction), instruction.name
    assert isinstance(action, Encode)
    is_longer = action.least is not None or action.moved is not None
    if instruction.mask != NOWHERE or is_longer or instruction.varies:
        # Bits of this forward; other values, or another place; another number of rows.
        return perform_it
    codec, facts, nth, norm = action.codec, action.facts, instruction.draw, instruction.norm
    is_normal = is_normalized(action) and (action.rows is not None or norm is not None)
    coders: list[Coder | None] = []  # one, made of the first tensor

    def encode(replay: Replay, whole: Tensor) -> Handle | Coded:
        if not coders:
            coders.append(Coder.of(codec, whole, facts))
        coder = coders[0]
        if coder is None:
            return perform_it(replay, whole)
        normal = None
        if is_normal:
            normal = normalized(action, whole, None if norm is None else norm.statistics(replay))
        affine = None if normal is None else normal.normalize()
        encoded = coder.encode(whole, replay.draw(nth), affine)
        base = whole if name in (outlived := replay.context.outlived) else None
        unheld = Unheld(weakref.ref(whole.untyped_storage()), outlived, name)
        if alone and base is None and type(encoded) is Compact:
            return Coded((encoded, normal, replay.token, unheld))
        handle = EncodeHandle(encoded, base, None, None if encoded.raw else normal)
        handle.unheld = unheld
        return handle

    return encode


def _rebuild(instruction: Instruction, is_exact: bool) -> Do:
    """Holds the recipe; in an exact script without the statistics that it reads of codes alone."""
    assert instruction.recipe is not None
    make_ready, must_be_exact = _ready(instruction.recipe, is_exact), instruction.need is Need.EXACT
    steps = tuple(instruction.recipe)
    sources = {number for step in steps for number in step.sources}
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
    if any(isinstance(one, Varying) for one in (seen, made, *seens)):
        return _ready_varying(recipe, below, others, bound)

    def make_ready(replay: Replay) -> Ready:
        slots = replay.slots
        return Ready(
            op if bound is None else bound(*[ref.tensor(replay) for ref in given]),
            slots[number] if below is None else below(replay),
            seen,
            made,
            tuple(versions_of(fixed)) if fixed else (),
            None if bits == NOWHERE else slots[bits].bits,
            None if noise == NOWHERE else slots[noise],
            tuple([other(replay) for other in others]),
        )

    return make_ready


def _ready_varying(
    recipe: NumberedRecipe,
    below: Callable[[Replay], Ready] | None,
    others: tuple[Callable[[Replay], Slot | Ready], ...],
    bound: Callable[..., Op] | None,
) -> Callable[[Replay], Ready]:
    """Returns the recipe as `_ready` does, for tensors whose number of rows varies."""
    op, source, bits, noise = recipe.op, recipe.source, recipe.bits, recipe.noise

    def make_ready(replay: Replay) -> Ready:
        slots, sizes = replay.slots, replay.sizes
        links = tuple([(link, now(seen, sizes)) for link, seen in op.others])
        again = op.changed(others=links) if bound is None else bound(*_given(recipe, replay))
        return Ready(
            again,
            slots[source] if isinstance(source, int) else below(replay),  # type: ignore[misc]
            now(recipe.seen, sizes),
            now(recipe.made, sizes),
            tuple(versions_of(op.fixed)),
            None if bits == NOWHERE else slots[bits].bits,
            None if noise == NOWHERE else slots[noise],
            tuple([other(replay) for other in others]),
        )

    return make_ready


def _given(recipe: NumberedRecipe, replay: Replay) -> list[Tensor]:
    return [ref.tensor(replay) for ref in recipe.given]


def _slot(number: int) -> Callable[[Replay], Slot]:
    return lambda replay: replay.slots[number]


def _perform(instruction: Instruction) -> Do:
    """Performs an action that has no specialized function."""
    perform_it, stays_itself = _performer(instruction), isinstance(instruction.action, Keep)

    def perform_in_slot(replay: Replay, slot: Slot, whole: Tensor, x: Tensor) -> None:
        slot.hold(perform_it(replay, whole))
        if not stays_itself:  # between two codes, without dropping bits
            slot.drop_needless_bits()

    return perform_in_slot


def _performer(instruction: Instruction) -> Callable[[Replay, Tensor], Handle]:
    action = instruction.action
    assert action is not None
    takes_seed = isinstance(action, Encode)

    def perform_it(replay: Replay, whole: Tensor) -> Handle:
        now = (
            action
            if instruction.mask == NOWHERE
            else instruction.masked(replay.slots[instruction.mask].bits)
        )
        seed = replay.draw_for(whole, instruction.draw) if takes_seed else 0
        norm = None if instruction.norm is None else instruction.norm.statistics(replay)
        need, name = instruction.need, instruction.name
        return perform(now, whole, need, None, seed, None, norm, name, replay.context)

    return perform_it
