"""Finding the model that somebody else's program trains, and its optimizers, without being told.

A model is an outermost module that is called in training mode with gradients on, and of which an
optimizer holds parameters; or, where a program updates them by hand, one that has gradients by now.
So a loss without parameters, a frozen teacher, a moving average and a first call that only makes
lazy parameters are none.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Self

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from elbowroom.runtime.attach import discover
from elbowroom.runtime.compiler import original
from elbowroom.runtime.undo import gradient_of

Found = Callable[[nn.Module], None]


class Discovery:
    """A context: `found` is called with each model, before its forward, until it attaches it.

    later   called with each optimizer as it is made
    called  what the program called: the model itself, or what torch.compile made of it
    """

    def __init__(self, found: Found, later: Callable[[Optimizer], None] | None = None) -> None:
        self._found, self._later = found, later
        self.made_optimizers = False
        self.called: nn.Module | None = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
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
        discover(self._meet)
        return self

    def __exit__(self, *_: object) -> None:
        discover(None)
        if Optimizer.__init__ is self._init:  # else somebody has wrapped it since
            Optimizer.__init__ = self._plain_init  # type: ignore[method-assign]

    def optimizers(self) -> list[Optimizer]:
        """All that are still there, in the order in which they were made."""
        return [one for known in self._optimizers if (one := known()) is not None]

    def optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        """Those that hold a parameter of the model, in the order in which they were made."""
        own = {id(p) for p in model.parameters()}
        return [
            one
            for one in self.optimizers()
            if any(id(p) in own for group in one.param_groups for p in group["params"])
        ]

    def _meet(self, module: nn.Module) -> bool:
        model = original(module)
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            return False  # what is called inside may yet have some, kept in a plain list
        if not model.training or any(is_lazy(p) for p in trainable):
            return True
        if self.optimizers_of(model) or any(gradient_of(p) is not None for p in trainable):
            self.called = module
            self._found(model)
        return True
