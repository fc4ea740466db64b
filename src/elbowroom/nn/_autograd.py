"""The parts that the autograd functions share: a typed `apply`, autocast, no second derivative.

What is saved does not say how a gradient changes with x.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from elbowroom.errors import ModuleError


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Calls `function.apply(*args)`, which torch has not typed."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast casts to on x's device; None: off or unknown there."""
    device = x.device.type
    known = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if known else None


def without_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off on the device of x."""
    known = torch.amp.is_autocast_available(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if known else nullcontext()


def refuse_twice(
    name: str, cure: str = "Put torch's own module back with er.nn.revert(model)."
) -> None:
    """Raises ModuleError, in a backward, if its own graph is wanted (create_graph=True)."""
    if torch.is_grad_enabled():
        raise ModuleError(
            f"er.nn.{name} cannot be differentiated twice (create_graph=True, for which "
            f"torch.func.grad always asks): it saves too little for that. {cure}"
        )
