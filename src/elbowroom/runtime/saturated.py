"""Results of sigmoid, tanh, softmax and exp, and the ops that divide by 1 - y, by y or the like.

Their derivatives y (1 - y), 1 - y^2 and y (g - sum(g y)) vanish as y saturates, but the error of a
code does not. For most readers this is harmless: the error is small compared to the gradients of
elements that are not saturated. But log(1 - y + 1e-8) has a gradient of 1 / (1 - y + 1e-8), and
makes of an error of 1/30 one of a million: gErr2 was 1e10 for the loss of a GAN that was written
like this, and 4e7 for the log-density of a squashed normal distribution (SAC).

An exponential is of any size: log(y / sum(y)), the way in which contrastive losses are written,
has a gradient of 1 / y, however small y is beside its neighbors, which set the step of its code.
With a temperature of 0.1 gErr2 was 66, with 0.07 it was 44,000, and in the likelihood of a normal
distribution whose variance is exp of what a network makes, 9 and more. There sums and quotients of
y are divisors, too.

So such a result waits while it is held elsewhere, when a code would free nothing; after a sum, a
selection or the like of it, it waits for three more ops that save a tensor. If one of these divides
by a result of it, element by element, or takes its logarithm or root, it stays exact; else it gets
its code. An op that divides by it even later (a logarithm of a product) is found, too: a warning is
logged, and a fitted model keeps the tensor from the next step on. The same applies to ops that
divide in a profiled step, in which nothing waits, because its memory over time is that of plans.
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, reduce
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from elbowroom.plan import Action, Encode, Site
from elbowroom.plan.precision_floor import at_precision_floor, keeps_rows_apart
from elbowroom.runtime.consumers import RESHAPES, Call
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.identity import Identity, is_touchable
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.storage import WeakStorage

_log = logging.getLogger("elbowroom")
EXPONENTIAL = frozenset(("ExpBackward0", "Exp2Backward0", "Expm1Backward0"))
SATURATING = EXPONENTIAL | frozenset(
    (
        *("SigmoidBackward0", "TanhBackward0", "SoftmaxBackward0", "SafeSoftmaxBackward0"),
        "MaskedSoftmaxBackward0",
    )
)
WHY = "what is made of it is divided by, or its logarithm or root is taken"
_MOST_SAVES = 3  # saving calls, in a chain of results of it alone
_OURS = 1  # the handle
# Functions -> the argument whose inverse, logarithm, root or quotients appear in gradients.
_DIVIDING: dict[str, tuple[int, str]] = {
    **dict.fromkeys(
        (
            *("log", "log2", "log10", "log1p", "log_", "sqrt", "rsqrt", "reciprocal", "logit"),
            *("acos", "asin", "atanh", "acosh", "lgamma", "digamma", "prod", "cumprod"),
            *(
                "binary_cross_entropy",
                "poisson_nll_loss",
                "__rtruediv__",
                "__rdiv__",
                "__pow__",
                "pow",
                "erfinv",
            ),
        ),
        (0, "input"),
    ),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "div_"), (1, "other")),
    **dict.fromkeys(("xlogy",), (1, "other")),
    "gaussian_nll_loss": (2, "var"),
}
_POWERS = ("pow", "__pow__")
# Nodes that preserve a small difference: element by element, or of some elements.
_ALONE = (
    *("Add", "Sub", "Rsub", "Neg", "Clamp", "_Clamp", "Where", "MaskedFill"),
    *("Gather", "Index", "Select", "Slice", "Narrow", "Split", "Unbind", "MaskedSelect"),
    *("Diagonal", "Cat", "Stack"),
    *RESHAPES,
)
_ELEMENTWISE = (*_ALONE, "Mul", "_Product", "Pow", "Div")
_SUMMED = ("Sum", "Mean")  # ... of exponentials: the smallest sum is as small as they are
_MOST_NODES = 16


class Saturated:
    """Slot whose encoding waits for ops that may divide by 1 minus the tensor, or the like."""

    def __init__(
        self,
        slot: Slot,
        action: Action,
        hold: Callable[[Slot, Tensor, Action], None],
        *,
        is_exp: bool = False,
    ) -> None:
        """is_exp: it is an exponential; else it saturates."""
        self.slot = weakref.ref(slot)
        slot.waits = True
        self._action, self._hold = action, hold
        self._open = (*_ELEMENTWISE, *_SUMMED) if is_exp else _ALONE
        self._saves = 0  # saving calls since then
        self._is_read = False
        self._is_open = False  # a result of it alone may still be a divisor
        self._others: list[Site] = []

    def ended(self, call: Call, out: Any, identity: Identity) -> bool:
        """Notes that a call has ended; returns whether the slot has waited for long enough."""
        slot = self.slot()
        kept = None if slot is None else slot.value
        if slot is None or slot.pinned or not isinstance(kept, KeepHandle):
            return True
        storage = kept.restore().untyped_storage()._cdata
        if any(x.untyped_storage()._cdata == storage for x in _touchable(call)):
            self._is_read, self._is_open = True, self._is_open or _is_made_by(self._open, out)
        elif call.saved and not self._is_held_by_others(kept):
            self._saves += 1
        return self._saves >= (_MOST_SAVES if self._is_open else 1)

    @property
    def is_known(self) -> bool:
        """True if it can have no further reader, and all readers so far multiply it."""
        slot = self.slot()
        kept = None if slot is None else slot.value
        closed = self._is_read and not self._is_open
        return closed and isinstance(kept, KeepHandle) and not self._is_held_by_others(kept)

    def _is_held_by_others(self, kept: KeepHandle) -> bool:
        """Returns whether the tensor is held elsewhere, so that a code would free nothing yet."""
        return WeakStorage(kept.restore()).holders() > _OURS

    def also(self, site: Site) -> None:
        """Notes another reader, which must be able to read the code, too."""
        self._others.append(site)

    def end(self) -> None:
        """Encodes the slot, unless a reader needs it, or 1 minus it, exactly."""
        slot = self.slot()
        kept = None if slot is None else slot.value
        if slot is not None:
            slot.waits = False
        if slot is None or not isinstance(kept, KeepHandle) or kept.was_changed:
            return
        action = self._action
        if isinstance(action, Encode):
            codec = reduce(at_precision_floor, self._others, action.codec)
            if not all(keeps_rows_apart(codec, one, normalized=False) for one in self._others):
                return
            action = replace(action, codec=codec)
        self._hold(slot, kept.restore(), action)


def divided(call: Call) -> Iterator[int]:
    """Yields autograd's numbers of the nodes y for which a call divides by 1 - y or the like.

    It walks the graph from the argument whose inverse, root or logarithm the call's gradient has,
    through ops that work element by element, and to exponentials through sums, too.
    """
    place = _DIVIDING.get(call.name)
    x = None if place is None else call.arg(*place)
    if not isinstance(x, Tensor) or (call.name in _POWERS and not _is_singular_power(call)):
        return
    waiting: list[tuple[Node | None, bool]] = [(x.grad_fn, False)]
    for _ in range(_MOST_NODES):
        node, is_sum = waiting.pop(0) if waiting else (None, False)
        if node is None:
            if not waiting:
                return
            continue
        name = node.name()
        if name in EXPONENTIAL or (name in SATURATING and not is_sum):
            yield node._sequence_nr()
        elif name.startswith((*_ELEMENTWISE, *_SUMMED)):
            is_sum |= name.startswith(_SUMMED)
            waiting += [(below, is_sum) for below, _ in node.next_functions]


def _touchable(call: Call) -> Iterator[Tensor]:
    """Yields the tensor arguments of a call whose storage may be accessed."""
    yield from (x for x in tensors_in((call.args, call.kwargs)) if is_touchable(x))


def _is_made_by(names: tuple[str, ...], out: Any) -> bool:
    """Returns whether a result was made by a node whose name begins with one of these."""
    node = out.grad_fn if isinstance(out, Tensor) else None
    return node is not None and node.name().startswith(names)


def _is_singular_power(call: Call) -> bool:
    exponent = call.arg(1, "exponent")
    return not isinstance(exponent, int | float) or exponent < 1


@cache
def tell_late(consumer: str, module: str) -> None:
    """Warns, once for an op of a module, that a code was made before its readers were known."""
    _log.warning(
        "the result of '%s' in '%s' has a code, and %s: gradients of this step may be far off "
        "there. A fitted model keeps it from now on; er.saving does not: enlarge min_nbytes, or "
        "take a loss that is made of logits",
        *(consumer, module, WHY),
    )
