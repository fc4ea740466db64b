"""Compiling the CPU kernels now, and not while somebody's first step waits for them.

numba compiles a kernel at its first call for each kind of arguments, a few seconds each, and keeps
the machine code on disk. What is called here: every registered codec with its default settings,
the step of optimizers, dropout, both widths of floats, tensors short enough for the serial loops
and long enough for the threaded.
"""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import torch

from elbowroom.codecs import Facts, codec, codecs
from elbowroom.errors import UnsupportedTensor
from elbowroom.nn import Dropout
from elbowroom.optim import AdamW

_SIZES = (300, 70_000)  # elements: see SERIAL in kernels/numba/launch.py
_FACTS = (Facts(), Facts(has_zeros=True), Facts(smallest=0, largest=255), Facts(value=1.0))
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
_OPTIMIZER = ""  # where a job has the id of a codec; dropout with it

Job = tuple[str, torch.dtype]


def compile_ahead(processes: int | None = None) -> int:
    """Compile what is not compiled yet, in so many processes (None: one a core, at most 8).

    Returns how many jobs there were.
    """
    jobs = list(_jobs())
    spawning = multiprocessing.get_context("spawn")
    processes = processes or min(os.cpu_count() or 1, 8)
    with ProcessPoolExecutor(processes, mp_context=spawning) as pool:
        list(pool.map(_call, jobs))
    return len(jobs)


def _jobs() -> Iterator[Job]:
    """The longest first."""
    yield _OPTIMIZER, torch.float32
    for id in codecs():
        for dtype in _DTYPES:
            if dtype in codec(id).dtypes:
                yield id, dtype
    yield _OPTIMIZER, torch.bfloat16


def _call(job: Job) -> None:
    id, dtype = job
    for size in _SIZES:
        if id == _OPTIMIZER:
            _step(size, dtype)
            Dropout()(torch.randn(size, dtype=dtype))
        else:
            _code(id, size, dtype)


def _step(size: int, dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.randn(max(size // 64, 65), 64, dtype=dtype))
    parameter.grad = torch.randn_like(parameter)
    AdamW([parameter]).step()


def _code(id: str, size: int, dtype: torch.dtype) -> None:
    coder = codec(id)
    x = (torch.randn(2, 1, size // 4, 2) * 9).abs().to(dtype)
    for facts in _FACTS:
        if _is_true(facts, x):
            with suppress(UnsupportedTensor):  # a codec for masks, say
                coder.encode(x, 1, facts).decode()


def _is_true(facts: Facts, x: torch.Tensor) -> bool:
    if facts.value is not None:
        return x.dtype is torch.bool
    return (facts.largest is None) == x.dtype.is_floating_point
