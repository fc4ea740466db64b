"""Memory that a model and its optimizers hold between steps, and what the first step adds."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elbowroom.fitting.options import MemoryState
from elbowroom.fitting.state_formats import States
from elbowroom.measure.resident_bytes import (
    expected_nbytes,
    gradients_nbytes,
    growing_nbytes,
    parameters_of,
    resident_bytes_of,
)
from elbowroom.plan.rehearsal import Unallocated
from elbowroom.plan.resident_bytes import ResidentBytes
from elbowroom.runtime.undo import gradient_of, tensors_of


class ModelState:
    """Weights, buffers, gradients and optimizer states of a model.

    None of the owners is kept alive.

    states  those whose format may be chosen
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model = weakref.ref(model)
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self.states = States(self.optimizers, self.standing)
        if optimizer is not None:
            self.add(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Counts the states of this optimizer, too."""
        if all(known is not optimizer for known in self.optimizers()):
            self._optimizers.append(weakref.ref(optimizer))

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Returns whether the optimizer holds a parameter of the model."""
        own = set(map(id, self._trainable()))
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

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
        """Device of the first parameter; the CPU where there is none."""
        model = self._model()
        first = None if model is None else next(iter(model.parameters()), None)
        return torch.device("cpu") if first is None else first.device

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the model's state."""
        return self._with(self.gradients())

    def _with(self, gradients: list[Tensor]) -> list[Tensor]:
        model = self._model()
        tensors = [] if model is None else [*model.parameters(), *gradients, *model.buffers()]
        states = (state for optimizer in self.optimizers() for state in optimizer.state.values())
        return tensors + tensors_of(states)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients that the parameters have now."""
        model = self._model()
        parameters = [] if model is None else model.parameters()
        return [gradient for p in parameters if (gradient := gradient_of(p)) is not None]

    def memory(self) -> MemoryState:
        """Returns the bytes that are resident now, and those that the next step will add."""
        gradients = self.gradients()
        return MemoryState(
            storage_nbytes(self._with(gradients)),
            self.unallocated_gradient_nbytes(),
            self.unallocated_state_nbytes(),
            gradient_nbytes=storage_nbytes(gradients),
        )

    def unallocated_gradient_nbytes(self) -> int:
        """Bytes of the gradients that a step will create, and hold at one time.

        If gradients are released inside backward, only the largest counts.
        """
        unallocated = [p for p in self._trainable() if gradient_of(p) is None]
        return gradients_nbytes(unallocated, self.optimizers())

    def unallocated_gradients(self) -> list[Unallocated]:
        """Returns the gradients that a step will create.

        They are listed one by one; as one where they are released.
        """
        model = self._model()
        unallocated = [p for p in self._trainable() if gradient_of(p) is None]
        at_one_time = self.unallocated_gradient_nbytes()
        if model is None or at_one_time < sum(p.nbytes for p in unallocated):
            return [Unallocated(at_one_time, ())]
        owners: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            for p in module.parameters(recurse=False):
                owners.setdefault(id(p), []).append(name)
        return [Unallocated(p.nbytes, tuple(owners[id(p)])) for p in unallocated]

    def unallocated_state_nbytes(self) -> int:
        """Bytes of the optimizer states that the next steps will create.

        A parameter that two optimizers hold (as wrappers do) counts once.
        """
        optimizers = self.optimizers()
        born = {id(p) for one in optimizers if one.state for p in parameters_of(one)}
        states: dict[int, int] = {}
        for one in optimizers:
            for p in parameters_of(one):
                if id(p) not in born:
                    states[id(p)] = max(expected_nbytes(one, p), states.get(id(p), 0))
        return sum(states.values()) + sum(map(growing_nbytes, optimizers))

    def standing(self) -> ResidentBytes | None:
        """Returns the bytes that are resident between steps; None if the model is gone."""
        model = self._model()
        return None if model is None else resident_bytes_of(model, self.optimizers())

    def optimizers(self) -> list[Optimizer]:
        """Returns the optimizers that are counted and still exist."""
        return [one for known in self._optimizers if (one := known()) is not None]

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
