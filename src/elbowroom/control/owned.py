"""What a model and its optimizer hold between steps, and what the first step will add to it."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Owned:
    """Weights, buffers, gradients and optimizer states. Neither the model is kept alive, nor it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model = weakref.ref(model)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

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
        optimizer = None if self._optimizer is None else self._optimizer()
        parameters = [] if model is None else list(model.parameters())
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        tensors += [] if model is None else list(model.buffers())
        states = [] if optimizer is None else list(optimizer.state.values())
        return tensors + [
            value for state in states for value in state.values() if isinstance(value, Tensor)
        ]

    def unborn_gradient_nbytes(self) -> int:
        """Bytes of the gradients that a step will create."""
        return sum(p.nbytes for p in self._trainable() if p.grad is None)

    def unborn_state_nbytes(self) -> int:
        """Bytes of the optimizer states that the first step will create.

        Two fp32 states a parameter, unless the class says less.
        """
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None or optimizer.state:
            return 0
        momentum_free = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults.get(
            "momentum"
        )
        states = 0 if momentum_free else 1 if isinstance(optimizer, torch.optim.SGD) else 2
        return states * sum(4 * p.numel() for p in self._trainable())

    def _trainable(self) -> list[Tensor]:
        model = self._model()
        return [] if model is None else [p for p in model.parameters() if p.requires_grad]


def storage_nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages under these tensors, each counted once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t.layout is torch.strided
    }
    return sum(storages.values())
