"""Detection of norms whose whole gradient comes through one ReLU.

Such a gradient is 0 wherever that ReLU lets nothing pass, and the norm's backward reads what lies
there in one small term only, so that a rough code will do (`codecs/sided.py`). Forward tells:

    h = norm(x); z = relu(h)            h has no other reader, and is gone, or has become z
    h = norm(x); z = relu(h + other)    the same of h, and of the sum

A gate follows h from op to op. Whatever else takes h or the sum, be it a view, a hook or a second
ReLU, ends it; so does h or a sum that could still be read when the next op begins. If what Python
does not see reads one (a kernel of the user's own), the gradient is noisier, and still unbiased.
"""

from typing import Any

from torch import Tensor

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.identity import Identity, is_touchable
from elbowroom.runtime.masks import MASKED_OUTPUT
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.recipes import same_order
from elbowroom.runtime.slot import Geometry, Slot
from elbowroom.runtime.weak import WeakStorage

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
        self._path = {self._tip: WeakStorage(out)} if self.is_sole else {}  # it, and the sums
        self._passed: int | None = None  # the storage of what the ReLU has made

    def ended(self, call: Call, out: Any) -> None:
        """Notes a call that has ended, and whether it has read what this gate follows."""
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

    def bits_of_sum(self, slot: Slot | None, out: Any, identity: Identity) -> Tensor | None:
        """The mask, if the call that has ended with `out` was the ReLU of a sum.

        slot: of the norm's input, in whose order the mask must lie.
        """
        if slot is None or self._passed is None or not (self.is_sole and self.is_summed):
            return None
        after = identity.slot(out)
        if after is None or after.bits is None or after.base.shape != slot.base.shape:
            return None
        alike = same_order(slot.base.shape, slot.base.stride, after.base.stride)
        return after.bits if alike else None

    @property
    def is_closed(self) -> bool:
        """True if nothing can read the norm's output or the sum any more: the ReLU was all."""
        gone = (known.expired() or at == self._passed for at, known in self._path.items())
        return self.is_sole and self._passed is not None and all(gone)


def _tensors(*values: Any) -> list[Tensor]:
    return [x for x in tensors_in(values) if is_touchable(x)]


def _address(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
