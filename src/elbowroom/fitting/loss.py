"""The loss of a fitted model, where it is a module of its own that the program calls on the output.

    criterion = nn.CrossEntropyLoss()
    er.fit(model, budget=..., loss=criterion)
    loss = criterion(model(x), y)

A call of the loss while the saved tensors of the model's forward wait for backward counts as one
more forward of the same step (`calls.py`). A call inside a forward is a part of that. Any other
call runs plainly, because it belongs to no step. If models share a loss, as in a GAN, a call
belongs to the model whose forward ran last.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elbowroom.errors import PlanError
from elbowroom.runtime.attach import Given, attach, attached, detach, is_within, opener_of


class Stepping(Protocol):
    """Engine of a fitted model, to whose step a call of the loss may belong."""

    ran_at: int

    @property
    def may_go_on(self) -> bool:
        """True while the saved tensors of the last forward wait for backward."""
        ...

    def run_more(self, loss: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        """Runs forward(), which is loss(*args, **kwargs), as a part of the step."""
        ...


class _LossCalls:
    """Runs the calls of a loss for the models that it trains."""

    def __init__(self) -> None:
        self.fittings: weakref.WeakSet[Stepping] = weakref.WeakSet()

    def run(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        """Runs a call of the loss in the step of the model whose forward ran last."""
        if not self.fittings:  # their models have died
            detach(model)
        waiting = [one for one in self.fittings if one.may_go_on]
        runs_again = torch._C._current_graph_task_id() != -1  # in backward, from a checkpoint
        if runs_again or is_within() or not waiting:
            return forward()
        return max(waiting, key=lambda one: one.ran_at).run_more(model, forward, given)

    def passes(self, forward: Callable[[], Any]) -> Any:
        """Runs a call without gradients, which saves nothing."""
        return forward()


def losses_of(loss: nn.Module | Iterable[nn.Module] | None, model: nn.Module) -> list[nn.Module]:
    """Returns the modules that `fit` was given as the model's loss.

    Raises PlanError for an object that is no module, for the model itself or a part of it, and for
    modules with trained parameters, which belong in the model.
    """
    if loss is None:
        return []
    found = [loss] if isinstance(loss, nn.Module) else loss
    if not isinstance(found, Iterable) or isinstance(found, str | Tensor):
        raise PlanError(_no_module(loss))
    modules = list(found)
    for one in modules:
        if not isinstance(one, nn.Module):
            raise PlanError(_no_module(one))
        if any(one is part for part in model.modules()):
            raise PlanError(
                "loss= takes a module that the program calls on the model's output, and this one "
                f"({type(one).__name__}) is a part of the model. Leave loss= out: what the model "
                "calls is covered"
            )
        if any(p.requires_grad for p in one.parameters()):
            raise PlanError(
                f"the loss {type(one).__name__} has parameters that are trained; fit one module "
                "that holds the model and the loss, and call that"
            )
    return modules


def may_be_loss(module: nn.Module) -> bool:
    """Returns whether a module holds no parameters, not even inside a list.

    A module in a list, which `parameters()` does not see, may hold some.
    """
    parts = [
        part
        for one in module.modules()
        for name, part in vars(one).items()
        if name != "_modules"  # those are seen
    ]
    unregistered = [x for part in parts for x in tree_leaves(part) if isinstance(x, nn.Module)]
    return not unregistered and next(module.parameters(), None) is None


def _no_module(given: object) -> str:
    return (
        f"loss= takes a torch.nn.Module, or several; got {type(given).__name__}. For a function "
        "such as F.cross_entropy, use its module (nn.CrossEntropyLoss), or call it in a module"
    )


def cover(loss: nn.Module, fitting: Stepping) -> None:
    """Makes calls of the loss after a forward of the model belong to its step.

    Raises PlanError for a loss that is fitted itself, as a model.
    """
    calls = opener_of(loss)
    if calls is None:
        calls = _LossCalls()
        attach(loss, calls)
    if not isinstance(calls, _LossCalls):
        raise PlanError(f"the loss {type(loss).__name__} is a fitted model; er.release it first")
    calls.fittings.add(fitting)


def uncover(fitting: Stepping) -> None:
    """Detaches the losses of a model, which may still belong to other models."""
    for loss, calls in attached():
        if isinstance(calls, _LossCalls):
            calls.fittings.discard(fitting)
            if not calls.fittings:
                detach(loss)


def succeed(fitting: Stepping, successor: Stepping) -> None:
    """Makes calls of a model's losses belong to the steps of another engine of the model."""
    for _, calls in attached():
        if isinstance(calls, _LossCalls) and fitting in calls.fittings:
            calls.fittings.discard(fitting)
            calls.fittings.add(successor)
