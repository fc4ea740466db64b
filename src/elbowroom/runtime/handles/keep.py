"""Keep: the tensor stays. What plain autograd does, with the check that hooks switch off.

1. `x.detach()` is held, never x: x -> its node -> this handle -> x would never die. But of a
   parameter or buffer that has no node it is x, as in plain autograd: somebody may exchange its
   data until backward (FSDP).
2. Saved-tensor hooks disable autograd's in-place check (a changed tensor gives a wrong gradient
   without a word), so the version is stored here and compared on every restore.
"""

import torch
from torch import Tensor

from elbowroom.errors import RestoreError


class KeepHandle:
    """Holds one tensor of any kind."""

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
        check_version(self._tensor, self._version)
        return self._tensor.clone() if private else self._tensor


def check_version(x: Tensor, version: int) -> None:
    """Raise RestoreError if x was changed in place since `version`."""
    try:
        now = x._version
    except RuntimeError:  # as in `version_of`, which would be one more call
        now = 0
    if now != version:
        raise changed_in_place(tuple(x.shape), x.dtype, version, now)


def changed_in_place(
    shape: tuple[int, ...], dtype: torch.dtype, version: int, now: int
) -> RestoreError:
    """The error of a tensor that was saved at `version`, and is at `now`."""
    return RestoreError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {str(dtype).removeprefix('torch.')} {shape} was saved at "
        f"version {version} and is at version {now} now. Change a clone of it, or call "
        "backward() first."
    )


def version_of(x: Tensor) -> int:
    """The version counter; tensors made in inference mode have none, and never change."""
    try:
        return x._version
    except RuntimeError:  # an inference tensor: to ask first would cost more than all the rest
        return 0


def storage_nbytes(x: Tensor) -> int:
    """Bytes of the whole storage that x keeps alive.

    0 for a tensor that has none (sparse, wrapper subclass).
    """
    try:
        return x.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0
