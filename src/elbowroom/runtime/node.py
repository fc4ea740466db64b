"""Base class of our autograd nodes, whose `apply` skips checks that they do not need."""

from typing import Any

import torch

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
