"""Attention that is written out: a product of q and k, of which a softmax is taken.

    z = q k^T                 saves q and k
    s z + mask, s tanh(z)     save nothing of z, or what is made of it
    p = softmax(...)          saves p, an element for each pair of tokens
    dropout(p) v              saves what it multiplies

With codes, p is made again of those of q and k, as fused attention does it (`direct/attention/`):
backward then reads a softmax of other logits, the rows of which add up to 1. So q and k wait until
it is known whether a softmax follows, and get the levels that their logits ask for
(`plan/precision_floor.py`). The error of a logit grows by the factors on the way to the softmax
(`Op.slope`). Where logits are too sharp for any code, q and k stay as they are if they take less
than p does as 8-bit floats; otherwise p is held in these.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from elbowroom.kernels.fakes import would_wait
from elbowroom.plan import Action
from elbowroom.plan.precision_floor import MAX_LEVELS, levels_for
from elbowroom.runtime.consumers import Call, FormulaPart, Levels
from elbowroom.runtime.direct.attention.levels import channel_spread, spread
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.handles.rebuild import Link, Op, Product, Ready, Recipe
from elbowroom.runtime.saturated import Saturated
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.sources import Sources

_Note: TypeAlias = Callable[[Op, int | None, float], None]
PRODUCTS = frozenset(("matmul", "__matmul__", "bmm", "baddbmm"))
SOFTMAXES = frozenset(("softmax", "_safe_softmax"))
_STEPS = PRODUCTS | {"tanh"}  # save what they read or make, between a product and its softmax
_MAX_SAVES = 3  # calls that save, for a bias or a mask
_MAX_WIDTH = 256  # of a row of q: a head's
FOLLOWS = "a softmax of its product follows, which is made again of its code"
TOO_SHARP = "attention's logits are too sharp for any code of q and k"


class Attention(NamedTuple):
    """The slots of q and k whose product a softmax takes.

    op      that multiplies them
    spread  the variance of a logit's error, times (levels - 1)^2; None: no values are read
    scale   what logits are multiplied with
    """

    slots: tuple[Slot, ...]
    op: Op
    spread: float | None
    scale: float

    @property
    def levels(self) -> int | None:
        """The fewest levels of codes of q and k; None: no code is fine enough."""
        return MAX_LEVELS if self.spread is None else levels_for(self.spread)


def _operands(call: Call) -> tuple[Any, Any]:
    """Returns the q [..., T, D] and k [..., D, S] of a product."""
    if call.name == "baddbmm":
        return call.arg(1, "batch1"), call.arg(2, "batch2")
    return call.first, call.arg(1, "mat2" if call.name == "bmm" else "other")


def may_be_logits(call: Call) -> bool:
    """Returns whether a product may be that of q and k: one of a batch, larger than they are."""
    q, k = _operands(call)
    if call.name not in PRODUCTS or not isinstance(q, Tensor) or not isinstance(k, Tensor):
        return False
    if min(q.dim(), k.dim()) < 3 or q.shape[-1] > _MAX_WIDTH or not (q.numel() and k.numel()):
        return False
    return 2 * prod(q.shape[:-1]) * k.shape[-1] >= q.numel() + k.numel()


def product_of(call: Call) -> Product:
    """Returns what is known of logits: how far codes of q and k move them, times (levels - 1)."""
    q, k = (x.detach() for x in _operands(call))
    if would_wait(q) or type(q) is not Tensor:
        return Product(None)
    return Product(spread_of(q, k, float(call.kwargs.get("alpha", 1.0))))


def levels_of_logits(call: Call, scale: float) -> Levels:
    """The fewest levels for codes of the operands of a product, logits of which are scaled."""
    known = product_of(call).spread
    return Levels(MAX_LEVELS if known is None else levels_for(known * scale**2), None)


def spread_of(q: Tensor, k: Tensor, scale: float = 1.0) -> float:
    """Returns `spread` of q [..., T, D] and k [..., D, S].

    Where the product copies k, tokens lie side by side, and share a step.
    """
    found = spread(q, k.transpose(-2, -1), scale)
    return found if not _lies_by_channel(k) else found + channel_spread(q, k, scale)


def _lies_by_channel(k: Tensor) -> bool:
    """Returns whether the product saves k, or a copy of it, with its tokens side by side."""
    folds = all(
        k.stride(d) == k.stride(d + 1) * k.shape[d + 1]
        for d in range(k.dim() - 3)
        if k.shape[d] > 1
    )
    return not folds or k.stride(-1) == 1


def attention_of(logits: Ready) -> Attention | None:
    """Returns the q and k that logits are made of; None: they are no such product."""
    made, scale = logits, 1.0
    while made.op.product is None:
        if made.op.slope is None or not isinstance(made.source, Ready):
            return None
        scale *= made.op.slope
        made = made.source
    slots = tuple(one for one in (made.source, *made.others) if isinstance(one, Slot))
    if len(slots) <= len(made.others):
        return None
    known = made.op.product.spread
    return Attention(slots, made.op, None if known is None else known * scale**2, scale)


def attention_below(ready: Ready) -> Attention | None:
    """Returns q and k of the softmax that a recipe takes; None: it takes none."""
    if ready.op.is_exponential and ready.op.product is None and isinstance(ready.source, Ready):
        return attention_of(ready.source)
    return attention_below(ready.source) if isinstance(ready.source, Ready) else None


def are_logits(made: "Slot | Link") -> bool:
    """Returns whether a recipe makes the product of a q and a k, or something of that."""
    while isinstance(made, Recipe) and made.op.product is None:
        made = made.source
    return isinstance(made, Recipe)


def take_softmax(call: Call, sources: Sources, note: _Note) -> None:
    """Has q and k get codes of which the softmax that a call takes can be made again.

    Not if one of them has a code already. note: is called with the op of their product, the levels
    that its operands need, and what its result is multiplied with.
    """
    x = call.first
    origin = sources.origin(x, call.version) if isinstance(x, Tensor) else None
    ready = None if origin is None or origin.recipe is None else origin.recipe.ready()
    found = None if ready is None else attention_of(ready)
    if found is None or any(slot.has_logits for slot in found.slots):
        return
    coded = [slot for slot in found.slots if slot.sites and not slot.pinned]
    if not all(slot.waits and slot.sites[-1].consumer in PRODUCTS for slot in coded):
        return
    levels = found.levels
    if levels is None and x.numel() < sum(slot.entry.before_nbytes for slot in coded):
        return
    for slot in coded:
        slot.has_logits, slot.logits_levels = True, levels or 0
        if levels is None:
            slot.pin()
            slot.entry.why = TOO_SHARP
    note(found.op, levels, found.scale)


class Logits(Saturated):
    """Slot of q, k, or of a cap of their product, whose encoding waits for the softmax of that."""

    is_known = False

    def __init__(
        self,
        slot: Slot,
        action: Action,
        hold: Callable[[Slot, Tensor, Action], None],
        part: FormulaPart,
        note: _Note,
        again: Callable[[Slot, Tensor], bool] | None,
    ) -> None:
        """note: as in `take_softmax`. again: holds a cap as its recipe, or returns False."""
        super().__init__(slot, action, hold, part)
        self._note, self._again = note, again

    def ended(self, call: Call, out: Any, sources: Sources) -> bool:
        """Notes that a call has ended; returns whether the slot need not wait for a softmax."""
        slot = self.slot()
        if slot is None or slot.pinned:
            return True
        if call.name in SOFTMAXES:
            take_softmax(call, sources, self._note)
            if slot.has_logits or self._again is not None:
                return True
        self._saves += bool(call.saved) and call.name not in _STEPS
        return self._saves >= _MAX_SAVES

    def end(self) -> None:
        """Encodes the slot with the levels that the softmax needs, or holds the recipe of a cap."""
        slot = self.slot()
        kept = None if slot is None else slot.value
        if slot is not None and self._again is not None and not self._others:
            stays = isinstance(kept, KeepHandle) and not kept.was_changed
            if stays and kept is not None and self._again(slot, kept.restore()):
                slot.waits = False
                return
        super().end()
