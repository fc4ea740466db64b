"""One forward of a fitted model: it follows its plan or its preset, and climbs if necessary."""

import weakref
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elbowroom.fitting.options import FitOptions
from elbowroom.measure.meter import NoiseMeter
from elbowroom.measure.reach import ReachMeter
from elbowroom.plan.action import Action
from elbowroom.plan.plan import FITTED, Plan
from elbowroom.plan.presets import Preset, SavedStorage, choose, site_nbytes
from elbowroom.plan.rehearsal import SAFE, USUAL
from elbowroom.plan.site import Site, SiteName
from elbowroom.runtime.consumers import Call, Reading
from elbowroom.runtime.context import Context
from elbowroom.runtime.direct import Direct, rows_nbytes
from elbowroom.runtime.direct.recurrent import layers_of, saved_nbytes
from elbowroom.runtime.handles import DropHandle
from elbowroom.runtime.kept import Held, last_node
from elbowroom.runtime.observer import Recorder
from elbowroom.runtime.repeats import Unrepeatable
from elbowroom.runtime.replay.tracer import Tracer
from elbowroom.runtime.saving import Saving
from elbowroom.runtime.slot import Slot, View
from elbowroom.runtime.storage import is_parameter, is_touchable, storage_nbytes

# Rows, others that are gathered beside them, what is made of both, and gradients may stand at once.
_TIMES = 5


class Fit(Protocol):
    """Interface of the plan that a forward follows, or of its stand-in."""

    context: Context
    redoes: bool

    @property
    def options(self) -> FitOptions: ...
    @property
    def preset(self) -> int: ...
    @property
    def plan(self) -> Plan | None: ...
    @property
    def meter(self) -> NoiseMeter | ReachMeter | None: ...
    @property
    def recompute(self) -> frozenset[str]: ...
    def allowed_nbytes(self, guessed_nbytes: int) -> int: ...
    def surely_allowed_nbytes(self) -> int: ...
    @property
    def may_refuse(self) -> bool: ...
    def diverge(self, held_nbytes: int) -> None: ...
    def lets_layers_run_again(self) -> bool: ...
    def lets_rows_wait(self) -> bool: ...


class FittedSaving(Saving):
    """Context whose setting climbs the ladder when the held bytes approach the budget.

    preset        where on the ladder it is
    climbed     whether it has left the plan, or the preset that it began with
    impossible  even the strictest preset holds too much: the forward only counts bytes to its end
    too_much    it would have to climb, which is not allowed: likewise
    storages    what the step has saved, once the context is closed
    saved_by    autograd's numbers of the nodes that saved each slot; in a first forward only
    gradients_nbytes  most bytes of gradients at once, of a forward that is impossible; 0: not known
    copied_nbytes  stand until forward has ended: copies of what it may change
    leaves_room    it may hold half of what is allowed: nobody knows how many forwards will follow
    """

    def __init__(
        self,
        fit: Fit,
        recorder: Recorder | None = None,
        *,
        may_climb: bool = True,
        counts: bool = False,
        after: "FittedSaving | None" = None,
        tracer: Tracer | None = None,
    ) -> None:
        """may_climb: else it only counts once it has to. counts: it only counts from the start.

        after: the context of an earlier forward of the same step, which this one continues.
        """
        super().__init__(
            # By a proxy: no reference cycle in each step.
            partial(FittedSaving._decide_site, weakref.proxy(self)),
            min_nbytes=(
                fit.options.least_nbytes if fit.context.takes_small else fit.options.min_nbytes
            ),
            context=fit.context,
            recorder=recorder,
            recompute=fit.recompute,
            observer=fit.meter,
            after=after,
            tracer=tracer,
        )
        self.climbed: bool = after is not None and after.climbed
        self.preset: int = after.preset if after is not None and after.climbed else fit.preset
        self.impossible = False
        self.too_much = counts
        self._may_climb, self._only_counts = may_climb, counts
        self.largest_nbytes = self.copied_nbytes = self.gradients_nbytes = 0
        self.leaves_room = False
        self._limit: tuple[int, int] | None = None
        self._has_diverged = self._begins_again = self._is_dropped = False
        self._recurrent_layers = 0
        self._saved: list[tuple[weakref.ref[Slot], SavedStorage]] = []
        self._saved += [] if after is None else after._saved
        self.storages: list[SavedStorage] = []
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet(() if after is None else after._slots)
        self.saved_by: weakref.WeakKeyDictionary[Slot, list[int]] = weakref.WeakKeyDictionary()
        self._fit, self._presets, self._followed = fit, fit.options.presets, fit.plan

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        slots = self._sources.slots()
        self._saved += [
            (
                weakref.ref(slot),
                SavedStorage(slot.entry.before_nbytes, tuple(slot.sites), slot.asked_exact),
            )
            for slot in slots
        ]
        self.storages = [one for _, one in self._saved]
        self._slots.update(slots)
        super().__exit__(kind, error, trace)
        if self._begins_again and kind is None:  # a bare `except:` inside forward has caught it
            raise Unrepeatable

    def encode_held(self, allowed_nbytes: int) -> Preset | None:
        """Encodes the tensors of ended forwards of the step, so that the next forward has memory.

        It uses, and returns, the mildest lossy preset that holds at most `allowed_nbytes`, or the
        strictest one. None: only exact presets are allowed.
        """
        lossy = [preset for preset in self._presets if not preset.exact]
        if not lossy:
            return None
        found = choose(lossy, self.storages, allowed_nbytes)
        preset = lossy[-1 if found is None else found]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self.tighten(preset.policy, list(self._slots))
        return preset

    @property
    def setting(self) -> Preset:
        """Current setting: the plan, or the preset."""
        plan = self._plan
        if plan is None:
            return self._presets[self.preset]
        return Preset("plan", plan.look_up, plan.exact)

    def is_exact(self) -> bool:
        """Returns whether no code of the setting adds errors."""
        return self.setting.exact

    @property
    def is_over(self) -> bool:
        """True if nothing is held any more: backward has run, or its graph was dropped."""
        return self.ledger.held_nbytes == 0

    @property
    def waits(self) -> bool:
        """True if a backward is still to come: no held tensor was requested by the last one."""
        return self.ledger.held_nbytes > 0 and not self.ledger.ends

    @property
    def waits_again(self) -> bool:
        """True if a backward has come with create_graph=True, and the next is still to come."""
        return self.waits and self.ledger.backward_began

    @property
    def backward_began(self) -> bool:
        """True if backward has begun since this forward."""
        return self.ledger.backward_began

    def resume(self) -> None:
        """Lets the step go on with another forward, after a backward of a part of it."""
        self.ledger.backward_began = self.ledger.ends = False
        self._saved = [(slot, one) for slot, one in self._saved if slot() is not None]
        self.storages = [one for _, one in self._saved]

    @property
    def _plan(self) -> Plan | None:
        return None if self.climbed else self._followed

    def _may_stand(self, direct: Direct, call: Call) -> bool:
        """Returns whether a node of ours may replace an op.

        A recurrent op is decided on before it runs. Such an op saves all of its tensors at once,
        when it is too late to climb.
        """
        if direct.again:
            self._recurrent_layers += layers_of(call)
            most = max(self.context.recurrent_layers, self._recurrent_layers)
            self.context.recurrent_layers = most
            layer_nbytes = saved_nbytes(call) // layers_of(call)
            self.context.layer_nbytes = max(self.context.layer_nbytes, layer_nbytes)
        if direct.again and not self.context.runs_again:
            held = self.ledger.held_nbytes + saved_nbytes(call)
            if held > self._fit.surely_allowed_nbytes():
                self._fit.lets_layers_run_again()
        if direct.late and not self.context.rows_wait:
            self.context.gathers = True
            held = self.ledger.held_nbytes + _TIMES * rows_nbytes(call)
            if held > self._fit.surely_allowed_nbytes():
                self._fit.lets_rows_wait()
        return super()._may_stand(direct, call)

    @property
    def _is_discarded(self) -> bool:
        """True if the forward will be discarded, so that nothing more is recorded."""
        return self.too_much and not (self._may_climb or self._only_counts)

    def _taken(self, x: Tensor) -> Held:
        return DropHandle() if self._is_discarded else super()._taken(x)

    def _finished(self, call: Call, out: Any) -> None:
        if self._is_discarded:
            return
        if call.name == "linear":
            self.context.has_linears = True
        if not (self._may_climb or self.too_much):
            self._note_result(out)
        super()._finished(call, out)

    def _note_result(self, out: Any) -> None:
        """Discards a first forward if one of its results is too large beside the held bytes.

        The loss may create temporaries as large as its logits before a tensor of that size is
        saved.
        """
        if not is_touchable(out) or out.numel() * out.element_size() <= self.largest_nbytes:
            return
        if out._is_view() or is_parameter(out):  # they use no memory of their own
            return
        allowed, _ = self._limits(storage_nbytes(out))
        if self.ledger.held_nbytes > allowed:
            self.too_much = True
            self.drop_everything()

    def _packed(
        self, x: Tensor, call: Call | None, reading: Reading, node: int | None = None
    ) -> View:
        view = super()._packed(x, call, reading, node)
        if not self._may_climb:
            number = last_node() if node is None else node
            self.saved_by.setdefault(view.slot, []).append(number)
        if (self.impossible or self.too_much) and view.slot.sites:
            view.slot.drop()  # the last forward as well, whatever follows
        return view

    @property
    def _may_begin_again(self) -> bool:
        return self._fit.redoes

    def keep_out(self, module: nn.Module, name: str, why: str) -> None:
        super().keep_out(module, name, why)
        if self._may_begin_again:
            self._begins_again = True
            raise Unrepeatable

    def drop_everything(self) -> None:
        """Drops all decided tensors; `_packed` drops those that follow."""
        self._is_dropped = True
        super().drop_everything()

    def _may_wait(self, name: SiteName) -> bool:
        plan = self._plan
        return plan is not None and plan.is_shared(name)

    def _encodes(self, consumer: str) -> bool:
        plan = self._plan
        return plan is None or plan.encodes(self._module, consumer)

    def _reruns_attention(self) -> bool:
        plan = self._plan
        return plan is None or plan.reruns_attention(self._module)

    def _is_over(self, site: Site, allowed_nbytes: int) -> bool:
        held = self.ledger.held_nbytes
        if held + site.nbytes <= allowed_nbytes:
            return False
        return held + site_nbytes(self.setting, site) > allowed_nbytes

    def _limits(self, nbytes: int) -> tuple[int, int]:
        """Returns the bytes that may be held, with and without guesses.

        Both change only when a larger storage is saved.
        """
        if self._limit is None or nbytes > self.largest_nbytes:
            self.largest_nbytes = max(self.largest_nbytes, nbytes)
            # A forward that may not climb is rehearsed instead; one that may climb would only be
            # stricter than necessary.
            guessed = self.largest_nbytes * (USUAL if self._may_climb else SAFE)
            guessed = max(guessed, self.copied_nbytes + self.largest_nbytes * USUAL)
            allowed = self._fit.allowed_nbytes(guessed) >> self.leaves_room
            self._limit = allowed, self._fit.surely_allowed_nbytes()
        return self._limit

    def diverge(self) -> None:
        """Reports once that this forward differs from the plan, and holds unexamined tensors.

        These can be neither encoded nor released now, so the step may exceed the budget.
        """
        if not self._has_diverged:
            self._has_diverged = True
            self._fit.diverge(self.ledger.max_nbytes)

    def _decide_site(self, site: Site) -> Action:
        allowed, surely_allowed = self._limits(site.nbytes)
        while not self.too_much and self._is_over(site, allowed):
            strictest = len(self._presets) - 1
            if not self._may_climb:
                self.too_much = True
            elif self.preset < strictest:
                # No preset but the strictest is sure to hold less than a plan.
                self.preset = self.preset + 1 if self._followed is None else strictest
                self.climbed = True
                self.tighten(self._presets[self.preset].policy)
            else:
                break
        if self.ledger.held_nbytes > surely_allowed:
            if not self._fit.may_refuse:
                self.diverge()
            else:
                self.impossible = True
        if self.impossible:
            self.too_much = self.too_much or not self._may_climb
        if (self.impossible or self.too_much) and not self._is_dropped:
            self.drop_everything()
        plan = self._plan
        return self.setting.policy(site) if plan is None else plan.action_for(site, FITTED)
