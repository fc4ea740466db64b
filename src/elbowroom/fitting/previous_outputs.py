"""Outputs of a model's forwards that the program still holds as the next forward begins.

    for batch in loader:
        out = model(**batch)   # until this returns, `out` is what the step before has given
        out.loss.backward()

So logits, hidden states, and the keys and values of a cache stand beside all that the next forward
saves, and go as it ends. No allocation of the new step tells of them.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.fitting.model_state import storage_nbytes
from elbowroom.measure.live_storages import is_real
from elbowroom.runtime.storage import storage_nbytes as nbytes_of_storage

_SMALL = 1 << 14  # bytes: a loss, or a few scores
_MAX = 1000  # objects that are looked at; what is beyond is not seen
_DEEPEST = 8  # containers in containers
_OTHERS = nn.Parameter, nn.Module, type  # what belongs to the model, and classes


class PreviousOutputs:
    """The outputs of the last forwards, as far as they are alive."""

    def __init__(self) -> None:
        self._noted: list[weakref.ref[Any]] = []  # tensors, and objects that may have some

    def note(self, out: Any) -> None:
        """Notes what a forward has given. This is called in settled steps, too."""
        if len(self._noted) > _MAX:
            self._noted = [known for known in self._noted if known() is not None][-_MAX:]
        found = (x for x in _in_containers(out) if not isinstance(x, _OTHERS))
        self._noted += map(weakref.ref, islice(found, _MAX))

    def alive(self) -> list[Tensor]:
        """Returns the tensors that are held still, and forgets the others."""
        held = [x for known in self._noted if (x := known()) is not None]
        self._noted = [weakref.ref(x) for x in {id(x): x for x in held}.values()]
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
    """Yields tensors in nested containers, and objects to which there may be a weak reference."""
    if isinstance(value, Tensor):
        yield value
    elif (inside := _contents(value)) is not None:
        for one in islice(inside, _MAX if depth else 0):  # a list may hold a million numbers
            yield from _in_containers(one, depth - 1)
    elif (fields := _fields(value)) is not None:
        if type(value).__weakrefoffset__:
            yield value
        else:
            yield from _in_containers(fields, depth - 1)


def _tensors_in(values: list[Any]) -> Iterator[Tensor]:
    """Yields all tensors in these, in containers, and in the fields of objects, as of caches."""
    todo, seen = deque(values), dict[int, Any]()
    while todo and len(seen) < _MAX:
        x = todo.popleft()
        if id(x) in seen or x is None:
            continue
        seen[id(x)] = x
        if isinstance(x, Tensor):
            yield x
        elif (inside := _contents(x)) is not None:
            todo.extend(inside)
        elif not isinstance(x, _OTHERS) and (fields := _fields(x)) is not None:
            todo.extend(dict.values(fields))


def _contents(value: Any) -> Iterable[Any] | None:
    """The contents of a container; None: it is none. No method of a class of the user's is called.

    A subclass may compute what its methods give.
    """
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, list):
        return list.copy(value)
    return tuple.__getitem__(value, slice(None)) if isinstance(value, tuple) else None


def _fields(value: Any) -> dict[str, Any] | None:
    """The `vars` of an object, unless its class computes them."""
    is_computed = any(
        isinstance(vars(one).get("__dict__"), property) for one in type(value).__mro__
    )
    fields = None if is_computed else getattr(value, "__dict__", None)
    return fields if type(fields) is dict else None


def _is_large(x: Tensor) -> bool:
    if x.layout is not torch.strided or not is_real(x):
        return False
    return nbytes_of_storage(x) >= _SMALL
