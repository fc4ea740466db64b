"""Bytes and seconds of ops on fake tensors, which are not really run.

A fake tensor has a storage with a size, but no memory. The storage of each result is added to the
level when it is made, and subtracted when it is freed. Memory that an op allocates and frees inside
(a workspace, a reordered weight) is not seen. Seconds are those of the roofline model, one op after
another.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elbowroom.measure.clocks import levels_of
from elbowroom.measure.roofline import Speed

_CUDA_BLOCK = 512  # bytes: what its caching allocator rounds a request up to


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A clock for `StepRecorder`, whose time and memory are arithmetic.

    level    bytes of all storages that were born under this mode, and are alive
    seconds  of all ops under this mode
    """

    def __init__(self, speed: Speed, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._speed = speed
        self._block = _CUDA_BLOCK if device_type == "cuda" else 1
        self._alive: dict[int, int] = {}  # bytes by the address of the storage
        self._begun: list[tuple[int, float, bool]] = []  # first change, seconds, frees
        self._changes: list[int] = []  # the level after each
        self._read_s: list[float] = []
        self.level = 0
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        written = _tensors(out)
        for x in written:
            if x.layout is torch.strided:  # else its parts were counted as they were made
                self._count(x)
        passed = [*_tensors((args, kwargs)), *written]
        self.seconds += self._speed.seconds(func, args, {**kwargs, "out_val": out}, passed)
        return out

    def read(self) -> int:
        """Returns the number of a reading of the seconds so far, as the recorder's timer."""
        self._read_s.append(self.seconds)
        return len(self._read_s) - 1

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context that changes nothing: looking is no op."""
        return nullcontext()

    def seconds_at(self, readings: Sequence[int]) -> list[float]:
        """Returns what was read."""
        return [self._read_s[reading] for reading in readings]

    def start(self) -> None:
        """Begins a step: what is counted already was there before."""
        self._begun.clear()
        self._changes = [self.level]
        self.seconds = 0.0

    def begin(self, moment: int, *, frees: bool = False) -> None:
        """Begins a moment, as the clock of the recorder."""
        self._begun.append((len(self._changes), self.seconds, frees))

    @property
    def starts_s(self) -> list[float]:
        """The start of each moment, in seconds."""
        return [at_s for _, at_s, _ in self._begun]

    def levels(self) -> tuple[list[int], list[int]]:
        """The highest level in each moment, and that at its beginning, in bytes."""
        firsts = [first for first, *_ in self._begun]
        return levels_of(self._changes, firsts, [frees for *_, frees in self._begun])

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if nbytes and address not in self._alive:
            self._alive[address] = -(-nbytes // self._block) * self._block
            self._change(self._alive[address])
            weakref.finalize(storage, self._freed, address).atexit = False

    def _freed(self, address: int) -> None:
        self._change(-self._alive.pop(address))

    def _change(self, nbytes: int) -> None:
        self.level += nbytes
        self._changes.append(self.level)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, FakeTensor)]
