"""A script compiled to functions: one for each comparison and action of a replayed step.

    guard(replay, args, kwargs) -> bool     compares the arguments of a call with the script's
    Hold                                    what a saved tensor must be, and the function
                                            (replay, x) -> held that makes what autograd holds of it
    instruction(replay, slot, whole, x)     sets the value of a slot (`instructions.py`)

All constants of the script are bound to these functions: dtypes, shapes, sizes, numbers of slots
and seeds, the codec's coder. So a replayed step needs no lookups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from elbowroom.runtime.contents import are_equal
from elbowroom.runtime.handles import EncodeHandle, KeepHandle
from elbowroom.runtime.replay.held import Coded, Flat, encoder, kept
from elbowroom.runtime.replay.instructions import do, late
from elbowroom.runtime.replay.script import (
    NOWHERE,
    Instruction,
    Like,
    ScriptedCall,
    ScriptedSave,
    instructions_of,
)
from elbowroom.runtime.replay.sizes import Varying, now
from elbowroom.runtime.slot import Geometry, View

if TYPE_CHECKING:
    from elbowroom.runtime.replay.replay import Replay

_innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks
Guard = Callable[["Replay", tuple[Any, ...], dict[str, Any]], bool]
Check = Callable[["Replay", Any], bool]
# Requirements of a saved tensor, and what is done with it:
#   shape, strides, offset, dtype   of the tensor. A shape of None: the function compares them, and
#                                   returns None if they differ
#   same            number of the place (`Places`) that its storage must be; NOWHERE: any
#   nbytes          bytes of its storage, if no op before has saved that; else NOWHERE
#   place, noted    numbers under which later ops and recipes find it; NOWHERE: they do not
#   source          its slot's number, if other tensors are rebuilt from it; else NOWHERE
#   function        makes what autograd holds in its place; None: the tensor is only kept
Hold = tuple[Any, Any, int, Any, int, int, int, int, int, Callable[["Replay", Tensor], Any] | None]


class Act:
    """One step of a script, compiled.

    holds      a `Hold` for each tensor that it saves, or None where that is only kept; None: all
               of them are only kept
    ends       an action follows when it has run
    max_numel  the most elements that the forward may have saved when it has run
    saves_nothing  and nothing else is done for it
    kept_numel  elements of what it saves, all of which autograd keeps by itself, with no hook of
               ours; 0: hooks take it, or it saves nothing
    """

    __slots__ = (
        *("after", "before", "copies", "ends", "frees", "func", "guard", "holds", "inputs"),
        *("inside", "is_plain", "kept_numel", "max_numel", "module", "numel", "opens"),
        *("out_numel", "place", "run", "saves", "saves_nothing"),
    )

    def __init__(
        self, step: ScriptedCall, flat: Flat, max_numel: int = 0, *, is_exact: bool = True
    ) -> None:
        """flat: what is held without slots. is_exact: nothing in its script is lossy."""
        self.func: Callable[..., Any] = step.func
        self.is_plain: bool = step.is_plain
        self.guard: Guard | None = None if step.args is None else _guard(step)
        self.saves: tuple[ScriptedSave | None, ...] | None = step.saves
        self.holds: tuple[Hold | None, ...] | None = (
            None
            if step.saves is None
            else tuple(s and _hold(s, is_exact, flat) for s in step.saves)
        )
        self.run: Callable[..., Any] = step.run or step.func
        self.before, self.after = (
            tuple(late(instruction, is_exact) for instruction in some)
            for some in (step.before, step.after)
        )
        self.opens, self.place, self.copies = step.opens, step.place, step.copies
        self.frees = step.frees
        self.ends = bool(step.place != NOWHERE or step.copies or step.after or step.frees)
        self.module: weakref.ref[nn.Module] | None = step.module
        self.inside = step.inside
        self.out_numel = step.out_numel
        self.kept_numel = (step.numel or 0) if step.is_plain and step.out_numel else 0
        self.saves_nothing: bool = step.is_plain and step.numel == 0
        self.inputs, self.numel, self.max_numel = step.inputs, step.numel, max_numel


class Compiled:
    """The acts of a script, and the actions at the end of the forward.

    is_exact  nothing in it is lossy
    """

    def __init__(
        self, steps: Sequence[ScriptedCall], last: Sequence[Instruction], max_numels: Sequence[int]
    ) -> None:
        exact = not any(instruction.is_lossy for instruction in instructions_of(steps, last))
        self.is_exact = exact
        self.flat = flat = Flat(steps, last)
        acts = [
            Act(step, flat, numel, is_exact=exact)
            for step, numel in zip(steps, max_numels, strict=True)
        ]
        # The last one is no call: nothing is equal to its function.
        self.acts = (*acts, Act(ScriptedCall(_nothing), flat))
        self.last = tuple(late(instruction, exact) for instruction in last)


def _nothing() -> None:
    """No call is this one."""


# --- What a call must be


def _guard(step: ScriptedCall) -> Guard:
    """Compares the arguments of a call: constants by identity first, then all tensors at once."""
    assert step.args is not None
    count, names = len(step.args), tuple(name for name, _ in step.kwargs)
    wants = (*step.args, *(want for _, want in step.kwargs))
    others = tuple((i, x, _fits(x)) for i, x in enumerate(wants) if not _is_compared(x))
    are_alike = _alike([(i, want) for i, want in enumerate(wants) if _is_compared(want)])
    saves, runs_itself = bool(step.saves), step.run is None
    needs_more = step.direct is not None or step.levels is not None

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
        if not torch.is_grad_enabled():
            return False
        # As `Replay.is_innermost`, whose call would be one more for each op. A node of ours that
        # runs inside of a checkpoint would not run in its second run.
        hooks = _innermost_hooks(True)
        if hooks is None or getattr(hooks[0], "__self__", None) is not replay:
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

    if (kind is float and (not want or want != want)) or kind is complex:
        return lambda replay, value: value is want or are_equal(value, want)

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
    at = tuple(i for i, _ in wants)
    kinds = tuple((one.kind, one.traits, *one.geometry[:2], one.parameter) for _, one in wants)
    rows = tuple(
        (i, one.geometry.offset, one.parameter, one.address, one.same, one.place)
        for i, one in wants
    )
    check = _is_new

    def are_alike(replay: Replay, values: Any) -> bool:
        nonlocal check
        given = values if len(at) == len(values) else [values[i] for i in at]
        if not check(*given):
            if not all(map(_is_of_kind, given, kinds)):
                return False
            check = _comparison(given)
        for i, offset, parameter, address, same, place in rows:
            x = values[i]
            if (
                x.storage_offset() != offset
                if parameter is None
                else x is not parameter or x.data_ptr() != address
            ):
                return False
            if same != NOWHERE and not replay.places.has(same, x):
                return False
            if place != NOWHERE:
                replay.places.note(place, x)
        return True

    return are_alike


def _is_of_kind(x: Any, kind: tuple[Any, ...]) -> bool:
    """Returns whether x is a tensor of this class, and of these traits, shape and strides.

    A parameter is compared by its identity besides, and by its address in place of its device.
    """
    wanted, (dtype, device, requires_grad, layout), shape, stride, parameter = kind
    return (
        type(x) is wanted
        and x.dtype is dtype
        and x.requires_grad is requires_grad
        and x.layout is layout
        and x.shape == shape
        and x.stride() == stride
        and (parameter is not None or x.device == device)
    )


def _is_new(*tensors: Tensor) -> bool:
    """Stands for a comparison until tensors that are as the script says have been seen."""
    return False


def _comparison(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Returns one comparison of class, dispatch keys, device, dtype, requires_grad, shape, strides.

    It compares several tensors with these, of which it keeps none, in one call of C++: 0.1 us in
    place of 0.6 us a tensor. What it finds different is compared by `_is_of_kind` again.
    """
    sizes: list[Any] = [list(x.shape) for x in tensors]
    strides: list[Any] = [list(x.stride()) for x in tensors]
    known = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    compare: Callable[..., bool] = known.check
    return compare


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


def _hold(save: ScriptedSave, is_exact: bool, flat: Flat) -> Hold:
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


def _hold_first(hold: Callable[[Replay, Tensor], Any] | None) -> Callable[[Replay, Tensor], Any]:
    def hold_first(replay: Replay, x: Tensor) -> Any:
        replay.check_for_compiled()
        return kept if hold is None else hold(replay, x)

    return hold_first


def _hold_in_slot(save: ScriptedSave, is_exact: bool) -> Callable[[Replay, Tensor], Any]:
    number, fresh, geometry, need = save.slot, save.fresh, save.geometry, save.need
    whole = geometry if save.whole is None else save.whole
    instruction = None if save.instruction is None else do(save.instruction, is_exact)
    keeps, shared = save.waits or (fresh and instruction is None), save.shared

    def hold_again(replay: Replay, x: Tensor) -> View:
        return View(replay.slots[number], geometry, need)

    if not (fresh or keeps or instruction is not None):
        return hold_again  # one more view, as of each step of a loop over a sequence

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


def _hold_code(save: ScriptedSave, is_exact: bool) -> Callable[[Replay, Tensor], Any]:
    """Holds a code by itself, and in a slot what the codec holds exactly: more bytes than known."""
    instruction, hold_in_slot = save.instruction, _hold_in_slot(save, is_exact)
    assert instruction is not None
    encode = encoder(instruction, alone=True)

    def hold(replay: Replay, x: Tensor) -> Any:
        held = encode(replay, x)
        if type(held) is Coded:
            return held
        if type(held) is not EncodeHandle or held.exact:
            return hold_in_slot(replay, x)
        held.is_shared, held.record = False, replay.record
        return held

    return hold


def _hold_varying(save: ScriptedSave, is_exact: bool) -> Callable[[Replay, Tensor], Any]:
    """Holds what has another number of rows in each forward."""
    wanted, dtype, same, need = save.geometry, save.dtype, save.same, save.need
    number, fresh, nbytes = save.slot, save.fresh, save.nbytes
    all_of_it = save.geometry if save.whole is None else save.whole
    place, noted = save.place, save.noted
    instruction = None if save.instruction is None else do(save.instruction, is_exact)
    keeps, shared = save.waits or (fresh and instruction is None), save.shared

    def fits(replay: Replay, x: Tensor, geometry: Geometry) -> bool:
        if isinstance(wanted, Varying):
            return wanted.fits(replay.sizes, x)
        return geometry == wanted

    def covers(replay: Replay, takes: int) -> bool:
        if nbytes != NOWHERE:
            return takes == nbytes
        numel, rest = divmod(takes, dtype.itemsize)
        return not rest and isinstance(all_of_it, Varying) and all_of_it.covers(replay.sizes, numel)

    def hold(replay: Replay, x: Tensor) -> Any:
        geometry = Geometry.of(x)
        if (
            x.dtype is not dtype
            or replay.has_grown
            or not fits(replay, x, geometry)
            or (same != NOWHERE and not replay.places.has(same, x))
        ):
            return None
        if fresh and not covers(replay, x.untyped_storage().nbytes()):
            return None
        whole = now(all_of_it, replay.sizes)
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
