"""The seam: everything that can stand in for a saved tensor."""

from typing import Protocol

from torch import Tensor


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
