"""Memory that a model and its optimizers hold between steps, and what the first step adds to it.

Models that share a step (`fitting/guests.py`) are counted as one: a guest is counted by its host.
"""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Set

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elbowroom.fitting.options import MemoryState
from elbowroom.fitting.state_formats import StateFormats
from elbowroom.measure.resident_bytes import (
    expected_nbytes,
    gradients_nbytes,
    growing_nbytes,
    parameters_of,
    passing_nbytes,
    resident_bytes_of,
)
from elbowroom.plan.rehearsal import Unallocated
from elbowroom.plan.resident_bytes import ResidentBytes
from elbowroom.runtime.rewind import parameters_in
from elbowroom.runtime.undo import gradient_of, tensors_of


class ModelState:
    """Weights, buffers, gradients and optimizer states of a model.

    None of the owners is kept alive.

    states     those whose format may be chosen
    is_fitted  False once the model is released
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model = weakref.ref(model)
        self._guests: list[weakref.ref[ModelState]] = []
        self.is_fitted = True
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self.states = StateFormats(self.optimizers, self.resident_bytes)
        if optimizer is not None:
            self.add(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Counts the states of this optimizer, too."""
        if all(known is not optimizer for known in self.optimizers()):
            self._optimizers.append(weakref.ref(optimizer))

    def join(self, guest: "ModelState") -> bool:
        """Counts another model, too, which runs in the steps of this one; False if it does."""
        if self.has_guest(guest):
            return False
        self._guests.append(weakref.ref(guest))
        return True

    @property
    def has_guests(self) -> bool:
        """True if other models are counted, too."""
        return bool(self._guests)

    def has_guest(self, other: "ModelState") -> bool:
        """Returns whether the other model is counted, too."""
        return any(known() is other for known in self._guests)

    def title_of(self, guest: "ModelState") -> str:
        """Returns what the names of a guest's modules begin with."""
        return title(next(n for n, known in enumerate(self._guests) if known() is guest))

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Returns whether the optimizer holds a parameter of the model."""
        model = self._model()
        own = [] if model is None else [id(p) for p in model.parameters() if p.requires_grad]
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def containers(self) -> tuple[str, list[str]]:
        """Returns the model's class, and the names of its children with children of their own."""
        model = self._model()
        children = [] if model is None else model.named_children()
        return type(model).__name__, [name for name, one in children if any(one.children())]

    def has_any(self, ids: Set[int]) -> bool:
        """Returns whether one of the model's own parameters has one of these ids."""
        model = self._model()
        return model is not None and any(id(p) in ids for p in model.parameters())

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return storage_nbytes(self.tensors())

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights and buffers."""
        return storage_nbytes(x for one in self._models() for x in _weights(one))

    @property
    def device(self) -> torch.device:
        """Device of the first parameter; the CPU where there is none."""
        model = self._model()
        first = None if model is None else next(iter(model.parameters()), None)
        return torch.device("cpu") if first is None else first.device

    def versions(self) -> tuple[object, ...] | None:
        """Returns what changes with the weights and their gradients.

        None while other tensors stand in for the weights, as in `torch.func.functional_call`.
        """
        model = self._model()
        own = [] if model is None else list(model.parameters())
        if not all(isinstance(p, nn.Parameter) for p in own):
            return None
        grads = ((p, gradient_of(p)) for p in own if p.requires_grad)
        return tuple((p._version, None if g is None else (id(g), g._version)) for p, g in grads)

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the model's state, and of its guests'."""
        return self._with(self.gradients())

    def _with(self, gradients: list[Tensor]) -> list[Tensor]:
        tensors = [*self._parameters(), *(x for one in self._models() for x in one.buffers())]
        states = (one.state.values() for one in self._all_optimizers())
        return [*tensors, *gradients, *tensors_of(itertools.chain.from_iterable(states))]

    def gradients(self) -> list[Tensor]:
        """Returns the gradients that the parameters have now."""
        found = map(gradient_of, self._parameters())
        return [gradient for gradient in found if gradient is not None]

    def memory(self) -> MemoryState:
        """Returns the bytes that are resident now, and those that the next step will add."""
        gradients = self.gradients()
        return MemoryState(
            storage_nbytes(self._with(gradients)),
            self.unallocated_gradient_nbytes(),
            self.unallocated_state_nbytes(),
            gradient_nbytes=storage_nbytes(gradients),
        )

    @property
    def passing_nbytes(self) -> int:
        """Bytes that optimizers hold beside their states while forwards run in their step."""
        return sum(map(passing_nbytes, self._all_optimizers()))

    def resident_nbytes(self) -> int:
        """Returns the bytes that are held now, and those of optimizer states to come."""
        return storage_nbytes(self.tensors()) + self.unallocated_state_nbytes()

    def unallocated_gradient_nbytes(self) -> int:
        """Bytes of the gradients that a step will create, and hold at one time.

        If gradients are released inside backward, only the largest counts.
        """
        unallocated = [p for p in self._trainable() if gradient_of(p) is None]
        return gradients_nbytes(unallocated, self._all_optimizers())

    def unallocated_gradients(self) -> list[Unallocated]:
        """Returns the gradients that a step will create.

        They are listed one by one; as one where they are released.
        """
        unallocated = [p for p in self._trainable() if gradient_of(p) is None]
        at_one_time = self.unallocated_gradient_nbytes()
        if at_one_time < sum(p.nbytes for p in unallocated):
            return [Unallocated(at_one_time, ())]
        owners: dict[int, list[str]] = {}
        for begins, model in self._titled():
            for name, module in model.named_modules(remove_duplicate=False):
                for p in module.parameters(recurse=False):
                    owners.setdefault(id(p), []).append(begins + name)
        return [Unallocated(p.nbytes, tuple(owners[id(p)])) for p in unallocated]

    @property
    def gradients_last(self) -> bool:
        """True if no optimizer releases gradients within backward."""
        unallocated = sum(p.nbytes for p in self._trainable() if gradient_of(p) is None)
        return self.unallocated_gradient_nbytes() == unallocated

    def largest_gradient_nbytes(self) -> int:
        """Returns the bytes of the largest gradient, whether it is there or not."""
        return max((p.nbytes for p in self._trainable()), default=0)

    def unallocated_state_nbytes(self) -> int:
        """Bytes of the optimizer states that the next steps will create.

        A parameter that two optimizers hold (as wrappers do) counts once.
        """
        optimizers = self._all_optimizers()
        born = {id(p) for one in optimizers if one.state for p in parameters_of(one)}
        states: dict[int, int] = {}
        for one in optimizers:
            for p in parameters_of(one):
                if id(p) not in born:
                    states[id(p)] = max(expected_nbytes(one, p), states.get(id(p), 0))
        return sum(states.values()) + sum(map(growing_nbytes, optimizers))

    def resident_bytes(self) -> ResidentBytes | None:
        """Returns the bytes that are resident between steps; None if the model is gone."""
        models = self._models()
        return resident_bytes_of(models, self._all_optimizers()) if models else None

    def optimizers(self) -> list[Optimizer]:
        """Returns the model's own optimizers that are counted and still exist."""
        return [one for known in self._optimizers if (one := known()) is not None]

    def _all_optimizers(self) -> list[Optimizer]:
        each = (one.optimizers() for one in (self, *self._present_guests()))
        return list(dict.fromkeys(itertools.chain.from_iterable(each)))

    def _present_guests(self) -> list["ModelState"]:
        guests = (known() for known in self._guests)
        return [one for one in guests if one is not None and one.is_fitted]

    def _models(self) -> list[nn.Module]:
        return [model for _, model in self._titled()]

    def _titled(self) -> list[tuple[str, nn.Module]]:
        """Returns the models, each with what the names of its modules begin with."""
        own = self._model()
        found = [] if own is None else [("", own)]
        for guest in self._present_guests():
            model = guest._model()
            if model is not None:
                found.append((self.title_of(guest), model))
        return found

    def _trainable(self) -> list[Tensor]:
        each = (p for p in self._parameters() if p.requires_grad)
        return list({id(p): p for p in each}.values())

    def _parameters(self) -> list[Tensor]:
        return [p for one in self._models() for p in parameters_in(one)]


def title(nth: int) -> str:
    """Returns what the names of the modules of the nth guest, from 0, begin with in a step."""
    return f"model {nth + 2}: "


def _weights(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def storage_nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages under these tensors, each counted once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t.layout is torch.strided
    }
    return sum(storages.values())
