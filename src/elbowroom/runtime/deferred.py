"""Inputs of norms that wait for one more op, the reader of what came out.

The mask helps if that is a ReLU; if it is a GELU or SiLU, a finer code is needed. A norm's input is
known to be one when the norm saves it. Who follows shows with the next op that saves something;
until then the tensor stays as it is. Where it might be the ReLU of a sum,
the branch that is added may save, too: then it waits for a few more, as long as nothing else reads
the norm's output. Nothing waits longer than it lives: if backward comes first, the tensor is freed
as always.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs import Codec
from elbowroom.plan import Action, Encode, Site
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.identity import Identity, Origin
from elbowroom.runtime.masks import MASKED_OUTPUT
from elbowroom.runtime.recipes import Recipe, same_order
from elbowroom.runtime.relu_gating import Gate
from elbowroom.runtime.saturated import Saturated
from elbowroom.runtime.slot import Slot

_MOST_SAVES = 6  # calls that save, of the branch that is added


class Waiting:
    """Slot whose encoding waits, the policy's wish, and what is known of the norm's output."""

    def __init__(
        self, slot: Slot, action: Encode, hold: Callable[[Slot, Tensor, Action], None], out: Tensor
    ) -> None:
        self.slot, slot.waits = weakref.ref(slot), True
        self._action, self._hold = action, hold
        self._gate = Gate(out)
        self._mask: Tensor | None = None
        self._is_of_sum = self._is_curved = False
        self._saves_left = _MOST_SAVES

    def ended(self, call: Call, out: Any, identity: Identity) -> bool:
        """Notes that a call has ended; returns whether all is known, or nothing will be."""
        slot, gate = self.slot(), self._gate
        gate.ended(call, out)
        if not call.saved:
            return slot is None  # nothing can be told yet
        if self._action.curved is not None and slot is not None:
            self._is_curved = slot in call.fine
        self._mask = relu_mask(call, out, slot, identity)
        if self._mask is None and self._action.behind_sum is not None:
            self._mask = gate.bits_of_sum(slot, out, identity)
            self._is_of_sum = self._mask is not None
            self._saves_left -= 1
            if not self._is_of_sum:
                return slot is None or not gate.is_sole or not self._saves_left
        return True

    @property
    def is_known(self) -> bool:
        """True if the mask was found: what is left to know shows as the next call begins."""
        return self._mask is not None

    def end(self) -> None:
        """Encodes the slot, with the mask if there is one, unless it was changed or encoded."""
        slot = self.slot()
        kept = None if slot is None else slot.value
        if slot is not None:
            slot.waits = False
        if slot is None or not isinstance(kept, KeepHandle) or kept.was_changed:
            return
        if self._is_curved:  # what is read later, to plan by, to watch and to count, knows it
            slot.sites[-1] = replace(slot.sites[-1], curved=True)
        codec, action = self._codec(slot), self._action
        if codec is not None:
            facts = replace(action.facts, mask=self._mask)
            action = replace(action, codec=codec, facts=facts)
        self._hold(slot, kept.restore(), action)

    def _codec(self, slot: Slot) -> Codec | None:
        """Returns the codec to use with the mask; None: the action's own codec, without a mask."""
        action, gate = self._action, self._gate
        if self._is_curved:
            return action.curved
        if self._mask is None:
            return None
        is_gated = gate.is_closed and slot.lossy_views == 1 and not slot.is_source
        if self._is_of_sum:
            return action.behind_sum if is_gated else None
        return action.gated if is_gated and action.gated is not None else action.with_mask


class WaitingLine(list[Waiting | Saturated]):
    """Slots that wait in one context."""

    def reads(self, slot: Slot, site: Site) -> None:
        """Notes that another op reads a slot that waits."""
        for one in self:
            if isinstance(one, Saturated) and one.slot() is slot:
                one.also(site)

    def ended(self, call: Call, out: Any, identity: Identity) -> None:
        """Encodes, after a call, what need not wait on, and no more.

        Those for which it is a ReLU wait until the next call begins.
        """
        waiting = self._taken()
        for one in waiting:
            if not one.ended(call, out, identity) or one.is_known:
                self.append(one)
            else:
                one.end()

    def end_known(self) -> None:
        """Encodes, as a call begins, the inputs of norms whose ReLU has been found."""
        if any(one.is_known for one in self):
            waiting = self._taken()
            self.extend(one for one in waiting if not one.is_known)
            _end(one for one in waiting if one.is_known)

    def end_all(self) -> None:
        """Encodes whatever waits."""
        _end(self._taken())

    def _taken(self) -> list[Waiting | Saturated]:
        """Empties the line and returns what waited: what is encoded may make others wait."""
        waiting = list(self)
        self.clear()
        return waiting


def _end(waiting: Iterable[Waiting | Saturated]) -> None:
    with torch._C.DisableTorchFunction():
        for one in waiting:
            one.end()


def root_of(origin: Origin | None) -> Slot | None:
    """The slot that a chain of recipes begins with, if there is one."""
    source = None if origin is None or origin.recipe is None else origin.recipe.source
    while isinstance(source, Recipe):
        source = source.source
    return None if source is None else source()


def relu_mask(call: Call, out: Any, slot: Slot | None, identity: Identity) -> Tensor | None:
    """The bits of this call's output, if it is the ReLU of the norm of all that `slot` holds."""
    if slot is None or call.name not in MASKED_OUTPUT or not isinstance(out, Tensor):
        return None
    origin, after = identity.origin(call.arg(0, "input"), call.version), identity.slot(out)
    recipe = None if origin is None else origin.recipe
    if after is None or after.bits is None or recipe is None or not recipe.op.is_norm:
        return None
    source = None if isinstance(recipe.source, Recipe) else recipe.source()
    seen = recipe.seen
    if source is not slot or seen != slot.base or seen.shape != after.base.shape:
        return None
    return after.bits if same_order(seen.shape, seen.stride, after.base.stride) else None
