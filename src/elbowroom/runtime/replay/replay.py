"""Replay of a script: the i-th op of a forward is treated as the i-th op of the recorded one.

Nothing is looked up. An op is identified by its place. Its function, and, where an action follows,
its arguments are compared with the script: kinds, shapes, strides, numbers, and the storage of this
forward in which a tensor lies. This is done before the op runs. A mismatch ends the script: a
learning context examines the rest of the forward. Earlier actions stay valid, because they concern
tensors of ops that did match. Calls of modules that are recomputed are in `module_calls.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor, nn

from elbowroom.codecs.base import Seed
from elbowroom.errors import ElbowroomError, RestoreError
from elbowroom.kernels.fakes import has_values, would_wait
from elbowroom.plan import Need
from elbowroom.runtime import modules, opened
from elbowroom.runtime.calls import Interception, intercepted
from elbowroom.runtime.checkpoints import checkpoint_call
from elbowroom.runtime.compiler import eagerly, is_compiled
from elbowroom.runtime.consumers import QUESTIONS, Call, called_function, sees_another_mode
from elbowroom.runtime.context import Context, seeds_after
from elbowroom.runtime.direct import direct_of, may_run
from elbowroom.runtime.direct.attention import levels_by_values
from elbowroom.runtime.gathered import here
from elbowroom.runtime.kernel_settings import settings_of_ops
from elbowroom.runtime.ledger import NOT_COUNTED
from elbowroom.runtime.logits import levels_of_logits
from elbowroom.runtime.own_hooks import OwnHooks
from elbowroom.runtime.repeats import Observing
from elbowroom.runtime.replay.compiled import Act, Hold
from elbowroom.runtime.replay.held import ForwardRecord, Kept, keep_values, kept
from elbowroom.runtime.replay.module_calls import ReplayedModuleCalls
from elbowroom.runtime.replay.script import NOWHERE, Script, ScriptedCall, state_of_torch
from elbowroom.runtime.replay.sizes import UNSET
from elbowroom.runtime.saving import Saving
from elbowroom.runtime.slot import Geometry, Slot
from elbowroom.runtime.sources import constant
from elbowroom.runtime.storage import covering
from elbowroom.runtime.waiting import end_waiting, ready

_disabled = torch._C.DisableTorchFunction
_innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_free_weak_ref: Callable[[Any], None] = torch.UntypedStorage._free_weak_ref
_ENDED: Any = None  # in place of a slot whose graph may be gone
_sequence_number = torch._C._autograd._get_sequence_nr


class Places:
    """Places in which tensors of a forward lie, by number: storage and version.

    Storages are referred to weakly, so that no address is used twice while this lives.
    """

    __slots__ = ("_addresses", "_versions")

    def __init__(self, count: int) -> None:
        self._addresses: list[Any] = [0] * count
        self._versions = [0] * count

    def note(self, place: int, x: Tensor) -> None:
        """Compares later tensors with this one by the number of this place."""
        if self._addresses[place]:
            _free_weak_ref(self._addresses[place])
        self._addresses[place] = x.untyped_storage()._weak_ref()
        self._versions[place] = 0 if x.is_inference() else x._version

    def has(self, place: int, x: Tensor) -> bool:
        """Returns whether x lies in the storage of this place, at the same version."""
        address = self._addresses[place]
        if not address or x.is_inference():  # which has no version that shows a change
            return False
        here = x.untyped_storage()._cdata == address
        return bool(here) and x._version == self._versions[place]

    def __del__(self, free: Callable[[Any], None] = _free_weak_ref) -> None:
        for address in self._addresses:
            if address:
                free(address)  # by a default: at the end of the process no module is left


def unpack(held: Any) -> Tensor:
    """Returns the saved tensor to autograd: the unpack hook."""
    if type(held) is Kept:
        x: Tensor = held[0]
        try:
            if x._version == held[1]:
                return x
        except RuntimeError:  # an inference tensor has no version
            pass
    try:  # as `slot.unpack` does, whose call would be one more for each tensor
        restored: Tensor = held.restore()
        return restored
    except ElbowroomError:
        raise
    except Exception as error:
        raise RestoreError(
            f"a saved tensor could not be given back to backward: {error}"
        ) from error


class _Again(Observing):
    """Passes calls inside one of torch's own functions to a replay that is open already."""

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self._replay = replay

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._replay.__torch_function__(func, types, args, kwargs)


class Replay(ReplayedModuleCalls, Observing):
    """A context around one forward that replays `script`; a subclass examines other forwards.

    slots     those of this forward
    sources   kept tensors from which others are rebuilt, by the numbers of their slots
    record    what all that is held refers to
    sizes     numbers of rows that its script leaves open, as its tensors have told them so far
    places    where tensors that later ones are compared with lie
    noted     statistics that were saved, and that recipes read
    diverged  the forward was another one
    bounded   it may save no more elements than those that its script was written from,
              and `spare` more
    lasts     as long as the model is fitted, other replays will follow
    began     autograd's number of the node that the call that runs would have made first
    """

    bounded = lasts = False
    spare = sys.maxsize

    def __init__(self, script: Script, context: Context, others: tuple[Script, ...] = ()) -> None:
        """others: scripts that may turn out to be the right one, before anything is done."""
        super().__init__()
        self.script, self.context = script, context
        self.slots: list[Slot] = []
        self.sources: list[Kept] = []
        self.sizes: list[int] = []
        self.noted: list[Tensor] = []
        self.record = ForwardRecord()
        self.diverged = False
        self.saving: Saving | None = None
        self._others = others
        self._acts: tuple[Act, ...] = ()
        self._at = 0
        self._holds: tuple[Hold | None, ...] | None = None
        self._saved = 0
        self._is_inside = False  # an op runs, so that no function mode is asked
        self._gets_inputs = False  # a recomputed module saves its inputs
        self.began = 0
        self.places = Places(0)
        self._seeds: int | None = None  # the context's count before those of this forward
        self._first_seed = self._drawn = 0
        # Seeds of this forward, created when the first one is drawn.
        self._on_host: list[int] = []
        self._on_device: dict[torch.device, tuple[Tensor, ...]] = {}
        self._given = 0  # how many inputs the checkpoints of this step have saved
        self._numel = 0  # of all that was saved
        self._open: ExitStack | None = None
        self._hook: Any = None
        self._only_hook: Any = None  # the same; None: with it off, hooks around it would be asked
        self._outside = 0  # modules that were called around the model
        self._calls: Interception | None = None

    def __enter__(self) -> Self:
        self.record.kernels = settings_of_ops()
        self._outside = len(modules.on_stack())
        is_another = self.script.state != state_of_torch() or sees_another_mode()
        self.follow(self.script)
        with ExitStack() as opening:
            opening.enter_context(eagerly())
            self._hook = self._pack  # one object, which tells whether it is innermost
            self._only_hook = self._hook if _innermost_hooks(True) is None else None
            opening.enter_context(OwnHooks(self._hook, unpack))
            super().__enter__()  # type: ignore[no-untyped-call]
            opening.callback(super().__exit__, None, None, None)
            if self.script.recomputes or any(one.recomputes for one in self._others):
                self._calls = opening.enter_context(
                    intercepted(self._called, self.script.recomputed, lasts=self.lasts)
                )
            self._open = opening.pop_all()
        if is_another:
            self._diverge()
        return self

    def follow(self, script: Script) -> None:
        """Continues with this script, of which no action has been performed."""
        nowhere: Any = None
        if self._seeds is not None:
            self.context.give_back(self._seeds, self.script.seeds)
        # The same noise for the same tensors, whether a forward is examined or replayed.
        self._seeds = self.context.reserve(script.seeds)
        self._first_seed = self.context.first_seed() + self._seeds
        self._on_host, self._on_device = [], {}
        self.script, self._acts = script, script.compiled.acts
        if self._calls is not None:
            self._calls.see(script.recomputed)
        self.slots, self.sources = [nowhere] * script.slots, [nowhere] * script.slots
        self.sizes = [UNSET] * script.sizes
        self.noted = [nowhere] * script.noted
        self.places = Places(script.places)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._open is None:
            return
        if kind is None:
            end_waiting()
        self._open.close()
        self._open = None
        if self.saving is not None:
            self.saving.__exit__(kind, error, trace)
        elif kind is None:
            self.diverged = self._act() is not self._acts[-1]
            for late in self.script.compiled.last if not self.diverged else ():
                late(self)
            self.record.fingerprints.take()
        self.slots, self.sources, self.noted, self.places = [], [], [], Places(0)
        self._hook = self._only_hook = None  # which refer to this

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if here.alive:
            func, args, kwargs = ready(func, args, kwargs, self.__torch_function__)
        if self.saving is None:
            act, kwargs = self._acts[self._at], kwargs or {}
            if act.inputs:
                act = self._act()
            # Equal, not the same: what gets an attribute is another object each time.
            if act.func is func or act.func == func:
                at = self._at
                self._at = at + 1
                if act.kept_numel and self._holds is None:
                    pair = _innermost_hooks(True)
                    if pair is not None and pair[0] is self._only_hook:
                        # Autograd keeps all that it saves by itself, without a call of a hook.
                        _pop_hooks()
                        try:
                            out = func(*args, **kwargs)
                        finally:
                            _push_hooks(*pair)
                        numel = self._numel + act.kept_numel
                        if type(out) is not Tensor or out.numel() != act.out_numel:
                            numel += self._more(act, out)
                        self._numel = numel
                        if numel - act.max_numel > self.spare:
                            self._diverge()
                        return out
                if act.saves_nothing:
                    return func(*args, **kwargs)
                if act.is_plain:  # all that it saves is kept
                    outer, numel, self._is_inside = self._is_inside, self._numel, True
                    try:
                        out = func(*args, **kwargs)
                    finally:
                        self._is_inside = outer
                        if act.numel is None:
                            self._numel = numel
                    if self._numel - act.max_numel > self.spare:
                        self._diverge()
                    return out
                if act.guard is None or act.guard(self, args, kwargs):
                    return self._run(act, args, kwargs)
                self._at = at
            elif func in QUESTIONS:
                return func(*args, **kwargs)
            actual = called_function(func) if type(func) is FunctionType else func
            if actual is not func:
                return self.__torch_function__(actual, types, args, kwargs)
            other = self._other(func, args, kwargs)
            if other is not None:
                self._at += 1
                return self._run(other, args, kwargs)
            self._diverge()
        elif func in QUESTIONS:
            return func(*args, **(kwargs or {}))
        assert self.saving is not None
        return self.saving.see(func, types, args, kwargs)

    def _more(self, act: Act, out: Any) -> int:
        """Returns the elements that a call has saved beyond those that the script says, about.

        It is taken to save as many times more as it makes.
        """
        made = out.numel() if isinstance(out, Tensor) else 0
        return int(act.kept_numel * made // act.out_numel) - act.kept_numel

    def _act(self) -> Act:
        """Returns the next act; after the last one, an act that matches no call."""
        act = self._acts[self._at]
        if act.inputs and act.saves is not None and self._given == len(act.saves):
            self._at, self._given = self._at + 1, 0
            act = self._acts[self._at]
        return act

    def _other(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Act | None:
        """Returns the matching act of another script, if no action was performed so far."""
        at = self._at
        if not self._others or self._given or not all(act.is_plain for act in self._acts[:at]):
            return None
        state = state_of_torch()
        for script in self._others:
            acts = script.compiled.acts
            if len(script.steps) <= at or acts[at].func != func or script.state != state:
                continue
            if all(
                a.is_plain and a.func == b.func
                for a, b in zip(acts[:at], self._acts[:at], strict=True)
            ):
                self.follow(script)
                act = acts[at]
                if act.guard is None or act.guard(self, args, kwargs):
                    return act
        return None

    @property
    def has_begun(self) -> bool:
        """True if any function was called yet, or has saved a tensor with an action."""
        return self._at > 0 or self._given > 0

    def _run(self, act: Act, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for late in act.before:
            late(self)
        outer, numel = (self._holds, self._saved, self._is_inside), self._numel
        holds = self._holds = act.holds
        self._saved, self._is_inside = 0, True
        self.began = _sequence_number()
        try:
            if act.opens:
                body = opened.opened(act.func, _Again(self))
                out = (body or act.func)(*args, **kwargs)
            else:
                out = act.run(*args, **kwargs)
            if holds is not None and self._saved != len(holds):
                self._diverge()
            if act.ends and self.saving is None:
                if act.place != NOWHERE:
                    self.places.note(act.place, out)
                for position, slot in act.copies:
                    self._copy(slot, args[position])
                for late in act.after:
                    late(self)
                for number in act.frees:
                    self.slots[number] = self.sources[number] = _ENDED
        finally:
            self._holds, self._saved, self._is_inside = outer
            if act.numel is None:
                self._numel = numel
        if self._numel - act.max_numel > self.spare:
            self._diverge()
        return out

    def may_stand(self, step: ScriptedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether the call may run as in the script, by more than its arguments.

        That is whether a node of ours may replace it, and codes are fine enough for its values.
        """
        direct, call, levels = step.direct, Call(step.func, args, kwargs), step.levels
        if direct is not None and (direct_of(call) is not direct or not may_run(call, direct)):
            return False
        if levels is None:
            return True
        scale = levels.scale
        wanted = levels_by_values(call) if scale is None else levels_of_logits(call, scale)
        if levels.reach(wanted):
            return True
        self.context.finer_levels = True
        return False

    def is_innermost(self) -> bool:
        """Returns whether our hooks are the innermost ones."""
        hooks = _innermost_hooks(True)
        return hooks is not None and getattr(hooks[0], "__self__", None) is self

    def _pack(self, x: Tensor) -> Any:
        """Returns what is held of x, which autograd saves."""
        if not self._is_inside or self.saving is not None:
            return self._pack_outside(x)
        self._numel += x.numel()
        holds, source = self._holds, NOWHERE
        if holds is not None:
            i = self._saved
            self._saved = i + 1
            if i >= len(holds):
                return self._diverge_at(x)
            want = holds[i]
            if want is not None:
                shape, stride, offset, dtype, same, nbytes, place, noted, source, hold = want
                if (
                    x.shape != shape
                    or x.stride() != stride
                    or x.storage_offset() != offset
                    or x.dtype is not dtype
                    or (same != NOWHERE and not self.places.has(same, x))
                    or (nbytes != NOWHERE and x.untyped_storage().nbytes() != nbytes)
                ):
                    return self._pack_other(x, want)
                if place != NOWHERE:
                    self.places.note(place, x)
                if noted != NOWHERE:
                    self.noted[noted] = x.detach()
                if hold is not None:
                    held = hold(self, x)
                    if held is not kept:
                        return held
        # As in `kept`, without its call: most of what is saved comes here.
        try:
            version = x._version
        except RuntimeError:
            version = 0  # of an inference tensor
        is_leaf = x.is_leaf
        keeps = Kept((x if is_leaf else x.detach(), version, self.record))
        if source != NOWHERE:
            # An input's data may be exchanged until backward: a recipe reads what forward has read.
            self.sources[source] = Kept((x.detach(), *keeps[1:])) if is_leaf else keeps
        return keeps

    def _pack_outside(self, x: Tensor) -> Any:
        """Returns what is held of a tensor saved between two calls, or after a divergence."""
        saving = self.saving
        if saving is not None and self._is_inside:
            self._numel += x.numel()
            return saving.take(x)
        with _disabled():
            if saving is None and self._holds is not None:  # a recomputed module gets it
                return self._pack_inside(x)
            if saving is None and self.script.acts_between and not self._gets_inputs:
                return self._input(x)
            self._numel += x.numel()
            return kept(self, x) if saving is None else saving.take(x)

    def _pack_inside(self, x: Tensor) -> Any:
        """Returns what is held of x as the next tensor of `_holds`, although no call saves it."""
        self._is_inside = True
        try:
            return self._pack(x)
        finally:
            self._is_inside = False

    def _pack_other(self, x: Tensor, want: Hold) -> Any:
        """Returns what is held of x, which is not of the one shape and place that a script says."""
        shape, *_, hold = want
        held = None if shape is not None or hold is None else hold(self, x)
        if held is None:
            return self._diverge_at(x)
        return kept(self, x) if held is kept else held

    def _diverge_at(self, x: Tensor) -> Any:
        """Examines the rest of the forward, which differs from the script, as x shows."""
        self._diverge()
        assert self.saving is not None
        return self.saving.take(x)

    def _input(self, x: Tensor) -> Any:
        """Returns what is held of x, which no call of the model saves."""
        act, i = self._act(), self._given
        if act.inputs and act.saves is not None and act.holds is not None:
            for late in () if i else act.before:
                late(self)
            save = act.saves[i]
            self._given = i + 1
            alike = save is None or type(x) is not nn.Parameter
            if save is not None and save.need is Need.LOSSY:  # only a checkpoint's input may be
                alike = alike and x.requires_grad and checkpoint_call(x) is not None
            if alike:
                self._holds, self._saved = act.holds, i
                try:
                    return self._pack_inside(x)
                finally:
                    self._holds = None
        self._numel += x.numel()
        return self._diverge_at(x)

    def new_slot(self, number: int, base: Tensor, geometry: Geometry) -> Slot:
        """Returns the slot of this number. geometry: of what covers it, as `base` may not."""
        return Slot(base, NOT_COUNTED, geometry=geometry)

    def check_for_compiled(self) -> None:
        """Looks, once in a forward, whether a compiled module is called."""
        if "torch._dynamo" in sys.modules and any(map(is_compiled, modules.on_stack())):
            self.calls_compiled()

    def calls_compiled(self) -> None:
        """The user compiled the model before, and calls it only now."""

    def draw(self, nth: int) -> int:
        """Returns one of the seeds of this forward, from 1 on."""
        if nth > self._drawn:
            self._drawn = nth
        if not self._on_host:
            self._on_host = seeds_after(self._first_seed, self.script.seeds)
        return self._on_host[nth - 1]

    def draw_for(self, x: Tensor, nth: int) -> Seed:
        """Returns the same seed where x lies: on a GPU in a tensor (int64 [1])."""
        if not (would_wait(x) and has_values(x)):
            return self.draw(nth)
        self._drawn = max(self._drawn, nth)
        seeds = self._on_device.get(x.device)
        if seeds is None:
            given = x.device, self._first_seed, self.script.seeds
            seeds = self._on_device[x.device] = self.context.device_seeds.take(*given)
        return seeds[nth - 1]

    def _copy(self, index: int, y: Tensor) -> None:
        """Gives a slot a copy of a constant, once."""
        base = covering(y)
        if self.slots[index] is None and base is not None:
            slot = self.slots[index] = self.new_slot(index, base, Geometry.of(base))
            slot.value = constant(base)

    @property
    def has_grown(self) -> bool:
        """True if more has been saved than a budget was seen to hold."""
        return self.bounded and self._numel > self.script.max_numel

    @property
    def so_far(self) -> tuple[int, int]:
        """Bytes that the followed part of the script holds, in plain autograd and as it is held."""
        if self._at < len(self.script.steps):
            return self.script.steps[self._at].so_far
        return self.script.before_nbytes, self.script.held_nbytes

    @property
    def surplus(self) -> int:
        """Elements that have been saved beyond those that the script says, so far."""
        return max(self._numel - self._acts[self._at - 1].max_numel, 0) if self._at else 0

    def _keep_sources(self, changed: Iterable[Tensor]) -> None:
        """Copies what the followed part is rebuilt from, if an op of the rest is to change it."""
        read = self.script.sources
        keep_values([self.sources[i] for i in read], [self.slots[i] for i in read], changed)

    def look(self) -> Saving:
        """Returns the context that examines the rest of a forward that differs from its script."""
        raise NotImplementedError

    def _diverge(self) -> None:
        """Examines the rest of a forward that differs from its script."""
        if self.saving is None:
            self.diverged = True
            self.record.fingerprints.take()  # what runs now may change the parameters
            assert self._seeds is not None
            self.context.give_back(self._seeds, self.script.seeds, self._drawn)
            if self._calls is not None:
                self._calls.see(None)
            self.saving = self.look()
            self.saving.join(self._pack, self._outside, self._keep_sources)
