"""The arguments of a call, as they are before it, so that the call can be repeated.

    tensors   found anywhere in them, in lists, caches and objects alike; the caller holds these
    the rest  a private copy is made at once, and a fresh one for each further call

So a second call does not see what the first one changed in its containers and objects, and its own
changes have no effect: a block appends keys to the same cache once. The copy is a pickle in which
tensors, modules, functions, classes and generators of random numbers stand by reference. Objects
that cannot be pickled (an iterator, an open file, a lock) cannot be passed twice, and neither can
very large ones.

Most calls are given tensors, numbers and tuples of these alone: nothing of them can change but the
tensors, and no pickle is made.
"""

import collections.abc
import io
import pickle
import types
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elbowroom.runtime.generators import KINDS as RANDOM

LARGEST = 1 << 20  # bytes of the copy, one of which is held for each call to be repeated
_CONSTANT = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
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
        self._copy: Any = b""
        places: dict[int, _TensorIndex] = {}
        values = (*args, *kwargs.values())
        simple = self._simple(values, places)
        if simple is None:
            self.tensors.clear()
            self._take((args, kwargs))
            given = set(map(id, values))
            self.direct = [i for i, x in enumerate(self.tensors) if id(x) in given]
        else:
            self._copy = simple, len(args), tuple(kwargs)
            self.direct = sorted({x.place for x in simple if type(x) is _TensorIndex})

    def again(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) as they were, in fresh objects, with these as the tensors."""
        if self._stand_ins:
            tensors = list(tensors)
            for place, stand_in in self._stand_ins.items():
                tensors.insert(place, stand_in)
        if type(self._copy) is tuple:
            simple, count, names = self._copy
            values = _filled(simple, tensors)
            return values[:count], dict(zip(names, values[count:], strict=True))
        loading = _Loading(io.BytesIO(self._copy))
        loading.tensors, loading.others = tensors, self._others
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

    @property
    def shared(self) -> list[Any]:
        """Objects among the arguments that are passed by reference, the same in each call."""
        return self._others

    @property
    def structure(self) -> Any:
        """Nesting of the arguments, and everything in them but tensors; to be compared."""
        # As words, in which 1, 1.0 and True are not equal, and nan is.
        copy = repr(self._copy) if type(self._copy) is tuple else self._copy
        return copy, self.why_not, list(map(type, self._others))

    def _simple(self, values: tuple[Any, ...], places: "dict[int, _TensorIndex]") -> Any:
        """Returns the values with places for their tensors; None: there are others to be copied."""
        simple: list[Any] = []
        for x in values:
            kind = type(x)
            if kind in _CONSTANT:
                simple.append(x)
            elif kind is Tensor or isinstance(x, Tensor):
                place = places.get(id(x))
                if place is None:
                    place = places[id(x)] = _TensorIndex(len(self.tensors))
                    self.tensors.append(x)
                simple.append(place)
            elif kind is tuple:
                inner = self._simple(x, places)
                if inner is None:
                    return None
                simple.append(inner)
            else:
                return None
        return tuple(simple)

    def _take(self, values: Any) -> None:
        written = _Limited()
        saving = _ArgumentPickler(written, protocol=5)
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


class _ArgumentPickler(pickle.Pickler):
    tensors: list[Tensor]
    others: list[Any]
    last = iterator = ""

    def reducer_override(self, x: Any) -> Any:
        """Returns how x is written: a tensor by its index, and what stands by reference likewise.

        It is asked for each object once, and not for numbers, words and containers.
        """
        is_tensor = isinstance(x, Tensor)
        if x is not _taken and (is_tensor or isinstance(x, _BY_REFERENCE)):
            among = self.tensors if is_tensor else self.others
            among.append(x)
            return _taken, (is_tensor, len(among) - 1)
        if isinstance(x, collections.abc.Iterator):
            self.iterator = type(x).__name__
            raise pickle.PicklingError("an iterator cannot be copied")
        self.last = type(x).__name__
        return NotImplemented


class _Loading(pickle.Unpickler):
    tensors: list[Tensor]
    others: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a name stands for; that of `_taken` for what it takes."""
        if (module, name) == (__name__, _taken.__name__):
            tensors, others = self.tensors, self.others  # not self, which will hold the function
            return lambda is_tensor, place: (tensors if is_tensor else others)[place]
        return super().find_class(module, name)


def _taken(is_tensor: bool, place: int) -> Any:
    """Stands in a pickle for what `_Loading` puts in its place."""
    raise NotImplementedError


class _TensorIndex(NamedTuple):
    """Place of a tensor among simple arguments."""

    place: int


def _filled(simple: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple(
        tensors[x.place]
        if type(x) is _TensorIndex
        else _filled(x, tensors)
        if type(x) is tuple
        else x
        for x in simple
    )


def copied(x: Tensor) -> Tensor:
    """Returns a copy that may be changed in place, as x may.

    A parameter, and a tensor without strides, is returned as it is.
    """
    with torch._C.DisableTorchFunction():
        return x if isinstance(x, nn.Parameter) or x.layout is not torch.strided else x.clone()
