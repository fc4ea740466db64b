"""What the autograd functions here share: a typed `apply`, and no second derivative.

What is saved does not say how a gradient changes with x.
"""

from typing import Any

import torch

from elbowroom.errors import ModuleError


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, which torch has not typed."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def refuse_twice(
    name: str, cure: str = "Put torch's own module back with er.nn.revert(model)."
) -> None:
    """In a backward: raise ModuleError if its own graph is wanted (create_graph=True)."""
    if torch.is_grad_enabled():
        raise ModuleError(
            f"er.nn.{name} cannot be differentiated twice (create_graph=True, for which "
            f"torch.func.grad always asks): it saves too little for that. {cure}"
        )
