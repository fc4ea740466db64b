"""Tests for code that is no plain step, but traced, or transformed by torch.func."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_said = False


def is_traced() -> bool:
    """Returns whether torch.jit.trace, vmap or grad is active.

    Tensors inside them have no memory, or no numbers for shapes.
    """
    return torch._C._is_tracing() or torch._C._are_functorch_transforms_active()


def takes_gradients() -> bool:
    """Returns whether torch.func.grad, or vjp, jacrev or hessian, is running."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(one.key() == torch._C._functorch.TransformType.Grad for one in stack)


def unwrapped(x: Tensor) -> Tensor:
    """Returns the tensor that transforms of torch.func have wrapped as x: it has the memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def untransformed() -> AbstractContextManager[object]:
    """Returns a context in which no transform of torch.func, or of batched gradients, is active."""
    batches = torch._C._dispatch_tls_is_dispatch_key_included("VmapMode")
    if not (batches or torch._C._are_functorch_transforms_active()):
        return nullcontext()
    return _untransformed()


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, which runs where no transform is active."""

    def run(*args: Any) -> Any:
        with _untransformed():
            return function(*args)

    return run


@contextmanager
def _untransformed() -> Iterator[None]:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    levels = torch._C._vmapmode_increment_nesting()
    for _ in range(levels):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(levels - 1):
            torch._C._vmapmode_increment_nesting()


def is_transformed() -> bool:
    """Returns whether the current code is traced, transformed, or runs in forward mode."""
    return is_traced() or torch.autograd.forward_ad._current_level >= 0


def say_transformed() -> None:
    """Warns, once, that a fitted model is called in such code."""
    global _said
    if not _said:
        _said = True
        warnings.warn(
            "inside torch.func transforms, forward-mode differentiation and torch.jit.trace a "
            "fitted model runs plainly, outside of its budget; train it with loss.backward() to "
            "keep to the budget",
            stacklevel=2,
        )
