"""Fingerprints of the parameters that a replayed forward reads again in backward.

A change through `p.data` has no version to show it. An examined forward copies small parameters for
it (`changing.py`). A replayed one copies nothing: once its script ends, it takes a fingerprint of
all parameters that modules which run again read, and ops by which tensors are made again. It is
compared when backward first reads one of them. Both are one call for all of them, so they cost less
than 1 us a parameter in a step.

All words of biases and scales are read, and a few of a matrix. Nothing is read on a GPU, where the
host would wait.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from elbowroom.errors import RestoreError
from elbowroom.kernels import ops
from elbowroom.runtime.storage import (
    is_dense,
    is_small,
    is_touchable,
    note_changing,
    note_changing_of,
)

_SMALL_MATRIX = 1 << 13  # bytes: all of it is read
_WORDS = 16  # of 8 bytes, that are read of a larger one
_MOST_LAYOUTS = 16
_NEVER = -2  # no backward has this number
_backward_now = torch._C._current_graph_task_id


class Fingerprints:
    """Fingerprints of parameters, as they are when a replayed forward has ended."""

    __slots__ = ("_backward", "_before", "_changed", "_layout", "_parameters", "_readers")

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._readers: list[tuple[list[Tensor], weakref.ref[nn.Module]]] = []
        self._layout = _NOTHING
        self._before: bytes | None = None  # 8 of each parameter that can be read
        self._changed: frozenset[int] = frozenset()  # by `id`
        self._backward = _NEVER  # in which they were compared last

    def note(self, parameters: tuple[Tensor, ...]) -> None:
        """Notes parameters of an op that backward will run again."""
        if self._before is None:
            self._parameters += parameters

    def note_module(self, parameters: list[Tensor], module: "weakref.ref[nn.Module]") -> None:
        """Notes the parameters of a module that backward will run again."""
        if self._before is None:
            self._parameters += parameters
            self._readers.append((parameters, module))

    def take(self) -> None:
        """Takes the fingerprints, once: nothing has changed the parameters since they were read."""
        if self._before is None and self._parameters:
            with torch._C.DisableTorchFunction():
                self._layout = _layout_of(self._parameters)
                self._before = self._layout.read(self._parameters)

    def changed(self, parameters: Sequence[Tensor]) -> list[int]:
        """Returns the indices of those whose values are others now.

        With the first one that is found, all are known to change from then on.
        """
        if self._before is None:
            return []
        now = _backward_now()
        if now != self._backward:
            self._backward, self._changed = now, self._compared(self._before)
            for some, module in self._readers if self._changed else ():
                for i in self._among(some):
                    note_changing_of(module(), i)
        return self._among(parameters) if self._changed else []

    def check(self, parameters: tuple[Tensor, ...]) -> None:
        """Raises RestoreError if a parameter of an op has other values than in forward."""
        for i in self.changed(parameters):
            raise changed_unseen(parameters[i], "backward makes a tensor again from it")

    def _among(self, parameters: Sequence[Tensor]) -> list[int]:
        return [i for i, p in enumerate(parameters) if id(p) in self._changed]

    def _compared(self, before: bytes) -> frozenset[int]:
        with torch._C.DisableTorchFunction():
            layout = _layout_of(self._parameters)
            now = layout.read(self._parameters)
            if layout is self._layout and now == before:
                return frozenset()
            former = dict(zip(self._layout.at, _each(before), strict=True))
            found = [
                self._parameters[i]
                for i, one in zip(layout.at, _each(now), strict=True)
                if former.get(i, one) != one
            ]
            for p in found:
                note_changing(p)
            return frozenset(map(id, found))


class _Layout(NamedTuple):
    """Where parameters lie, and what is read of them.

    at     the indices of those that can be read; words: how many, of each of these
    table  int64 [3, len(at)]: addresses, bytes and words; where: its own address
    """

    addresses: list[int]
    sizes: list[int]
    at: list[int]
    words: list[int]
    table: np.ndarray[Any, Any]
    where: int

    def read(self, parameters: list[Tensor]) -> bytes:
        """Returns the fingerprints of those that can be read, in memory that is no tensor's."""
        kernels = ops.by_address(_EMPTY)
        if kernels is None:
            found = ops.fingerprint([parameters[i] for i in self.at], self.words).numpy()
        else:
            found = np.empty(len(self.at), np.int64)
            kernels.fingerprints(self.where, len(self.at), found.ctypes.data)
        return found.tobytes()


def _each(fingerprints: bytes) -> list[int]:
    return [int(one) for one in np.frombuffer(fingerprints, np.int64)]


_EMPTY = torch.empty(0, dtype=torch.float32, device="cpu")
_NOTHING = _Layout([], [], [], [], np.empty((3, 0), np.int64), 0)
_layouts: dict[tuple[int, ...], _Layout] = {}  # by `id`; what lies elsewhere is looked at again


def _layout_of(parameters: list[Tensor]) -> _Layout:
    try:
        addresses = [p.data_ptr() for p in parameters]
    except RuntimeError:  # one has no memory of its own
        addresses = [p.data_ptr() if is_touchable(p) else 0 for p in parameters]
    sizes, key = [p.nbytes for p in parameters], (*map(id, parameters),)
    known = _layouts.get(key, _NOTHING)
    if known.addresses == addresses and known.sizes == sizes:
        return known
    unique = {id(p): i for i, p in enumerate(parameters)}
    at = [i for i in unique.values() if _may_be_read(parameters[i])]
    words = [_words_of(parameters[i]) for i in at]
    there = [[addresses[i] for i in at], [sizes[i] for i in at], words]
    table = np.array(there, np.int64)
    made = _Layout(addresses, sizes, at, words, table, table.ctypes.data)
    while len(_layouts) >= _MOST_LAYOUTS:
        _layouts.pop(next(iter(_layouts)), None)
    _layouts[key] = made
    return made


def _may_be_read(p: Tensor) -> bool:
    """Returns whether a parameter has its memory, which FSDP frees, and the host need not wait."""
    if not p.is_cpu or not is_touchable(p) or not p.numel():
        return False
    return is_dense(p) and p.untyped_storage().nbytes() >= p.nbytes


def _words_of(p: Tensor) -> int:
    is_read_whole = p.nbytes <= _SMALL_MATRIX or is_small(p)
    return -(-p.nbytes // 8) if is_read_whole else _WORDS


def changed_unseen(p: Tensor, why: str) -> RestoreError:
    """Returns the error of a parameter that was changed through its data."""
    return RestoreError(
        f"a parameter of {tuple(p.shape)} was changed after forward through its data, and {why}. "
        "Change it before forward, or after backward. Or run this step again: from now on it is "
        "copied, or not read again."
    )
