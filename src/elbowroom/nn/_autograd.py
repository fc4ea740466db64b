"""What our autograd functions share: a typed `apply`, autocast, seeds, no second derivative.

What is saved does not say how a gradient changes with x.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from elbowroom.errors import ModuleError
from elbowroom.kernels.fakes import has_values


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


def next_seed(x: torch.Tensor) -> int:
    """Returns a seed of 63 bits for what happens to x, from torch's own generator on the CPU.

    So `torch.manual_seed` determines it, checkpointing restores it, and the host need not wait for
    a GPU. It is 0 where x has no values that could be dropped or coded.
    """
    if not has_values(x):
        return 0
    return int(torch.randint(2**63 - 1, ()).item())
