"""The seam: everything that can stand in for a saved tensor; and the two that stand for themselves.

Handle      what any of them answers
KeepHandle  the tensor stays: what plain autograd does, with the check that hooks switch off
DropHandle  nothing is held
"""

from typing import Protocol

from torch import Tensor

from elbowroom.errors import NothingHeld
from elbowroom.runtime.storage import check_version, storage_nbytes, version_of


class Handle(Protocol):
    """Stands in for one storage at one version.

    nbytes  bytes that this handle alone holds
    exact   whether what `restore` gives equals what was saved, bit for bit
    label   what the ledger calls it
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def label(self) -> str: ...

    def restore(self, *, private: bool = False) -> Tensor:
        """The tensor with the dense geometry it was made from.

        private: the caller will overwrite it, so it must not be memory that anybody else sees.
        """
        ...


class KeepHandle:
    """Keep: holds the tensor itself, of any kind.

    1. `x.detach()` is held, never x: x -> its node -> this handle -> x would never die. But of a
       parameter or buffer that has no node it is x, as in plain autograd: somebody may exchange its
       data until backward (FSDP).
    2. Saved-tensor hooks disable autograd's in-place check (a changed tensor gives a wrong gradient
       without a word), so the version is stored here and compared on every restore.
    """

    __slots__ = ("_tensor", "_version", "why")

    exact = True

    def __init__(self, x: Tensor, why: str, *, is_owned: bool = False) -> None:
        """is_owned: by a module, or by the user; it is no value of the step."""
        self._tensor = x if is_owned and x.grad_fn is None else x.detach()
        self._version = version_of(x)
        self.why = why

    @property
    def nbytes(self) -> int:
        return storage_nbytes(self._tensor)

    @property
    def label(self) -> str:
        return "keep"

    @property
    def was_changed(self) -> bool:
        """True if the tensor was changed in place since: it cannot be restored any more."""
        return version_of(self._tensor) != self._version

    def restore(self, *, private: bool = False) -> Tensor:
        x = self._tensor
        if x.is_inference() or x._version != self._version:
            check_version(x, self._version)
        return x.clone() if private else x


class DropHandle:
    """Drop: holds nothing, and cannot be restored.

    For a forward that goes on only to count what a budget would have to be.
    """

    __slots__ = ()

    nbytes = 0
    exact = True  # as far as anything that is made from it may know: nothing will be
    label = "drop"

    def restore(self, *, private: bool = False) -> Tensor:
        raise NothingHeld(
            "this forward held nothing, to find out what its budget would have to be; "
            "its graph cannot run backward"
        )
