"""A context around every forward of a model, without changing the model.

Calls of modules are seen by `calls.py`, and the called one looked up in a weak table: no attribute,
no wrapper, no subclass. So `state_dict`, `type(model)`, pickles and deep copies are those of the
plain model (a copy is not in the table), and detaching leaves nothing behind.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from elbowroom.runtime import calls
from elbowroom.runtime.compiler import original, say_eager


class Around(Protocol):
    """What runs around a forward of the model."""

    def __call__(self) -> AbstractContextManager[Any]:
        """A context for the forward that begins."""
        ...

    def run(self, model: nn.Module, forward: Callable[[], Any]) -> Any:
        """forward(), inside the context; it may be run more than once."""
        ...


_attached: "weakref.WeakKeyDictionary[nn.Module, Around]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Thread(threading.local):
    """The attached modules whose forward runs on this thread, innermost last."""

    def __init__(self) -> None:
        self.open: list[nn.Module] = []


_thread = _Thread()


def attach(model: nn.Module, around: Around) -> None:
    """From now on every call of `model` that records gradients goes through `around.run`."""
    with _lock:
        if not _attached:
            calls.watch(_around)
        _attached[model] = around


def detach(model: nn.Module) -> Around | None:
    """Undo `attach`. Returns what it was given, if anything."""
    with _lock:
        found = _attached.pop(model, None)
        if not _attached:
            calls.watch(None)
        return found


def opener_of(model: nn.Module) -> Around | None:
    """What `attach` was given for this model, if anything."""
    return _attached.get(model)


def _around(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    model = original(module)
    around = _attached.get(module) or _attached.get(model)
    if around is None or not torch.is_grad_enabled():
        return call(*args, **kwargs)
    outer = _thread.open[-1] if _thread.open else None
    if outer is not None and outer is not module and original(outer) is model:
        return call(*args, **kwargs)  # the compiled wrapper of this model has opened it already
    _thread.open.append(module)
    try:
        return around.run(model, lambda: _forward(module, call, args, kwargs))
    finally:
        _thread.open.pop()


def _forward(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    say_eager(module)
    return call(*args, **kwargs)
