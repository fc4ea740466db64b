"""Compiles kernels in advance, so that the first training step need not wait for them.

numba compiles a kernel at its first call with each kind of arguments, in a few seconds, and keeps
the machine code on disk. These are compiled: every registered codec with its default settings, the
step of optimizers, dropout, and what the backward of a small network with norms, convolutions,
attention and activations runs on codes, for all dtypes, with tensors that are small enough for the
serial loops and large enough for the threaded ones. Where there is a GPU, Triton compiles each
setting that a plan may use, which takes it about a second each, and keeps them on disk, too.
"""

import logging
import multiprocessing
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import torch
from torch import nn

import elbowroom as er
from elbowroom.codecs import BitMask, Codec, Facts, Narrow, codec, codecs
from elbowroom.codecs.compact import Coder
from elbowroom.codecs.names import setting_name, setting_named
from elbowroom.errors import UnsupportedTensor
from elbowroom.nn import Dropout
from elbowroom.optim import AdamW
from elbowroom.plan.registered import all_settings

_SIZES = (300, 70_000)  # elements: see SERIAL in kernels/numba/launch.py
_ON_GPU = 20 * 4096  # elements: many sizes are multiples of 16, for which there is a kernel
_FACTS = (Facts(), Facts(has_zeros=True), Facts(smallest=0, largest=255), Facts(value=1.0))
_FOR_SMALL = {"fdsr": {"min_numel": 0}}  # its default stores small tensors raw
_FLOATS = (torch.float32, torch.bfloat16)
_DTYPES = (*_FLOATS, torch.int64, torch.bool)
_OPTIMIZER = ""  # in place of the id of a codec: an optimizer step, and dropout
_TRAINING = " "  # likewise: a training step

Job = tuple[str, torch.dtype, tuple[int, ...]]  # codec, dtype, sizes


def compile_ahead(threaded: Collection[torch.dtype] = _DTYPES) -> None:
    """Compiles what is not compiled yet, in one process per core, at most 8.

    threaded: the dtypes for which the threaded loops are compiled, too
    """
    spawning = multiprocessing.get_context("spawn")
    processes = min(os.cpu_count() or 1, 8)
    with ProcessPoolExecutor(processes, mp_context=spawning, initializer=_be_quiet) as pool:
        list(pool.map(_call, _jobs(threaded)))
        list(pool.map(_call_on_gpu, _jobs_on_gpu()))


def _be_quiet() -> None:
    """Silences the log of compiled kernels, which the user of this command expects anyway."""
    logging.getLogger("elbowroom.kernels").setLevel(logging.ERROR)


def _jobs(threaded: Collection[torch.dtype] = _DTYPES) -> Iterator[Job]:
    """Yields the jobs, the longest first.

    Jobs of one codec share most of their functions. They are far apart, so that two processes do
    not compile the same functions at the same time.
    """
    for dtype in _DTYPES:
        for id in ("fdsr", _OPTIMIZER, _TRAINING, *(id for id in codecs() if id != "fdsr")):
            if dtype in (_FLOATS if id in (_OPTIMIZER, _TRAINING) else codec(id).dtypes):
                yield id, dtype, _SIZES if dtype in threaded else _SIZES[:1]


def _call(job: Job) -> None:
    id, dtype, sizes = job
    for size in sizes:
        if id == _OPTIMIZER:
            _step(size, dtype)
            Dropout()(torch.randn(size, dtype=dtype))
        elif id == _TRAINING:
            _train(size, dtype)
        else:
            _code(id, size, dtype)


def _step(size: int, dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.randn(max(size // 64, 65), 64, dtype=dtype))
    parameter.grad = torch.randn_like(parameter)
    AdamW([parameter]).step()


class _Attention(nn.Module):
    """Causal attention of four heads over all rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, len(x), 4, 16).transpose(1, 2)
        k, v = q.flip(2), q * 2
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(x.shape)


def _train(size: int, dtype: torch.dtype) -> None:
    """Runs two steps, because the second one replays the first with other kernels."""
    rows = (
        nn.Linear(64, 64),
        _Attention(),
        nn.LayerNorm(64),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.RMSNorm(64),
    )
    maps = (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    model = nn.Sequential(*rows, nn.Unflatten(1, (4, 4, 4)), *maps).to(dtype)
    x = torch.randn(max(size // 64, 2), 64, dtype=dtype)
    for _ in range(2):
        with er.saving("dither", min_nbytes=0):
            loss = model(x).square().mean()
        loss.backward()


def _jobs_on_gpu() -> list[tuple[str, torch.dtype]]:
    """Returns the name of each setting that a plan may use, with each dtype, if there is a GPU."""
    if not torch.cuda.is_available():
        return []
    settings = (BitMask(), Narrow(), *all_settings())
    return [
        (setting_name(one), dtype) for one in settings for dtype in _DTYPES if dtype in one.dtypes
    ]


def _call_on_gpu(job: tuple[str, torch.dtype]) -> None:
    name, dtype = job
    _encode(setting_named(name), _ON_GPU, dtype, "cuda")


def _code(id: str, size: int, dtype: torch.dtype) -> None:
    _encode(codec(id, **_FOR_SMALL.get(id, {})), size, dtype)


def _encode(coder: Codec, size: int, dtype: torch.dtype, device: str = "cpu") -> None:
    x = (torch.randn(1, 2, size // 20, 10, device=device) * 9).abs().to(dtype)
    for facts in _FACTS:
        if _is_true(facts, x):
            with suppress(UnsupportedTensor):  # a codec for masks, say
                coder.encode(x, 1, facts).decode()
                if size == min(_SIZES) and (bound := Coder.of(coder, x, facts)) is not None:
                    bound.encode(x, 1).decode()  # as a followed step does


def _is_true(facts: Facts, x: torch.Tensor) -> bool:
    if facts.value is not None:
        return x.dtype is torch.bool
    return (facts.largest is None) == x.dtype.is_floating_point
