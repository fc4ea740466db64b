"""Opens a context around every forward of a model, without changing the model.

Its calls are seen by `calls.py`, and the called one is looked up in a weak table: no attribute, no
wrapper, no subclass. So `state_dict`, `type(model)`, pickles and deep copies are those of the plain
model (a copy is not in the table), and detaching leaves nothing behind.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from elbowroom.errors import BudgetTooSmall
from elbowroom.runtime import calls
from elbowroom.runtime.compiler import original, say_eager
from elbowroom.runtime.transforms import is_transformed, say_transformed

Given = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call


class Around(Protocol):
    """Interface of what runs the forwards of a model."""

    def run(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        """Runs forward(), which calls the model with these arguments, in a context.

        It may be run more than once.
        """
        ...

    def passes(self, forward: Callable[[], Any]) -> Any:
        """Runs forward(), which records no gradients, as it is."""
        ...


Meet = Callable[[nn.Module], bool]

_attached: "weakref.WeakKeyDictionary[nn.Module, Around]" = weakref.WeakKeyDictionary()
_ids: set[int] = set()  # of the attached
_mortal: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # models with a finalizer
_meet: Meet | None = None
_lock = threading.RLock()  # a model may be freed, and removed, at any line of this module


class _Thread(threading.local):
    """Attached modules whose forward runs on this thread, innermost last; and those met."""

    def __init__(self) -> None:
        self.open: list[nn.Module] = []


_thread = _Thread()


def attach(model: nn.Module, around: Around) -> None:
    """Makes every call of `model` that records gradients go through `around.run` from now on."""
    with _lock:
        if model not in _mortal:  # before `_attached`: younger finalizers are called first
            _mortal.add(model)
            weakref.finalize(model, _forget).atexit = False
        _attached[model] = around
        _watch()


def detach(model: nn.Module) -> Around | None:
    """Undo `attach`. Returns what it was given, if anything."""
    with _lock:
        found = _attached.pop(model, None)
        _watch()
        return found


def _forget() -> None:
    """Called when an attached model was freed."""
    with _lock:
        _watch()


def discover(meet: Meet | None) -> None:
    """Sets `meet`, called with outermost modules before they run with gradients; None ends that.

    Those that are attached already are not shown, nor what is called in backward or on a thread of
    its own. `meet` may attach a module: then this very call goes through it. It returns whether
    what is called inside is part of it; else that is met in its turn. Inside transforms of
    torch.func and torch.jit.trace it is shown modules, too, and what it does there has no effect.
    """
    global _meet
    with _lock:
        _meet = meet
        _watch()


def _watch() -> None:
    models = list(_attached)  # alive until the end: otherwise freed modules would be watched
    _ids.clear()
    _ids.update(map(id, models))
    classes = _classes_of(models)
    if _meet is not None or any(map(calls.calls_by_itself, classes)):
        calls.watch_known(_around, _is_attached, ())
        calls.watch(_around, _is_attached if _meet is None else None)
    else:
        calls.watch(None)
        calls.watch_known(_around, _is_attached, classes)


def _classes_of(modules: Iterable[nn.Module]) -> set[type[nn.Module]]:
    """Returns their classes, and what lazy ones become."""
    classes = {type(module) for module in modules}
    return classes | {
        later for cls in classes if (later := getattr(cls, "cls_to_become", None)) is not None
    }


def _is_attached(module: nn.Module) -> bool:
    """Returns whether the module, or what it was compiled from, may be attached."""
    return id(module) in _ids or "_orig_mod" in module._modules


def opener_of(model: nn.Module) -> Around | None:
    """Returns what `attach` was given for this model; None if it is not attached."""
    return _attached.get(model)


def called() -> nn.Module | None:
    """Returns the attached module whose call is the innermost one on this thread.

    It is the one that was called: torch.compile's wrapper rather than the model inside.
    """
    return _thread.open[-1] if _thread.open else None


def is_within() -> bool:
    """Returns whether the attached module that is called runs inside a call of another one."""
    return len(_thread.open) > 1


def attached() -> list[tuple[nn.Module, Around]]:
    """All attached models."""
    return list(_attached.items())


def _around(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    around = _around_of(module)
    if not torch.is_grad_enabled():
        if around is not None:
            return around.passes(lambda: call(*args, **kwargs))
        return call(*args, **kwargs)
    if is_transformed():
        if around is not None:
            say_transformed()
        elif _meet is not None and _is_outermost():
            _meet(module)
        return call(*args, **kwargs)
    if around is None:
        if _meet is None or not _is_outermost() or not _meet(module):
            return call(*args, **kwargs)
        around = _around_of(module)
    outer = _thread.open[-1] if _thread.open else None
    if outer is not None and outer is not module and original(outer) is original(module):
        return call(*args, **kwargs)  # the compiled wrapper of this model has opened it already
    _thread.open.append(module)
    try:
        if around is None:
            return call(*args, **kwargs)
        forward = partial(_forward, module, call, args, kwargs)
        return around.run(original(module), forward, (args, kwargs))
    except BudgetTooSmall as error:
        # Its frames have results of the step among their variables. Who handles it may train
        # another model meanwhile, beside these.
        error.__context__ = error.__cause__ = None
        raise error.with_traceback(None)  # noqa: B904
    finally:
        _thread.open.pop()


def _around_of(module: nn.Module) -> Around | None:
    return _attached.get(module) or _attached.get(original(module))


def _is_outermost() -> bool:
    """Returns whether a call is neither inside another module nor in a backward.

    In backward the user's checkpointing would run it again.
    """
    return (
        not _thread.open
        and threading.current_thread() is threading.main_thread()
        and torch._C._current_graph_task_id() == -1
    )


def _forward(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    say_eager(module)
    return call(*args, **kwargs)
