"""Runs of a model that leave nothing behind: for tools that run forward and backward themselves."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from torch import nn
from torch.optim import Optimizer

from elbowroom.errors import PlanError
from elbowroom.fitting.session import Fitting
from elbowroom.runtime.attach import attach, detach
from elbowroom.runtime.undo import Undo


@contextmanager
def untouched(model: nn.Module, optimizers: Iterable[Optimizer], name: str) -> Iterator[None]:
    """Removes gradients and what is attached inside this context; puts all back on exit.

    RNG, buffers and states of these optimizers are put back as well. Raises PlanError if parameters
    were changed, which stay so.

    name  of the public function
    """
    fitting = detach(model)
    if isinstance(fitting, Fitting):
        fitting.interrupt()
    undo = Undo(model, optimizers)
    gradients = [(p, p.grad) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        yield
        if (changed := undo.changed) is not None:
            raise PlanError(
                f"{name} runs forward and backward, and what it was given has changed {changed}; "
                "it takes a function that trains nothing"
            )
    finally:
        undo.close()
        with suppress(PlanError):  # of changed parameters
            undo.back()
        for p, gradient in gradients:
            p.grad = gradient
        if fitting is not None:
            attach(model, fitting)


def check_keeps_gradients(model: nn.Module, name: str) -> None:
    """Raises PlanError if backward updates the model. name: of the public function."""
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters()):
        raise PlanError(
            f"{name} runs backward, and this model's parameters have hooks that run in it "
            "(release_gradients() of an optimizer), which would change them. remove() those, and "
            "release gradients again afterwards"
        )
