"""Saved tensors that a later op may turn out to need exactly (`saturated.py` says which and why).

They have their action, and may be codes already. As a call ends it is seen whether it needs any of
them: that one stays exact, or is made so again while something else holds the tensor itself. What
cannot be made so is learned for the next steps, and a warning says that this one is wrong.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from elbowroom.plan import Need, Site
from elbowroom.plan.site import HalfSuffices, SiteKey, key_of
from elbowroom.runtime.consumers import Call, FormulaPart
from elbowroom.runtime.context import Context
from elbowroom.runtime.handles import EncodeHandle, KeepHandle, MovedCodeHandle, RebuildHandle
from elbowroom.runtime.modules import outermost
from elbowroom.runtime.observer import Listener, Recorder
from elbowroom.runtime.saturated import WHY, LateWarnings, decomposed, divided, exponents
from elbowroom.runtime.sites import Request
from elbowroom.runtime.slot import Slot

_BEFORE_EXPONENTIAL = (FormulaPart.SQUARED, FormulaPart.DIFFERENCE, FormulaPart.FACTOR)


class _UndecidedTensor(NamedTuple):
    """One undecided tensor. model: the outermost module that ran as it was saved."""

    slot: weakref.ref[Slot]
    site: Site
    part: FormulaPart
    model: nn.Module | None


class Undecided(dict[int, list[_UndecidedTensor]]):
    """Undecided tensors of one forward, by autograd's numbers of the nodes that saved them."""

    def __init__(
        self, context: Context, listener: Listener, half_serves: Callable[[Slot, Site], bool]
    ) -> None:
        """half_serves: whether a slot has a code of half of its bits, or will have one."""
        super().__init__()
        self._context, self._listener, self._half_serves = context, listener, half_serves
        self._late_warnings = LateWarnings()
        self._not_said = set[SiteKey]()  # what this forward has learned without a wrong gradient

    def note(self, request: Request, site: Site) -> None:
        """Notes a tensor that a later op may need exactly. site: that of what is held."""
        reading = request.reading
        saved = _UndecidedTensor(weakref.ref(request.slot), site, reading.part, outermost())
        self.setdefault(reading.number, []).append(saved)

    def ended(self, call: Call, out: Any, recorder: Recorder | None) -> None:
        """Keeps tensors exactly that a call turns out to need so.

        Those are results whose small differences it divides by, what is squared on the way into an
        exponential, and what is multiplied on the way into a decomposition of a matrix.
        """
        for number in divided(call):
            self._keep_parts(number, tuple(FormulaPart), call, recorder)
        for number in exponents(call, out):
            self._keep_parts(number, _BEFORE_EXPONENTIAL, call, recorder)
        for number in decomposed(call):
            self._keep_parts(number, (FormulaPart.FACTOR,), call, recorder)

    def _keep_parts(
        self, number: int, parts: tuple[FormulaPart, ...], call: Call, recorder: Recorder | None
    ) -> None:
        """Keeps what a node has saved; a tensor that has a code by now, from the next step on.

        In this step that is taken back if something else holds the tensor itself.
        """
        for ref, site, part, model in self.get(number, ()):
            slot = ref()
            if slot is None or part not in parts:
                continue
            if isinstance(WHY[part], HalfSuffices) and self._half_serves(slot, site):
                continue
            if not slot.exact:
                if self._context.learn_limit(model, key_of(site), WHY[part]):
                    self._not_said.add(key_of(site))
                self._listener.refuse(WHY[part], once=True)
                if not _taken_back(slot, WHY[part]) and key_of(site) in self._not_said:
                    self._not_said.remove(key_of(site))
                    self._late_warnings.warn(site.consumer, site.module, WHY[part])
            if slot.exact:
                slot.promise(Need.EXACT, call.name)
                slot.entry.why = WHY[part]
            if recorder is not None:
                recorder.decided(slot, WHY[part])


def _taken_back(slot: Slot, why: str) -> bool:
    """Holds the tensor itself in place of its code, if it still exists; returns whether it does.

    What is rebuilt is exact once all that it is rebuilt from is.
    """
    held = slot.value
    if isinstance(held, RebuildHandle):
        return all(one.exact or _taken_back(one, why) for one in held.ready.slots)
    if not isinstance(held, EncodeHandle) or isinstance(held, MovedCodeHandle):
        return False
    original = held.original()
    if original is not None:
        slot.hold(KeepHandle(original, why))
    return original is not None
