"""Record of what a step changes until its optimizer's update begins, so that it can be run again.

RNG, buffers,     noted or copied before the step (`rewind.py`)
attributes,
arguments
gradients         an existing one is copied when backward is about to add to it; one that the step
                  drops itself costs nothing
optimizer states  those that the step created are removed; changed ones cannot be restored, and
                  neither can parameters
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from elbowroom.runtime.changed_parameters import ChangedParameters
from elbowroom.runtime.changed_parameters import gradient_of as gradient_of
from elbowroom.runtime.node_hooks import NodeHooks
from elbowroom.runtime.rewind import Rewind
from elbowroom.runtime.storage import version_of


class Undo:
    """A model and its optimizers, as they are now; `close` when the step is over."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        given: Iterable[Any] = (),
        *,
        copies: bool = True,
    ) -> None:
        """given: what its forward is handed. copies: it may change large tensors in place."""
        self._rewind = Rewind(model, given, copies=copies)
        changed = self._rewind.parameters
        self._gradients = [_GradientBefore(p, changed) for p in model.parameters() if p.is_leaf]
        self._nodes = NodeHooks()
        self._states = [_OptimizerStates(optimizer) for optimizer in optimizers]
        self._parametrized = dict(parametrize._cache)

    @property
    def changed_large(self) -> bool:
        """True if a tensor that forward was handed, or a large one in reach, has been changed."""
        return self._rewind.changed_large

    @property
    def copied_nbytes(self) -> int:
        """The bytes of what was copied before the step."""
        return self._rewind.nbytes

    def watching(self, forward: Callable[[], Any]) -> Callable[[], Any]:
        """Returns the forward wrapped, so that its changes of parameters can be undone, too."""

        def watched() -> Any:
            with self._nodes, self._rewind.parameters:
                return forward()

        return watched

    def let_go(self) -> None:
        """Drops copies of large tensors that an ended forward has not changed."""
        self._rewind.let_go()

    @property
    def is_possible(self) -> bool:
        """True if a forward can be run again with the same arguments."""
        return self._rewind.is_possible

    @property
    def is_lost(self) -> bool:
        """True if a large tensor has changed of which there is no copy (any more)."""
        return self._rewind.is_lost

    @property
    def changed(self) -> str | None:
        """Name of an irreversible change by the step; None: it can be undone."""
        if self._rewind.changed is not None:
            return f"the parameter '{self._rewind.changed}'"
        return "the optimizer's states" if any(one.changed for one in self._states) else None

    def back(self) -> None:
        """Restores everything.

        It also drops autocast's cached copies of weights: the next run has to create its own, to be
        measured with them. The same holds for what `parametrize.cached()` has cached.
        """
        torch.clear_autocast_cache()
        parametrize._cache = dict(self._parametrized)
        self._nodes.remove()
        self._rewind.back()
        for gradient in self._gradients:
            gradient.back()
        for states in self._states:
            states.back()

    @contextmanager
    def states_change(self) -> Iterator[None]:
        """Allows states to be replaced by equivalent ones; meanwhile the old ones are not held."""
        for states in self._states:
            states.forget()
        try:
            yield
        finally:
            for states in self._states:
                states.note()

    def close(self) -> None:
        """Ends the step, and all watching."""
        for gradient in self._gradients:
            gradient.close()


class _GradientBefore:
    """Gradient of one parameter, which may have none."""

    def __init__(self, parameter: Tensor, changed: ChangedParameters) -> None:
        """changed: knows whether a forward has written to it; it is copied before, then."""
        self._parameter, self._changed = parameter, changed
        self._before: weakref.ref[Tensor] | None = None
        self._copy: Tensor | None = None
        self._hook: Any = None
        gradient = gradient_of(parameter)
        if gradient is not None:
            self._before = weakref.ref(gradient)
        if gradient is not None and parameter.requires_grad:
            self._hook = parameter.register_hook(self._accumulates)  # type: ignore[no-untyped-call]

    def _accumulates(self, _: Tensor) -> None:
        """Copies the gradient before backward adds to it."""
        before = self._still_there()
        if before is None or self._parameter.grad is not before or self._copy is not None:
            return
        if not self._changed.has_copy_of_gradient(self._parameter):
            self._copy = before.detach().clone()

    def _still_there(self) -> Tensor | None:
        """Returns the gradient from before the step; None, too, if the step has dropped it."""
        return None if self._before is None else self._before()

    @torch.no_grad()
    def back(self) -> None:
        before = self._still_there()
        if before is not None and self._copy is not None:
            before.copy_(self._copy)
        if gradient_of(self._parameter) is not before:
            self._parameter.grad = before

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class _OptimizerStates:
    """States of one optimizer as they were before the step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known = list(optimizer.state)
        self._has_changed = False
        self.note()

    def note(self) -> None:
        """Records the states of now as those before the step."""
        state = self._optimizer.state
        self._before = {p: dict(state[p]) for p in self._known}
        self._versions = [(x, version_of(x)) for x in tensors_of(self._before.values())]

    def forget(self) -> None:
        """Drops held states, until `note`."""
        self._has_changed = self.changed
        self._before, self._versions = {}, []

    @property
    def changed(self) -> bool:
        return self._has_changed or any(version_of(x) != version for x, version in self._versions)

    def back(self) -> None:
        state = self._optimizer.state
        for p in [p for p in state if p not in self._before]:
            del state[p]
        state.update(self._before)


def tensors_of(states: Iterable[dict[str, Any]]) -> list[Tensor]:
    """All tensors of an optimizer's states; some are in lists (LBFGS)."""
    values = [value for state in states for value in state.values()]
    nested = [value for value in values if isinstance(value, list | tuple | dict | deque)]
    leaves = [x for x in tree_leaves(nested) if isinstance(x, Tensor)]
    return [value for value in values if isinstance(value, Tensor)] + leaves
