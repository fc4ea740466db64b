"""Beside torch.compile: inside a context, compiled code runs eagerly.

A compiled region hands what it saves to the hooks all at once, after its forward, without the ops
that saved it: nothing could be gained there. Worse, Dynamo would try to compile the hooks
themselves, and all that they call. So a context sets the stance "force_eager" while it is open, and
says so once when it sees a compiled module. Dynamo is asked only if somebody has imported it: the
import takes seconds. A fitted model that is a part of a larger compiled region is not covered.
"""

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_said = False


class _Thread(threading.local):
    """How many contexts are open on this thread."""

    depth = 0


_thread = _Thread()


@contextmanager
def eagerly() -> Iterator[None]:
    """A context in which torch.compile'd code runs as it was written."""
    _thread.depth += 1
    try:
        if "torch._dynamo" in sys.modules:
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
    finally:
        _thread.depth -= 1


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
