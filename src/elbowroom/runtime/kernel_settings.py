"""Settings of torch that are no arguments of an op, and on which its bits depend.

    with torch.backends.mkldnn.flags(enabled=False):    # around forward alone
        y = model(x)

What backward runs again, an op or a module, must run as it did in forward. So the settings are
noted when a tensor is dropped, and hold again while it is made.

    OF_OPS      those that ops of recipes depend on, as functions that read them
    OF_MODULES  those and others, that modules depend on
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import call
from typing import Any, TypeAlias

import torch

_C: Any = torch._C
_Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads and sets it


def _flag(read: str, write: str) -> list[_Setting]:
    """Returns a setting by its functions in torch; none if this version has none."""
    return [(getattr(_C, read), getattr(_C, write))] if hasattr(_C, read) else []


def _precision(backend: str, op: str) -> list[_Setting]:
    if not hasattr(_C, "_get_fp32_precision_getter"):
        return []
    read, write = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
    return [(partial(read, backend, op), partial(write, backend, op))]


_ops = [*_flag("_get_mkldnn_enabled", "_set_mkldnn_enabled"), *_precision("mkldnn", "matmul")]
_modules = [
    *_ops,
    *_precision("mkldnn", "conv"),
    *_precision("mkldnn", "rnn"),
    *_precision("cuda", "matmul"),
    *_precision("cuda", "conv"),
    *_flag("_get_cudnn_enabled", "_set_cudnn_enabled"),
    *_flag("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    *_flag("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    *_flag("_get_math_sdp_enabled", "_set_sdp_use_math"),
    *_flag("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
]
OF_OPS = tuple(read for read, _ in _ops)
OF_MODULES = tuple(read for read, _ in _modules)


def settings_of_ops() -> tuple[Any, ...]:
    """Returns the settings as they are now."""
    return tuple(map(call, OF_OPS))


def set_kernels(values: Sequence[Any]) -> None:
    """Makes settings these: those of `OF_OPS`, or of `OF_MODULES`."""
    for (read, write), value in zip(_modules, values, strict=False):
        if read() != value:
            write(value)


@contextmanager
def kernels_as(values: Sequence[Any]) -> Iterator[None]:
    """Context in which settings are these: those of `OF_OPS`, or of `OF_MODULES`."""
    before = tuple(map(call, OF_MODULES))
    set_kernels(values)
    try:
        yield
    finally:
        set_kernels(before)
