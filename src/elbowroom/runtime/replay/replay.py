"""Following a script: the i-th op of a forward does what the i-th op did when it was written.

Nothing is looked up. An op is known by its place. Whether it is the one is seen by its function,
and, where something is done, by its arguments: kinds, shapes, strides, numbers, and which storage
of this forward a tensor lies in. That is asked before the op runs. What does not match ends the
script: a learning context looks at the rest of the forward. What was done so far stays right, for
it was done with the tensors of ops that did match.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elbowroom.plan import Need
from elbowroom.plan.action import Encode, Keep, Rebuild
from elbowroom.runtime import modules, opened
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.calls import intercepted
from elbowroom.runtime.checkpoints import checkpoint_call
from elbowroom.runtime.compiler import eagerly
from elbowroom.runtime.consumers import QUESTIONS, Call
from elbowroom.runtime.context import Context
from elbowroom.runtime.direct import direct_of, may_run
from elbowroom.runtime.direct.attention import levels_by_values
from elbowroom.runtime.handles import CastHandle, KeepHandle
from elbowroom.runtime.handles.keep import check_version, version_of
from elbowroom.runtime.hooks import Saving
from elbowroom.runtime.identity import covering
from elbowroom.runtime.ledger import NOT_COUNTED
from elbowroom.runtime.masks import mask_bits
from elbowroom.runtime.perform import perform
from elbowroom.runtime.recompute import recomputed
from elbowroom.runtime.repeats import why_not_again
from elbowroom.runtime.replay.script import NOWHERE, Deed, Like, Save, Script, Step, state_of_torch
from elbowroom.runtime.slot import Geometry, Slot, View, unpack
from elbowroom.runtime.weak import WeakStorage

_disabled = torch._C.DisableTorchFunction


class Token:
    """Tells by its end that nothing is held any more."""

    __slots__ = ("__weakref__",)


class Kept:
    """A tensor that is only kept, with the version check that hooks switch off.

    token: lives as long as anything that is only kept
    """

    __slots__ = ("_tensor", "_token", "_version")

    def __init__(self, x: Tensor, token: Token | None) -> None:
        self._tensor = x if x.is_leaf else x.detach()  # to ask for `grad_fn` makes an object
        self._version = version_of(x)
        self._token = token

    def restore(self) -> Tensor:
        """Return the tensor; raise RestoreError if it was changed in place."""
        check_version(self._tensor, self._version)
        return self._tensor


class _Again(TorchFunctionMode):
    """Shows a replay, which is open already, what a function of torch's own calls inside."""

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self._replay = replay

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._replay.__torch_function__(func, types, args, kwargs)


class Replay(TorchFunctionMode):
    """A context around one forward that follows `script`; a subclass says who looks at others.

    slots     those of this forward
    noted     statistics that were saved, and that recipes read
    strayed   the forward was another one
    """

    def __init__(self, script: Script, context: Context, others: tuple[Script, ...] = ()) -> None:
        """others: scripts that may turn out to be the right one, before anything is done."""
        super().__init__()
        self.script, self.context = script, context
        self.slots: list[Slot] = []
        self.noted: list[Tensor] = []
        self.strayed = False
        self.saving: Saving | None = None
        self._others = others
        self._steps, self._at = script.steps, 0
        self._saves: tuple[Save | None, ...] | None = None
        self._saved = 0
        self._is_inside = False  # an op runs, so that no function mode is asked
        self._began = 0
        self._places: list[tuple[WeakStorage, int]] = []
        self._seeds: int | None = None  # the context's count before those of this forward
        self._drawn = 0
        self._given = 0  # how many inputs the checkpoints of this step have saved
        self._token: Token | None = None
        self._numel = 0  # of all that was saved
        self._open: ExitStack | None = None
        self._outside = 0  # modules that were called around the model

    def __enter__(self) -> Self:
        self._outside = len(modules.on_stack())
        self.follow(self.script)
        with ExitStack() as opening:
            opening.enter_context(eagerly())
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
            opening.enter_context(hooks)
            super().__enter__()  # type: ignore[no-untyped-call]
            opening.callback(super().__exit__, None, None, None)
            if self.script.recomputes or any(one.recomputes for one in self._others):
                opening.enter_context(intercepted(self._called))
            self._open = opening.pop_all()
        if self.script.state != state_of_torch():
            self._stray()
        return self

    def follow(self, script: Script) -> None:
        """Go on by this script, of which nothing has been done."""
        nowhere: Any = None
        if self._seeds is not None:
            self.context.give_back(self._seeds, self.script.seeds)
        # The same noise for the same tensors, whether a forward is looked at or not.
        self._seeds = self.context.reserve(script.seeds)
        self.script, self._steps = script, script.steps
        self.slots = [nowhere] * script.slots
        self.noted = [nowhere] * script.noted
        self._places = [nowhere] * script.places

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open is None:
            return
        self._open.close()
        self._open = None
        if self.saving is not None:
            self.saving.__exit__(kind, error, trace)
        elif kind is None:
            self.strayed = self._step() is not None
            for deed in self.script.last if not self.strayed else ():
                self._do_late(deed)
        self.slots, self.noted, self._places = [], [], []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in QUESTIONS:
            return func(*args, **(kwargs or {}))
        if self.saving is None:
            step = self._step()
            at = self._at
            # Equal, not the same: what gets an attribute is another object each time.
            if step is not None and (step.func is func or step.func == func):
                self._at = at + 1
                if step.is_plain:
                    outer, numel, self._is_inside = self._is_inside, self._numel, True
                    try:
                        return func(*args, **(kwargs or {}))
                    finally:
                        self._is_inside = outer
                        self._numel = numel if step.numel is None else self._numel
                if step.args is None or self._matches(step, args, kwargs or {}):
                    return self._run(step, args, kwargs or {})
            other = self._other(at, func, args, kwargs or {})
            if other is not None:
                self._at = at + 1
                return self._run(other, args, kwargs or {})
            self._at = at
            self._stray()
        assert self.saving is not None
        return self.saving.see(func, types, args, kwargs)

    def _step(self) -> Step | None:
        """Return the step that comes now."""
        steps, at = self._steps, self._at
        if at >= len(steps):
            return None
        step = steps[at]
        if not step.inputs or step.saves is None or self._given != len(step.saves):
            return step
        self._at, self._given = at + 1, 0
        return steps[at + 1] if at + 1 < len(steps) else None

    def _other(
        self, at: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Step | None:
        """Return step `at` of another script that is the one, if nothing has been done so far."""
        if not self._others or not all(step.is_plain for step in self._steps[:at]):
            return None
        state = state_of_torch()
        for script in self._others:
            steps = script.steps
            if len(steps) <= at or steps[at].func != func or script.state != state:
                continue
            if all(
                a.is_plain and a.func == b.func
                for a, b in zip(steps[:at], self._steps[:at], strict=True)
            ):
                self.follow(script)
                step = steps[at]
                if step.args is None or self._matches(step, args, kwargs):
                    return step
        return None

    @property
    def has_begun(self) -> bool:
        """Whether any function has been called yet."""
        return self._at > 0

    def _run(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for deed in step.before:
            self._do_late(deed)
        outer, numel = (self._saves, self._saved, self._is_inside), self._numel
        self._saves, self._saved, self._is_inside = step.saves, 0, True
        self._began = torch._C._autograd._get_sequence_nr()
        try:
            if step.opens:
                body = opened.opened(step.func, _Again(self))
                out = (body or step.func)(*args, **kwargs)
            else:
                out = (step.run or step.func)(*args, **kwargs)
            if step.saves is not None and self._saved != len(step.saves):
                self._stray()
            if self.saving is None:
                self._end(step, args, out)
        finally:
            self._saves, self._saved, self._is_inside = outer
            self._numel = numel if step.numel is None else self._numel
        return out

    def _end(self, step: Step, args: tuple[Any, ...], out: Any) -> None:
        """An op has run, and was the one."""
        if step.place != NOWHERE:
            self._note_place(step.place, out)
        for position, slot in step.copies:
            self._copy(slot, args[position])
        for deed in step.after:
            self._do_late(deed)

    def _matches(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the arguments are those of the step, and its hooks are ours."""
        wanted = step.args
        assert wanted is not None
        if len(args) != len(wanted) or len(kwargs) != len(step.kwargs):
            return False
        for want, value in zip(wanted, args, strict=True):
            if want is not value and not self._is(want, value):  # most that are no tensors are
                return False
        for name, want in step.kwargs:
            if not self._is(want, kwargs.get(name, step)):
                return False
        if not step.saves and step.run is None:
            return True  # it saves nothing: a mask that is made without gradients, too
        if not torch.is_grad_enabled() or (step.saves and not self._is_asked()):
            return False
        direct = step.direct
        if direct is None:
            return True
        call = Call(step.func, args, kwargs)
        if direct_of(call) is not direct or not may_run(call, direct):
            return False
        return step.levels is None or step.levels.reach(levels_by_values(call))

    def _is(self, wanted: Any, value: Any) -> bool:
        kind = type(wanted)
        if kind is Like:
            if type(value) is not wanted.kind:
                return False
            traits = value.dtype, value.device, value.requires_grad, value.layout
            if traits != wanted.traits:
                return False
            if (value.shape, value.stride(), value.storage_offset()) != wanted.geometry:
                return False
            parameter = wanted.parameter
            if parameter is not None:
                return value is parameter and value.data_ptr() == wanted.address
            if wanted.same != NOWHERE and not self._is_at(wanted.same, value):
                return False
            if wanted.place != NOWHERE:
                self._note_place(wanted.place, value)
            return True
        if kind is not type(value):
            return False
        if kind is tuple or kind is list:
            return len(wanted) == len(value) and all(map(self._is, wanted, value))
        return bool(wanted == value)

    def _is_asked(self) -> bool:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and getattr(hooks[0], "__self__", None) is self

    def _note_place(self, place: int, x: Tensor) -> None:
        self._places[place] = WeakStorage(x), version_of(x)

    def _is_at(self, place: int, x: Tensor) -> bool:
        known = self._places[place]
        if known is None or x.is_inference():  # which has no version that tells of a change
            return False
        storage, version = known
        return bool(x.untyped_storage()._cdata == storage.address) and version_of(x) == version

    def _called(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A module is called, which may be one that runs again in backward."""
        if self.saving is not None:
            return self.saving.calls(module, call, args, kwargs)
        step = self._step()
        if step is None or step.module is None or step.module() is not module:
            return call(*args, **kwargs)
        arguments = Arguments(args, kwargs)
        fits = torch.is_grad_enabled() and self._is_asked()
        if not fits or why_not_again(module, call, arguments):
            self._stray()
            return self._called(module, call, args, kwargs)
        self._at += 1
        with _disabled():  # what we do is no op of the model's
            for deed in step.before:
                self._do_late(deed)
        outer = self._saves, self._saved, self._is_inside
        self._saves, self._saved = step.saves, 0

        def begin() -> None:
            saves = step.saves if self.saving is None else None
            if saves is not None and self._saved != len(saves):
                self._stray()
            self._saves, self._saved, self._is_inside = outer

        try:
            return recomputed(module, call, args, kwargs, arguments, begin)
        finally:
            self._saves, self._saved, self._is_inside = outer

    def _pack(self, x: Tensor) -> Any:
        if self._is_inside:
            return self._packed(x)
        with _disabled():
            return self._packed(x)

    def _packed(self, x: Tensor) -> Any:
        saves = self._saves
        self._numel += x.numel()
        if self.saving is not None:
            return self.saving.take(x)
        if saves is None:
            if self._is_inside or not self.script.codes_checkpoints:
                return Kept(x, self._token)
            return self._input(x)
        i = self._saved
        self._saved = i + 1
        if i < len(saves):
            save = saves[i]
            if save is None:
                return Kept(x, self._token)
            if self._is_saved_as(save, x):
                return self._held(save, x)
        self._stray()
        assert self.saving is not None
        return self.saving.take(x)

    def _input(self, x: Tensor) -> Any:
        """Return what is held of x, which no call of the model's saves."""
        if checkpoint_call(x) is None:
            return Kept(x, self._token)
        step, i = self._step(), self._given
        if step is not None and step.inputs and step.saves is not None:
            for deed in () if i else step.before:
                self._do_late(deed)
            save = step.saves[i]
            self._given = i + 1
            if save is None:
                return Kept(x, self._token)
            alike = type(x) is not nn.Parameter
            alike = alike and (x.requires_grad or save.need is not Need.LOSSY)
            if alike and self._is_saved_as(save, x):
                return self._held(save, x)
        self._stray()
        assert self.saving is not None
        return self.saving.take(x)

    def _is_saved_as(self, save: Save, x: Tensor) -> bool:
        return (
            (x.shape, x.stride(), x.storage_offset()) == save.geometry
            and x.dtype is save.dtype
            and (save.same == NOWHERE or self._is_at(save.same, x))
            and (not save.fresh or x.untyped_storage().nbytes() == save.nbytes)
        )

    def _held(self, save: Save, x: Tensor) -> View | Kept:
        """Return what is held of x, which is the tensor of this save."""
        if save.place != NOWHERE:
            self._note_place(save.place, x)
        if save.noted != NOWHERE:
            self.noted[save.noted] = x.detach()
        if save.slot == NOWHERE:
            return Kept(x, self._token)
        whole, deed = save.whole, save.deed
        assert whole is not None
        if save.fresh:
            slot = self.slots[save.slot] = self._new_slot(save.slot, x, whole)
        else:
            slot = self.slots[save.slot]
        base = x if whole is save.geometry else whole.on(x)
        if save.waits or (save.fresh and deed is None):
            slot.value = KeepHandle(base, "")
        if deed is not None:
            self._do(deed, slot, base, x)
        return View(slot, save.geometry, save.need)

    def _new_slot(self, number: int, base: Tensor, geometry: Geometry) -> Slot:
        """Return the slot of this number. geometry: of what covers it, as `base` may not."""
        return Slot(base, NOT_COUNTED, geometry=geometry)

    def _do_late(self, deed: Deed) -> None:
        """Give a slot what it gets later than it was saved."""
        slot = self.slots[deed.slot]
        kept = slot.value
        if isinstance(kept, KeepHandle) and not kept.was_changed:
            x = kept.restore()
            self._do(deed, slot, x, x)

    def _do(self, deed: Deed, slot: Slot, whole: Tensor, x: Tensor) -> None:
        if deed.bits:
            bits = mask_bits(whole, deed.bits, only_output=deed.covers)
            if bits is None:
                slot.hold(KeepHandle(whole, "a NaN, of which a bit cannot tell"))
            else:
                slot.mask_of = deed.bits
                slot.hold_bits(bits)
            return
        if deed.action is None:
            cast = CastHandle.of(x, whole, self._began) if deed.need is Need.EXACT else None
            if deed.need is Need.SHAPE:
                slot.value = None
                slot.hold_shape()
            else:
                slot.hold(cast or KeepHandle(whole, "no cast of a parameter"))
            return
        action = deed.action if deed.mask == NOWHERE else deed.masked(self.slots[deed.mask].bits)
        seed = self._draw(deed.draw) if isinstance(action, Encode) else 0
        ready = deed.remade.ready(self) if isinstance(action, Rebuild) and deed.remade else None
        if ready is not None and not (ready.exact or ready.works_lossy):
            slot.hold(KeepHandle(whole, "what it would be made of has no bits for it in this step"))
            return
        norm = None if deed.norm is None else deed.norm.statistics(self)
        shared = self.context.prefetcher, deed.name, self.context.capacities
        slot.hold(perform(action, whole, deed.need, ready, seed, None, norm, *shared))
        if not isinstance(action, Keep):  # which comes between two codes, and drops no bits
            slot.drop_needless_bits()

    def _draw(self, nth: int) -> int:
        assert self._seeds is not None
        self._drawn = max(self._drawn, nth)
        return self.context.seed_of(self._seeds + nth)

    def _copy(self, index: int, y: Tensor) -> None:
        """A slot gets a copy of a constant, once."""
        base = covering(y)
        if self.slots[index] is None and base is not None:
            slot = self.slots[index] = self._new_slot(index, base, Geometry.of(base))
            slot.value = KeepHandle(base.detach().clone(), "a constant")

    @property
    def share(self) -> float:
        """Return how much of the script has been followed, from 0 to 1."""
        return self._at / max(len(self._steps), 1)

    def look(self) -> Saving:
        """Return the context that looks at what is left of a forward that is another one."""
        raise NotImplementedError

    def _stray(self) -> None:
        """The forward is another one: look at the rest of it."""
        if self.saving is None:
            self.strayed = True
            assert self._seeds is not None
            self.context.give_back(self._seeds, self.script.seeds, self._drawn)
            self.saving = self.look()
            self.saving.join(self._pack, self._outside)
