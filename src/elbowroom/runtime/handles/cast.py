"""Cast: autocast's copy of a parameter in another dtype is dropped, and rebuilt on request.

The parameter exists in any case, and a cast of the same values gives the same bits. Its version
shows whether the values are the same, and must be the one that was cast: a copy from autocast's
cache may be older than a change of the parameter. So a copy is dropped only if it was made in the
same call that saves it.
"""

from typing import Self

import torch
from torch import Tensor, nn

from elbowroom.errors import RestoreError
from elbowroom.runtime.slot import Geometry
from elbowroom.runtime.storage import check_version, storage_nbytes, version_of


class CastHandle:
    """Holds a parameter, and the dtype and geometry of its cast."""

    __slots__ = ("_dtype", "_geometry", "_parameter", "_version")

    exact = True
    label = "rebuild"
    nbytes = 0

    def __init__(self, parameter: nn.Parameter, base: Tensor) -> None:
        self._parameter, self._dtype = parameter.detach(), base.dtype
        self._geometry = Geometry.of(base)
        self._version = version_of(parameter)

    @classmethod
    def of(cls, x: Tensor, base: Tensor, began: int) -> Self | None:
        """Creates a handle for `base`, which covers x's storage.

        Returns None if that is no cast of a parameter, or was made before autograd's node `began`.
        """
        copy = x if x._base is None else x._base
        node = copy.grad_fn
        if node is None or node.name() != "ToCopyBackward0" or node._sequence_nr() < began:
            return None
        below = node.next_functions[0][0]
        parameter = getattr(below, "variable", None)  # of the node that adds up its gradient
        if type(parameter) is not nn.Parameter or parameter.device != copy.device:
            return None
        alike = parameter.shape == copy.shape and parameter.stride() == copy.stride()
        whole = copy.numel() * copy.element_size() == storage_nbytes(x)
        dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        return cls(parameter, base) if alike and whole and dense else None

    def restore(self, *, private: bool = False) -> Tensor:
        parameter = self._parameter
        check_version(parameter, self._version)
        if parameter.untyped_storage().nbytes() == 0 < parameter.numel():
            raise RestoreError(
                f"a cast of a parameter of shape {tuple(parameter.shape)} must be repeated in "
                "backward, but its memory was freed after forward (FSDP does this); use "
                "er.saving(rebuild=False)"
            )
        with torch.no_grad():
            return self._geometry.on(parameter.to(self._dtype))
