"""Beside torch.compile: inside a context, compiled code runs eagerly.

A compiled region hands what it saves to the hooks all at once, after its forward, without the ops
that saved it: nothing could be gained there. Worse, Dynamo would try to compile the hooks
themselves, and all that they call. So a context sets the stance "force_eager" while it is open, and
says so once when it sees a compiled module. Dynamo is asked only if somebody has imported it: the
import takes seconds. A fitted model that is a part of a larger compiled region is not covered.

The stance is the process's, and contexts need not close in the order in which they were opened, nor
be of one thread: the first sets it, and the last puts back what was there before.
"""

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_said = False


class _Thread(threading.local):
    """How many contexts are open on this thread."""

    depth = 0


_thread = _Thread()
_lock = threading.Lock()
_forcing = 0  # contexts of the process that are open
_stance: Any = None  # what the first of them has set


@contextmanager
def eagerly() -> Iterator[None]:
    """A context in which torch.compile'd code runs as it was written."""
    is_there = "torch._dynamo" in sys.modules
    _thread.depth += 1
    _force(is_there)
    try:
        yield
    finally:
        _force(-is_there)
        _thread.depth -= 1


def _force(more: int) -> None:
    """So many contexts more are open, or fewer."""
    global _forcing, _stance
    with _lock:
        if more > 0 and not _forcing:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
        _forcing += more
        if more < 0 and not _forcing:
            _stance.__exit__(None, None, None)
            _stance = None


def original(module: nn.Module) -> nn.Module:
    """The module that torch.compile was given, or the module itself."""
    # Asking for an attribute that is not there takes a microsecond, for each call of each module.
    if type(module._modules) is dict and "_orig_mod" not in module._modules:
        return module
    found = getattr(module, "_orig_mod", module)
    return found if isinstance(found, nn.Module) else module


def ran_eagerly() -> bool:
    """Whether a compiled module has been seen to run eagerly in this process."""
    return _said


def say_eager(module: nn.Module) -> None:
    """Warn, once, if a compiled module is called while a context is open."""
    global _said
    if _said or not _thread.depth or original(module) is module:
        return
    _said = True
    warnings.warn(
        f"{type(original(module)).__name__} is compiled, and runs eagerly inside an elbowroom "
        "context: saved tensors of a compiled region cannot be told apart. Fit or save without "
        "torch.compile to silence this.",
        stacklevel=3,
    )
