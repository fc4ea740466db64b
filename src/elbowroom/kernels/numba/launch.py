"""Starting compiled loops without killing the process.

1. numba's threads follow torch.get_num_threads(): two pools that each take all cores are slower
   than one.
2. numba's `workqueue` layer (no OpenMP, no TBB) aborts when two Python threads launch at once: one
   lock then.
3. A forked child must not start a parallel loop (GNU OpenMP aborts it): there the serial twin runs.
4. numba's disk cache does not notice an edit of a function that is called: stale code is dropped.
5. `Tensor.numpy()` forbids for good that the tensor's storage is resized, and the tensor is its
   user's: an array is made over the address instead (`array`).
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor


def _drop_stale_machine_code() -> None:
    """Delete our cached machine code if any of our sources is newer.

    numba checks the file that a function is in, not those it calls into: after an edit of
    rounding.py (or a `git pull`) its neighbors would go on running the old code.
    """
    here = Path(__file__).parent
    newest = max(source.stat().st_mtime for source in here.glob("*.py"))
    for cached in (here / "__pycache__").glob("*.nb?"):
        with suppress(OSError):  # another process may be doing the same, or may not be allowed to
            if cached.stat().st_mtime < newest:
                cached.unlink()


_drop_stale_machine_code()

# Up to so many elements (two work items) a loop runs serially: threads cost about 12 us a start.
# Serial over threaded time of an op, median of 9 turns, seven ops, 2 threads on 2 shared cores:
# n = 11 and 2,048: 0.37 to 0.57; 32,768: 0.44 to 0.76; 65,536: 0.48 to 0.86; 131,072: 0.57 to 0.98;
# 524,288: 0.84 to 1.17. With more cores the last ones would favor threads sooner.
SERIAL = 65536

_lock = threading.Lock()
_forked = False
_safe_layer: bool | None = None  # None until numba has chosen its layer, at the first parallel loop


class _Thread(threading.local):
    """Number of threads that this thread has asked numba for: to ask at each call takes 20 us."""

    threads = 0


_pool = _Thread()


def _after_fork() -> None:
    global _forked, _lock
    _forked, _lock = True, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def parallel(loop: Callable[..., Any]) -> Any:
    """Compile `loop` (it uses prange) twice, parallel and serial, and choose at each call.

    What is returned has the serial one as `serial`, for compiled code that makes its arrays.
    """
    options: dict[str, Any] = {"error_model": "numpy", "cache": True, "nogil": True}
    threaded = numba.njit(parallel=True, **options)(loop)
    serial = numba.njit(parallel=False, **options)(_renamed(loop))

    def launch(*args: Any, size: int | None = None) -> None:
        """size: elements to work on, where the arguments are addresses and do not say it."""
        threads = torch.get_num_threads()
        if threads == 1 or _forked or (_is_small(args) if size is None else size <= SERIAL):
            serial(*args)
            return
        if threads != _pool.threads:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
            _pool.threads = threads
        if _safe_layer:
            threaded(*args)
        else:
            _launch_locked(threaded, args)

    launch.serial = serial  # type: ignore[attr-defined]
    return launch


def runs_serially(size: int) -> bool:
    """Returns whether a loop over `size` elements runs on this thread alone."""
    return size <= SERIAL or torch.get_num_threads() == 1 or _forked


def _is_small(args: tuple[Any, ...]) -> bool:
    """Returns whether no array among a loop's arguments is longer than SERIAL."""
    return not any(type(arg) is np.ndarray and arg.size > SERIAL for arg in args)


def _launch_locked(threaded: Callable[..., None], args: tuple[Any, ...]) -> None:
    global _safe_layer
    with _lock:
        threaded(*args)
        _safe_layer = numba.threading_layer() != "workqueue"


def _renamed(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A copy under another name: numba's disk cache is keyed by the name, not by the options."""
    import types

    copy = types.FunctionType(
        loop.__code__, loop.__globals__, loop.__name__ + "_serial", loop.__defaults__
    )
    copy.__qualname__ = loop.__qualname__ + "_serial"
    copy.__module__ = loop.__module__
    return copy


_TYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("float32", "bool", "uint8", "int8", "int16", "int32", "int64")
}


class _Memory(ctypes.c_char * sys.maxsize):  # type: ignore[misc]
    """All memory from an address on, of which an array takes what its shape says.

    The array keeps it alive, and it the tensor.
    """

    __slots__ = ("tensor",)


def array(x: Tensor, dtype: torch.dtype | None = None) -> np.ndarray[Any, Any]:
    """The memory of a tensor as an array of its own dtype, or of another that is as wide.

    Unlike `x.numpy()`, which marks the storage as not resizable for as long as it lives.
    """
    # By ctypes: to describe memory by `__array_interface__` takes 1.2 us, this 0.5.
    memory = _Memory.from_address(x.data_ptr())
    memory.tensor = x
    kind = _TYPES[dtype or x.dtype]
    if x.is_contiguous():
        return np.ndarray(tuple(x.shape), kind, memory)
    strides = tuple(kind.itemsize * step for step in x.stride())
    return np.ndarray(tuple(x.shape), kind, memory, 0, strides)


FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def float_kind(x: Tensor) -> int:
    """float32, bfloat16 or float16 as the number that `to_float` takes."""
    return FLOATS[x.dtype]


def words(x: Tensor) -> tuple[np.ndarray[Any, Any], int]:
    """A flat contiguous float tensor as integers of its own width, and its kind for `to_float`.

    Integers, because numpy has no bf16.
    """
    kind = float_kind(x)
    return array(x, torch.int32 if kind == 0 else torch.int16), kind


def patterns(x: Tensor) -> np.ndarray[Any, Any]:
    """A bf16 tensor as int16."""
    return array(x, torch.int16)


def split_seed(seed: int) -> tuple[np.uint32, np.uint32]:
    """The two halves of a 64-bit seed."""
    return np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF)
