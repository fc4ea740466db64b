"""The arguments of a call, as they are before it, so that the call can be repeated.

    tensors   found anywhere in them, in lists, caches and objects alike; the caller holds these
    the rest  a private copy is made at once, and a fresh one for each further call

So a second call does not see what the first one changed in its containers and objects, and its own
changes have no effect: a block appends keys to the same cache once. The copy is a pickle in which
tensors, modules, functions, classes and generators of random numbers stand by reference. Objects
that cannot be pickled (an iterator, an open file, a lock) cannot be passed twice, and neither can
very large ones.
"""

import collections.abc
import io
import pickle
import types
import weakref
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.runtime.rewind import KINDS as RANDOM

LARGEST = 1 << 20  # bytes of the copy, one of which is held for each call to be repeated
_PLAIN = frozenset((str, int, float, bool, type(None), bytes, complex, tuple, list, dict, set))
_BY_REFERENCE = (
    *(nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.ModuleType, types.GenericAlias, weakref.ref, ContextVar, torch.Stream, torch.Event),
    *(torch.jit.ScriptFunction, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *RANDOM,
)


class Arguments:
    """Arguments of one call.

    tensors  each tensor once, in the order in which they are found
    direct   indices of those that stand among the arguments themselves, in no other object
    sources  generators of random numbers among them
    why_not  reason why the arguments cannot be passed again; "": they can
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self.sources: list[Any] = []
        self.why_not = ""
        self._others: list[Any] = []
        self._stand_ins: dict[int, Tensor] = {}
        self._copy = b""
        self._take((args, kwargs))
        given = {id(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        self.direct = [i for i, x in enumerate(self.tensors) if id(x) in given]

    def again(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) as they were, in fresh objects, with these as the tensors."""
        loading = _Loading(io.BytesIO(self._copy))
        loading.tensors, loading.others = list(tensors), self._others
        for place, stand_in in self._stand_ins.items():
            loading.tensors.insert(place, stand_in)
        args, kwargs = loading.load()
        return args, kwargs

    def leave_out(self, stand_ins: dict[int, Tensor]) -> None:
        """Takes tensors out, by ascending index; `again` puts these in their places."""
        self._stand_ins = stand_ins
        self.tensors = [x for i, x in enumerate(self.tensors) if i not in stand_ins]

    def let_go(self) -> list[Tensor]:
        """Returns the tensors, which the caller has to hold from now on."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def copies(self) -> list[Tensor]:
        """Returns copies of the tensors, which the callee may change."""
        with torch._C.DisableTorchFunction():
            return [_copied(x) for x in self.tensors]

    @property
    def shared(self) -> list[Any]:
        """Objects among the arguments that are passed by reference, the same in each call."""
        return self._others

    @property
    def structure(self) -> Any:
        """Nesting of the arguments, and everything in them but tensors; to be compared."""
        return self._copy, self.why_not, list(map(type, self._others))

    def _take(self, values: Any) -> None:
        written = _Limited()
        saving = _Saving(written, protocol=5)
        saving.tensors, saving.others = self.tensors, self._others
        try:
            saving.dump(values)
        except Exception:  # of any kind: a __reduce__ may raise any exception
            self.why_not = f"it is given a '{saving.last}', which cannot be copied"
            if saving.iterator:
                self.why_not = f"it is given a '{saving.iterator}', which gives its items only once"
            elif written.is_full:
                self.why_not = f"it is given objects of more than {LARGEST} bytes"
        self._copy = b"" if self.why_not else written.getvalue()
        self.sources = [x for x in self._others if isinstance(x, RANDOM)]


class _Limited(io.BytesIO):
    is_full = False

    def write(self, data: Any) -> int:
        self.is_full = self.tell() + memoryview(data).nbytes > LARGEST
        if self.is_full:
            raise pickle.PicklingError("the copy is too large")
        return super().write(data)


class _Saving(pickle.Pickler):
    tensors: list[Tensor]
    others: list[Any]
    last = iterator = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places: dict[int, tuple[bool, int]] = {}

    def persistent_id(self, x: Any) -> tuple[bool, int] | None:
        """Returns whether x is a tensor, and its index among the tensors or the others."""
        if type(x) in _PLAIN:
            return None
        is_tensor = isinstance(x, Tensor)
        if not is_tensor and not isinstance(x, _BY_REFERENCE):
            if isinstance(x, collections.abc.Iterator):
                self.iterator = type(x).__name__
                raise pickle.PicklingError("an iterator cannot be copied")
            self.last = type(x).__name__
            return None
        if id(x) not in self._places:
            among = self.tensors if is_tensor else self.others
            self._places[id(x)] = is_tensor, len(among)
            among.append(x)
        return self._places[id(x)]


class _Loading(pickle.Unpickler):
    tensors: list[Tensor]
    others: list[Any]

    def persistent_load(self, pid: tuple[bool, int]) -> Any:
        is_tensor, place = pid
        return (self.tensors if is_tensor else self.others)[place]


def _copied(x: Tensor) -> Tensor:
    """Returns a copy that may be changed in place, as x may.

    A parameter, and a tensor without strides, is returned as it is.
    """
    return x if isinstance(x, nn.Parameter) or x.layout is not torch.strided else x.clone()
