"""What a model and its optimizers hold between steps, and what the first step will add to it."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elbowroom.control.terms import Stock
from elbowroom.optim.base import EncodedOptimizer


class Owned:
    """Weights, buffers, gradients and optimizer states. None of the owners is kept alive."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model = weakref.ref(model)
        self._optimizers: list[weakref.ref[Optimizer]] = []
        if optimizer is not None:
            self.add(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Count the states of this optimizer, too."""
        if all(known is not optimizer for known in self.optimizers()):
            self._optimizers.append(weakref.ref(optimizer))

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return storage_nbytes(self.tensors())

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights and buffers."""
        model = self._model()
        return 0 if model is None else storage_nbytes([*model.parameters(), *model.buffers()])

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        model = self._model()
        first = None if model is None else next(iter(model.parameters()), None)
        return torch.device("cpu") if first is None else first.device

    def tensors(self) -> list[Tensor]:
        """All of them."""
        model = self._model()
        parameters = [] if model is None else list(model.parameters())
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        tensors += [] if model is None else list(model.buffers())
        states = [state for optimizer in self.optimizers() for state in optimizer.state.values()]
        return tensors + [
            value for state in states for value in state.values() if isinstance(value, Tensor)
        ]

    def stock(self) -> Stock:
        """What stands now, and what the next step will add to it."""
        return Stock(self.nbytes, self.unborn_gradient_nbytes(), self.unborn_state_nbytes())

    def unborn_gradient_nbytes(self) -> int:
        """Bytes of the gradients that a step will create, and hold at one time.

        Of those that are released inside backward, that is the largest.
        """
        unborn = [p for p in self._trainable() if p.grad is None]
        released = self._released()
        passing = max((p.nbytes for p in unborn if id(p) in released), default=0)
        return passing + sum(p.nbytes for p in unborn if id(p) not in released)

    def unborn_state_nbytes(self) -> int:
        """Bytes of the optimizer states that the first step will create.

        Two fp32 states a parameter, unless the class is known to have others. A parameter that one
        optimizer has states for, or that two hold (as wrappers do), counts once.
        """
        optimizers = self.optimizers()
        born = {id(p) for one in optimizers if one.state for p in _parameters(one)}
        states: dict[int, int] = {}
        for one in optimizers:
            for p in _parameters(one):
                if id(p) not in born:
                    states[id(p)] = max(_state_nbytes(one, p), states.get(id(p), 0))
        return sum(states.values())

    def optimizers(self) -> list[Optimizer]:
        """Those that are counted, and still there."""
        return [one for known in self._optimizers if (one := known()) is not None]

    def _released(self) -> set[int]:
        """Parameters that an optimizer updates inside backward."""
        releases = [one.released for one in self.optimizers() if isinstance(one, EncodedOptimizer)]
        return {p for release in releases if release is not None for p in release.watched}

    def _trainable(self) -> list[Tensor]:
        model = self._model()
        return [] if model is None else [p for p in model.parameters() if p.requires_grad]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _state_nbytes(optimizer: Optimizer, p: Tensor) -> int:
    """Bytes of the states that a parameter will have."""
    if isinstance(optimizer, EncodedOptimizer):
        return optimizer.state_nbytes(p)
    if not isinstance(optimizer, torch.optim.SGD):
        return 8 * p.numel()
    return 4 * p.numel() if optimizer.defaults.get("momentum") else 0


def storage_nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages under these tensors, each counted once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t.layout is torch.strided
    }
    return sum(storages.values())
