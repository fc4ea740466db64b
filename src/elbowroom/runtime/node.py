"""Base class of our autograd nodes, whose `apply` skips checks that they do not need."""

from typing import Any

import torch
from torch import Tensor

_are_transforms_active = torch._C._are_functorch_transforms_active


class Node(torch.autograd.Function):
    """Autograd function whose `forward` has the context, and that runs outside of torch.func.

    `Function.apply` checks both in each call, in six Python functions.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Returns the result of `forward`, whose node is in the graph."""
        if _are_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


def nothing(x: Tensor) -> None:
    """Drops a tensor, as a hook of saved tensors: it is not needed, since it is recomputed."""


def itself(x: Tensor) -> Tensor:
    """Returns a tensor as it is, as a hook of saved tensors."""
    return x
