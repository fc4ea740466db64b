"""Inputs of norms that wait for one more op: the mask helps if it is a ReLU of what came out.

A norm's input is known to be one when the norm saves it. Whether a ReLU follows shows with the next
op that saves something; until then the tensor stays as it is. So at most one waits, mostly for one
call. Nothing waits longer than it lives: if backward comes first, the tensor is freed as always.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from elbowroom.plan import Action, Encode
from elbowroom.runtime.consumers import MASKED_OUTPUT, Call
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.identity import Identity
from elbowroom.runtime.recipes import Recipe, same_order
from elbowroom.runtime.slot import Slot


@dataclass(frozen=True)
class Waiting:
    """A slot, what the policy wants for it, and the deed."""

    slot: weakref.ref[Slot]
    action: Encode
    hold: Callable[[Slot, Tensor, Action], None]

    def end(self, mask: Tensor | None) -> None:
        """Encode, with the mask if there is one. Not what was changed or encoded meanwhile."""
        slot, action = self.slot(), self.action
        kept = None if slot is None else slot.value
        if slot is None or not isinstance(kept, KeepHandle) or kept.was_changed:
            return
        if mask is not None and action.with_mask is not None:
            facts = replace(action.facts, mask=mask)
            action = replace(action, codec=action.with_mask, facts=facts)
        self.hold(slot, kept.restore(), action)


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
