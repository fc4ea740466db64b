"""Finds the models and the optimizers of the user's program.

A model is an outermost module that is called in training mode with gradients on, and of which an
optimizer holds parameters or, if the program updates them by hand, whose parameters have gradients.
So a loss without parameters, a frozen teacher, a moving average and a first call that only makes
lazy parameters are not models. A module that may be a loss is reported separately.

A training that cannot be found is reported before its first update: a forward method that is called
directly, gradients by torch.func, and an optimizer whose gradients come from no called module.
"""

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elbowroom.errors import PlanError
from elbowroom.runtime.attach import discover
from elbowroom.runtime.compiler import original
from elbowroom.runtime.transforms import is_traced, takes_gradients
from elbowroom.runtime.undo import gradient_of

Found = Callable[[nn.Module], None]


class Unseen(PlanError):
    """Raised in a program whose training cannot be found."""


class Discovery:
    """A context: `found` is called with each model, before its forward, until it attaches it.

    later   called with each optimizer as it is made
    unmet   called before an optimizer's first steps, if it has gradients and no model was found
    loss    called with each outermost module without trained parameters; returns whether it has
            attached it
    called  what the program called, while its model is met: the model itself, or what torch.compile
            made of it
    updated  an optimizer has begun a step with gradients, or a model was met that had some
    differentiated  a sentence, if torch.func took gradients of a model
    """

    def __init__(
        self,
        found: Found,
        later: Callable[[Optimizer], None] | None = None,
        unmet: Callable[[], None] | None = None,
        loss: Callable[[nn.Module], bool] | None = None,
    ) -> None:
        self._found, self._later, self._unmet, self._loss = found, later, unmet, loss
        self.made_optimizers = self.updated = self._initializes = self._met = False
        self.called: nn.Module | None = None
        self.differentiated = ""
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of models that were frozen
        self._plain_init = Optimizer.__init__

    def __enter__(self) -> Self:
        plain_init = self._plain_init

        @functools.wraps(plain_init)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain_init(optimizer, *args, **kwargs)
            self._optimizers.append(weakref.ref(optimizer))
            self.made_optimizers = True
            if self._later is not None:
                self._later(optimizer)

        self._init = init
        Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
        self._before_steps = register_optimizer_step_pre_hook(self._before_step)
        discover(self._meet)
        return self

    def __exit__(self, *_: object) -> None:
        discover(None)
        self._before_steps.remove()
        if Optimizer.__init__ is self._init:  # else other code has wrapped it since
            Optimizer.__init__ = self._plain_init  # type: ignore[method-assign]

    def find_made(self) -> None:
        """Finds the optimizers that exist already.

        A process that is spawned begins with the imports of the script, which may make them.
        """
        made = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
        self._optimizers = list(map(weakref.ref, made))
        self.made_optimizers = bool(made)

    def optimizers(self) -> list[Optimizer]:
        """Returns the optimizers that still exist, in the order in which they were made."""
        return [one for known in self._optimizers if (one := known()) is not None]

    def optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        """Returns the optimizers that hold a parameter of the model, in the order of creation."""
        own = {id(p) for p in model.parameters()}
        return [
            one
            for one in self.optimizers()
            if any(id(p) in own for group in one.param_groups for p in group["params"])
        ]

    def trains_more(self, models: Iterable[nn.Module]) -> bool:
        """Returns whether an optimizer holds parameters of none of these models."""
        own = {id(p) for model in models for p in model.parameters()}
        groups = (group for one in self.optimizers() for group in one.param_groups)
        return any(id(p) not in own for group in groups for p in group["params"])

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self.updated or torch.compiler.is_compiling():
            return
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            if self._unmet is not None and not self._met:
                if self._initializes:
                    self._initializes = False
                    return
                self._unmet()
            self.updated = True

    def _meet(self, module: nn.Module) -> bool:
        model = original(module)
        if is_traced():
            if model.training and takes_gradients() and not self.made_optimizers:
                raise Unseen(_by_func(model))
            if model.training and takes_gradients():
                self.differentiated = self.differentiated or _by_func(model)
            return True
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            # If it is none, what is called inside may yet have some, kept in a plain list.
            return self._loss is not None and model not in self._parts and self._is_loss(model)
        if not model.training:
            return True
        if any(is_lazy(p) for p in trainable):
            self._initializes = True  # it is found at its next call
            return True
        has_gradients = any(gradient_of(p) is not None for p in trainable)
        self.updated |= has_gradients
        if has_gradients or self.optimizers_of(model):
            whole = _whose_forward(model)
            if whole is not None:
                name = type(whole).__name__
                raise Unseen(
                    f"the script calls the forward method of {name} by itself, but elbowroom sees "
                    "only calls of modules; write model(x) instead of model.forward(x)"
                )
            self.called, self._met = module, True
            try:
                self._found(model)
            finally:
                self.called = None  # or the script's own model would never be freed
        return True

    def _is_loss(self, module: nn.Module) -> bool:
        """Returns whether a module without trained parameters was attached as a loss.

        A model that is frozen by turns, as a discriminator while the generator learns, is none, and
        nor are its parts.
        """
        if self.optimizers_of(module):
            self._parts.update(module.modules())
            return False
        assert self._loss is not None
        return self._loss(module)


def _by_func(model: nn.Module) -> str:
    return (
        f"the script takes gradients of {type(model).__name__} by torch.func, which lets nobody "
        "hold saved tensors in another way, so no budget can be kept; train by loss.backward()"
    )


def _whose_forward(module: nn.Module) -> nn.Module | None:
    """The module that has this one as a part, and whose forward runs without having been called."""
    found, frame = None, sys._getframe(1)
    while (caller := frame.f_back) is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount and caller.f_code.co_name != "_call_impl":
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module) and any(m is module for m in owner.modules()):
                found = owner
        frame = caller
    return found if found is not module else None
