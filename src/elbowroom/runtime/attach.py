"""A context around every forward of a model, without changing the model.

Global module hooks look the called module up in a weak table: no attribute, no wrapper, no
subclass. So `state_dict`, `type(model)`, pickles and deep copies are those of the plain model (a
copy is not in the table), and detaching leaves nothing behind. The hooks exist only while some
model is attached.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from elbowroom.runtime import modules
from elbowroom.runtime.compiler import original, say_eager

Opener = Callable[[], AbstractContextManager[Any]]

_attached: "weakref.WeakKeyDictionary[nn.Module, Opener]" = weakref.WeakKeyDictionary()
_hooks: list[Any] = []
_lock = threading.Lock()


class _Thread(threading.local):
    """The contexts open on this thread, innermost last, each with the module that it belongs to."""

    def __init__(self) -> None:
        self.open: list[tuple[nn.Module, AbstractContextManager[Any]]] = []


_thread = _Thread()


def attach(model: nn.Module, opener: Opener) -> None:
    """From now on every call of `model` that records gradients runs inside `opener()`."""
    with _lock:
        _attached[model] = opener
        if not _hooks:
            modules.watch()
            _hooks.append(register_module_forward_pre_hook(_enter))
            _hooks.append(register_module_forward_hook(_leave, always_call=True))


def detach(model: nn.Module) -> Opener | None:
    """Undo `attach`. Returns the opener, if there was one."""
    with _lock:
        found = _attached.pop(model, None)
        if not _attached and _hooks:
            modules.unwatch()
            while _hooks:
                _hooks.pop().remove()
        return found


def opener_of(model: nn.Module) -> Opener | None:
    """What `attach` was given for this model, if anything."""
    return _attached.get(model)


def _enter(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():  # inside somebody's larger compiled region: not covered
        return
    model = original(module)
    opener = _attached.get(module) or _attached.get(model)
    if opener is None or not torch.is_grad_enabled():
        return
    outer = _thread.open[-1][0] if _thread.open else None
    if outer is not None and outer is not module and original(outer) is model:
        return  # the compiled wrapper of this model has opened it already
    context = opener()
    context.__enter__()
    _thread.open.append((module, context))
    say_eager(module)


def _leave(module: nn.Module, args: Any, out: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if _thread.open and _thread.open[-1][0] is module:
        _thread.open.pop()[1].__exit__(None, None, None)
