"""The values of tensors that a forward may change in place, which are restored if it is undone."""

from collections.abc import Iterable

import torch
from torch import Tensor

from elbowroom.errors import PlanError
from elbowroom.runtime.storage import version_of

LARGE = 1 << 24  # bytes of a tensor that forward has in reach besides its arguments
SMALL = 1 << 16  # bytes of a tensor that is always copied


class TensorValues:
    """The current values of tensors, which restore tensors that are changed in place.

    No value is kept for a tensor that needs a gradient: its changes are part of a graph.
    """

    def __init__(self, tensors: Iterable[tuple[Tensor, int]], max_nbytes: int) -> None:
        """tensors: with their versions. max_nbytes: larger ones are not copied."""
        self._tensors = [(x, version, _copy_of(x, max_nbytes)) for x, version in tensors]

    @property
    def nbytes(self) -> int:
        """The bytes of all copies."""
        return sum(nbytes_of(copy) for _, _, copy in self._tensors if copy is not None)

    @property
    def is_lost(self) -> bool:
        """True if a tensor has changed of which there is no copy."""
        return any(copy is None and version_of(x) != v for x, v, copy in self._tensors)

    @property
    def have_changed(self) -> bool:
        """True if a tensor has changed."""
        return any(_has_changed(*one) for one in self._tensors)

    @property
    def have_changed_large(self) -> bool:
        """True if a large tensor has changed."""
        large = (one for one in self._tensors if nbytes_of(one[0]) > SMALL)
        return any(_has_changed(*one) for one in large)

    def let_go(self) -> None:
        """Drops large copies of tensors that have not changed since."""
        self._tensors = [
            (x, version, None if is_left_alone(x, version, copy) else copy)
            for x, version, copy in self._tensors
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the values of changed tensors.

        Raises PlanError where that is not possible.
        """
        for x, version, copy in self._tensors:
            if not _has_changed(x, version, copy):
                continue
            if copy is None or not leave_graph(x):
                raise PlanError(
                    "forward had to be run a second time, and the first has changed a tensor in "
                    f"place that needs a gradient, is large or is not strided, {tuple(x.shape)}; "
                    "that cannot be undone. Change a clone of it, or make it a buffer of a module."
                )
            if x.shape != copy.shape:
                x.data = copy.clone()
            else:
                x.copy_(copy)
            torch._C._autograd._unsafe_set_version_counter((x,), (version,))


def _has_changed(x: Tensor, version: int, copy: Tensor | None) -> bool:
    return version_of(x) != version or not (copy is None or is_same(x, copy))


def is_same(x: Tensor, copy: Tensor) -> bool:
    """Returns whether a tensor has the values of its copy, which are compared if it is plain.

    `x.data` and an array of NumPy that shares its memory change it without a new version.
    """
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_quantized:
        return True
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if torch.equal(x, copy):
            return True
        if x.shape != copy.shape or not (x.is_floating_point() or x.is_complex()):
            return False
        return bool(((x == copy) | (x.isnan() & copy.isnan())).all())


def is_left_alone(x: Tensor, version: int, copy: Tensor | None) -> bool:
    """Returns whether a large tensor is unchanged since it had this version, and was copied."""
    if copy is None or nbytes_of(copy) <= SMALL or version_of(x) != version:
        return False
    if copy.layout is not torch.strided:
        return False
    with torch._C.DisableTorchFunction():
        return torch.equal(x, copy)


def leave_graph(x: Tensor) -> bool:
    """Takes a tensor that had no graph out of the one that it has got by a change in place.

    Otherwise the next forward would go on with the graph of the one that is undone. Returns whether
    that was possible: views do not leave the graph of what they show.
    """
    if x.grad_fn is None:
        return True
    if x._is_view():
        return False
    x.detach_()
    return True


def _copy_of(x: Tensor, max_nbytes: int) -> Tensor | None:
    if x.requires_grad or x.layout is not torch.strided or x.is_inference():
        return None
    if nbytes_of(x) > max_nbytes:
        return None
    return x.clone()


def nbytes_of(x: Tensor) -> int:
    """Returns the bytes of all its elements."""
    return x.numel() * x.element_size()
