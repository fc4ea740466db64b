"""Inputs of norms whose encoding waits until the op that reads the norm's output is known.

If that op is a ReLU, its mask allows a smaller code; if it is a GELU or SiLU, a finer code is
needed. A norm's input is recognized when the norm saves it. The following op is known when the next
op saves something; until then the tensor stays as it is. If the following op may be the ReLU of a
sum, ops of the added branch may save first, so encoding waits for a few more ops, as long as
nothing else reads the norm's output. Another op that reads the input meanwhile raises the code to
the levels that it needs, and tensors for whose readers the code would be too coarse are not rebuilt
from it (`would_suffice`). Waiting does not extend a lifetime: if backward comes first, the tensor
is freed as always.

The whole gradient of a norm may also pass through one ReLU (`Gate`). Such a gradient is 0 wherever
the ReLU is, and the norm's backward reads the input there in one small term only, so that a coarse
code suffices (`codecs/sided.py`). Forward shows this:

    h = norm(x); z = relu(h)            h has no other reader, and is gone, or has become z
    h = norm(x); z = relu(h + other)    the same of h, and of the sum

A gate follows h from op to op. Any other use of h or the sum ends it, be it a view, a hook or a
second ReLU; so does a reference to h or the sum when the next op begins. If code outside Python
reads one (a kernel of the user), the gradient is noisier, and still unbiased.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

from torch import Tensor

from elbowroom.codecs import Codec
from elbowroom.plan import Action, Encode, Site
from elbowroom.plan.precision_floor import at_precision_floor, suffices
from elbowroom.plan.site import FINE
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.handles.rebuild import Recipe
from elbowroom.runtime.masks import MASKED_OUTPUT
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.slot import Geometry, Slot, same_order
from elbowroom.runtime.sources import Sources
from elbowroom.runtime.storage import WeakStorage, is_touchable

MAX_SAVES = 6  # calls that save, of the branch that is added


class Waiting:
    """Slot whose encoding waits, the policy's action, and what is known of the norm's output."""

    def __init__(
        self, slot: Slot, action: Encode, hold: Callable[[Slot, Tensor, Action], None], out: Tensor
    ) -> None:
        self.slot, slot.waits = weakref.ref(slot), True
        self._action, self._hold = action, hold
        self._gate = Gate(out)
        self._mask: Tensor | None = None
        self._is_of_sum = self._is_curved = False
        self._saves_left = MAX_SAVES
        self._others: list[Site] = []

    def also(self, site: Site) -> None:
        """Notes another reader of the norm's input, which must be able to read the code, too."""
        self._others.append(site)

    def ended(self, call: Call, out: Any, sources: Sources) -> bool:
        """Notes that a call has ended; returns whether waiting longer would add nothing."""
        slot, gate = self.slot(), self._gate
        gate.ended(call, out)
        if not call.saved:
            return slot is None  # nothing is known yet
        if self._action.curved is not None and slot is not None:
            self._is_curved = slot in call.fine
        self._mask = relu_mask(call, out, slot, sources)
        if self._mask is None and self._action.behind_sum is not None:
            self._mask = gate.bits_of_sum(slot, out, sources)
            self._is_of_sum = self._mask is not None
            self._saves_left -= 1
            if not self._is_of_sum:
                return slot is None or not gate.is_sole or not self._saves_left
        return True

    def would_suffice(self, site: Site) -> bool:
        """Returns whether the code that this site's reading leads to has the levels it needs."""
        action = self._action
        is_curved = site.formula in FINE and action.curved is not None
        codec = action.curved if is_curved else action.codec
        return codec is None or suffices(codec, site)

    @property
    def is_known(self) -> bool:
        """True if the mask was found: the rest is known as the next call begins."""
        return self._mask is not None

    def end(self) -> None:
        """Encodes the slot, with the mask if there is one; not if it was changed or encoded."""
        slot = self.slot()
        kept = None if slot is None else slot.value
        if slot is not None:
            slot.waits = False
        if slot is None or not isinstance(kept, KeepHandle) or kept.was_changed:
            return
        if self._is_curved:  # planner, observers and ledger read it later
            slot.sites[-1] = replace(slot.sites[-1], curved=True)
        codec, action = self._codec(slot), self._action
        if codec is not None and all(suffices(codec, one) for one in self._others):
            facts = replace(action.facts, mask=self._mask)
            action = replace(action, codec=codec, facts=facts)
        elif self._others:
            codec = codec if self._is_curved and codec is not None else action.codec
            action = replace(action, codec=reduce(at_precision_floor, self._others, codec))
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


def relu_mask(call: Call, out: Any, slot: Slot | None, sources: Sources) -> Tensor | None:
    """The bits of this call's output, if it is the ReLU of the norm of all that `slot` holds."""
    if slot is None or call.name not in MASKED_OUTPUT or not isinstance(out, Tensor):
        return None
    origin, after = sources.origin(call.first, call.version), sources.slot(out)
    recipe = None if origin is None else origin.recipe
    if after is None or after.bits is None or recipe is None or not recipe.op.is_norm:
        return None
    source = None if isinstance(recipe.source, Recipe) else recipe.source()
    seen = recipe.seen
    if source is not slot or seen != slot.base or seen.shape != after.base.shape:
        return None
    return after.bits if same_order(seen.shape, seen.stride, after.base.stride) else None


_SUMS = frozenset(
    f"{before}{op}{after}"
    for op in ("add", "sub")
    for before, after in (("", ""), ("", "_"), ("__", "__"), ("__i", "__"), ("__r", "__"))
)


class Gate:
    """Gate that follows the output of a norm, `out`, from the norm's end on.

    is_sole    so far nothing but sums and one ReLU has read it
    is_summed  the ReLU is one of a sum that it is a part of
    """

    def __init__(self, out: Tensor) -> None:
        self.is_sole, self.is_summed = is_touchable(out), False
        self._geometry = Geometry.of(out)
        self._tip = _address(out) if self.is_sole else 0
        self._path = {self._tip: WeakStorage(out)} if self.is_sole else {}  # the output, and sums
        self._passed: int | None = None  # the storage of the ReLU's result

    def ended(self, call: Call, out: Any) -> None:
        """Notes a call that has ended, and whether it has read a tensor that this gate follows."""
        if not self.is_sole:
            return
        read = {_address(x) for x in _tensors(call.args, call.kwargs)} & self._path.keys()
        if not read:
            return
        alike = is_touchable(out) and Geometry.of(out)[:2] == self._geometry[:2]
        self.is_sole = alike and read == {self._tip} and self._passed is None
        if self.is_sole and call.name in _SUMS:
            self.is_summed, self._tip = True, _address(out)
            self._path.setdefault(self._tip, WeakStorage(out))
        elif self.is_sole and call.name in MASKED_OUTPUT:
            self._passed = _address(out)
        else:
            self.is_sole = False

    def bits_of_sum(self, slot: Slot | None, out: Any, sources: Sources) -> Tensor | None:
        """The mask, if the call that has ended with `out` was the ReLU of a sum.

        slot: of the norm's input, in whose order the mask must lie.
        """
        if slot is None or self._passed is None or not (self.is_sole and self.is_summed):
            return None
        after = sources.slot(out)
        if after is None or after.bits is None or after.base.shape != slot.base.shape:
            return None
        alike = same_order(slot.base.shape, slot.base.stride, after.base.stride)
        return after.bits if alike else None

    @property
    def is_closed(self) -> bool:
        """True if nothing but the ReLU has read, or can read, the norm's output or the sum."""
        gone = (known.expired() or at == self._passed for at, known in self._path.items())
        return self.is_sole and self._passed is not None and all(gone)


def _tensors(*values: Any) -> list[Tensor]:
    return [x for x in tensors_in(values) if is_touchable(x)]


def _address(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
