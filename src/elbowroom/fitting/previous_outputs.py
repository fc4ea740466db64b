"""Outputs of a model's forwards that the program still holds as the next forward begins.

    for batch in loader:
        out = model(**batch)   # until this returns, `out` is what the step before has given
        out.loss.backward()

So logits, hidden states, and the keys and values of a cache stand beside all that the next forward
saves, and go as it ends. No allocation of the new step tells of them.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.fitting.model_state import storage_nbytes
from elbowroom.measure.held import is_real
from elbowroom.runtime.storage import storage_nbytes as nbytes_of_storage

_SMALL = 1 << 14  # bytes: a loss, or a few scores
_MOST = 1000  # objects that are looked at; what is beyond is not seen
_DEEPEST = 8  # containers in containers
_OTHERS = nn.Parameter, nn.Module, type  # what belongs to the model, and classes


class PreviousOutputs:
    """The outputs of the last forwards, as far as they are alive."""

    def __init__(self) -> None:
        self._noted: list[weakref.ref[Any]] = []  # tensors, and objects that may have some

    def note(self, out: Any) -> None:
        """Notes what a forward has given. This is called in settled steps, too."""
        self._noted += [weakref.ref(x) for x in _in_containers(out) if not isinstance(x, _OTHERS)]

    def alive(self) -> list[Tensor]:
        """Returns the tensors that are held still, and forgets the others."""
        held = [x for known in self._noted if (x := known()) is not None]
        self._noted = [weakref.ref(x) for x in held]
        with torch._C.DisableTorchFunctionSubclass():
            return [x for x in _tensors_in(held) if _is_large(x)]

    def nbytes(self, others: Callable[[], list[Tensor]]) -> int:
        """Returns the bytes of their storages, but of those under others, which count anyway.

        others: is called where there are any
        """
        held = self.alive()
        if not held:
            return 0
        counted = others()
        return storage_nbytes([*counted, *held]) - storage_nbytes(counted)


def _in_containers(value: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """Yields tensors in nested containers, and objects, but those of no weak reference: theirs."""
    if isinstance(value, Tensor):
        yield value
    elif depth > 0 and isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _in_containers(one, depth - 1)
    elif type(getattr(value, "__dict__", None)) is dict:
        if type(value).__weakrefoffset__:
            yield value
        else:
            yield from _in_containers(vars(value), depth - 1)


def _tensors_in(values: list[Any]) -> Iterator[Tensor]:
    """Yields all tensors in these, in containers, and in the fields of objects, as of caches."""
    todo, seen = deque(values), dict[int, Any]()
    while todo and len(seen) < _MOST:
        x = todo.popleft()
        if id(x) in seen or x is None:
            continue
        seen[id(x)] = x
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            todo.extend(x)
        elif isinstance(x, dict):
            todo.extend(x.values())
        elif not isinstance(x, _OTHERS) and type(getattr(x, "__dict__", None)) is dict:
            todo.extend(vars(x).values())


def _is_large(x: Tensor) -> bool:
    if x.layout is not torch.strided or not is_real(x):
        return False
    return nbytes_of_storage(x) >= _SMALL
