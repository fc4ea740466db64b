"""Names of the modules that run, relative to the outermost one that was called, for the ledger.

They come from global module hooks, so that no module is changed. The hooks are installed while any
context is open or any model is fitted. Installations are counted, because a context that closes
inside of a hook must not change the table of hooks that PyTorch iterates over.
"""

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from elbowroom.plan.site import prefix
from elbowroom.runtime.compiler import original, say_eager

Calls = weakref.WeakKeyDictionary[nn.Module, int]  # how often each has been called
Counts = tuple[tuple[weakref.ref[nn.Module], int], ...]  # the same, as it was
_CALL_IMPL = nn.Module._call_impl.__code__
_names: "weakref.WeakKeyDictionary[nn.Module, dict[int, str]]" = weakref.WeakKeyDictionary()
_hooks: list[Any] = []
_users = 0
_by_calls = 0  # how many of them see calls themselves
_lock = threading.Lock()


class _Thread(threading.local):
    """The modules whose forward runs on this thread, innermost last."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.stack: tuple[str, ...] | None = None  # their names, until these are others
        self.joined = 0  # number of the first ones, which were called before watching began
        self.outside = 0  # modules that were called around these
        self.names: dict[int, str] = {}  # by id, those in the first of them
        self.calls: Calls | None = None  # of outermost modules, so far
        self.prefix = ""  # of all names in the first of them, by its calls
        self.title = ""  # of the outermost, where several models share a step
        self.sees_calls = 0  # who calls `entered`: the hooks are for other threads


_thread = _Thread()


def watch() -> None:
    """Keeps track of the module that runs, until `unwatch` was called as often as `watch`."""
    global _users
    with _lock:
        _users += 1
        _install()


def unwatch() -> None:
    """Ends one `watch`."""
    global _users
    with _lock:
        _users -= 1
        _install()
    if _users == 0:
        _thread.running.clear()
        _thread.joined, _thread.stack = 0, None


def _install() -> None:
    """Installs the hooks if they are needed, or removes them."""
    if _users > _by_calls and not _hooks:
        _hooks.append(register_module_forward_pre_hook(_hook_enter))
        _hooks.append(register_module_forward_hook(_hook_leave, always_call=True))
    while _users <= _by_calls and _hooks:
        _hooks.pop().remove()


@contextmanager
def seen_by_calls() -> Iterator[None]:
    """Lets `entered`, around each call, stand in for the hooks of one `watch` of this thread.

    Hooks are a part of what torch.compile compiles, and it warns of them.
    """
    global _by_calls
    _thread.sees_calls += 1  # contexts need not close in the order in which they were opened
    with _lock:
        _by_calls += 1
        _install()
    try:
        yield
    finally:
        with _lock:
            _by_calls -= 1
            _install()
        _thread.sees_calls -= 1


@contextmanager
def entered(module: nn.Module) -> Iterator[None]:
    """Marks this module as running inside this context; for `seen_by_calls`."""
    _enter(module)
    try:
        yield
    finally:
        _leave(module)


@contextmanager
def counting(calls: Calls) -> Iterator[None]:
    """Counts outermost calls on this thread, so that names tell the first from the second."""
    before = _thread.calls, _thread.prefix
    _thread.calls, _thread.prefix, _thread.stack = calls, "", None
    try:
        yield
    finally:
        _thread.calls, _thread.prefix = before
        _thread.stack = None


@contextmanager
def titled(title: str) -> Iterator[None]:
    """Adds a title to the names in the outermost module that is called, to tell models apart."""
    before, _thread.title = _thread.title, title
    try:
        yield
    finally:
        _thread.title = before


def on_stack() -> list[nn.Module]:
    """Returns the modules whose forward runs on this thread, as Python's stack has them."""
    running: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL_IMPL:
            running.append(frame.f_locals["self"])
        frame = frame.f_back
    running.reverse()
    return running


@contextmanager
def cut_short() -> Iterator[None]:
    """Context around calls that may be ended in their midst: then no hook tells that they ended.

    Hooks are called where an Exception is raised, and not for any other BaseException.
    """
    running, before = _thread.running, len(_thread.running)
    try:
        yield
    finally:
        del running[before:]
        _thread.stack = None


def join(calls: Calls, outside: int) -> None:
    """Begins in the middle of a forward, whose modules are found on Python's stack.

    outside: how many of them, the outermost, are wrappers around the model that a context is for
    """
    running = on_stack()[outside:]
    _thread.running[:] = running
    _thread.joined, _thread.outside, _thread.stack = len(running), outside, None
    if running:
        _thread.names = _names_in(running[0])
        calls[running[0]] = calls.get(running[0], 0) + 1
        _thread.prefix = prefix(calls[running[0]]) + _thread.title


def _running() -> list[nn.Module]:
    """Returns the running modules; no hook reports the end of a module that was joined."""
    if _thread.joined:
        there, joined = on_stack()[_thread.outside :], 0
        for mine, module in zip(_thread.running[: _thread.joined], there, strict=False):
            if mine is not module:
                break
            joined += 1
        if joined < _thread.joined:
            del _thread.running[joined : _thread.joined]
            _thread.joined, _thread.stack = joined, None
    return _thread.running


def current() -> str:
    """The innermost module, "layer1.0.conv2"; "" outside.

    The class of one that the outermost does not contain.
    """
    running = _running()
    if not running:
        return ""
    module = running[-1]
    return _thread.prefix + (_thread.names.get(id(module)) or type(module).__name__)


def outermost() -> nn.Module | None:
    """Returns the outermost module that runs on this thread, or None."""
    running = _running()
    return running[0] if running else None


def stack() -> tuple[str, ...]:
    """The names of the modules that run on this thread, outermost first, below the first of them.

    Without those that the first does not contain.
    """
    running = _running()
    if not running:
        return ()
    found = _thread.stack
    if found is None:  # a profiled step asks once or twice for each op
        names, prefix = _thread.names, _thread.prefix
        found = tuple(prefix + name for one in running[1:] if (name := names.get(id(one))))
        _thread.stack = found
    return found


def name_of(module: nn.Module) -> str:
    """The name of a module that is about to be called; "" for one without a parent."""
    if not _running():
        return ""  # the outermost
    name = _thread.names.get(id(module))
    return _thread.prefix + name if name else ""


SHARDED = "its parameters are sharded, and there for one forward only"


def is_sharded(module: nn.Module) -> bool:
    """Returns whether FSDP2 gathers parameters for the call of this module alone.

    `fully_shard` frees them after forward, and puts shards in their place.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not kind.__subclasses__():  # `fully_shard` makes one for each class
        return False
    return any(isinstance(one, kind) for one in (*_thread.running, *module.modules()))


def _hook_enter(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and not _thread.sees_calls:
        _enter(module)


def _hook_leave(module: nn.Module, args: Any, out: Any) -> None:
    if not torch.compiler.is_compiling() and not _thread.sees_calls:
        _leave(module)


def _enter(module: nn.Module) -> None:
    if "_orig_mod" in module._modules:  # torch.compile's wrapper around a module
        say_eager(module)
    if not _running():
        _thread.names = _names_in(module)
        _thread.prefix = _counted(module)
    _thread.running.append(module)
    _thread.stack = None


def _counted(module: nn.Module) -> str:
    """Returns the prefix of this call."""
    calls = _thread.calls
    if calls is None:
        return ""
    calls[module] = calls.get(module, 0) + 1
    return prefix(calls[module]) + _thread.title


def _leave(module: nn.Module) -> None:
    running, _thread.stack = _thread.running, None
    if running and running[-1] is module:
        running.pop()
    # A module that raised may still lie above its caller: cut down to the one that ends.
    elif any(other is module for other in running):
        while running.pop() is not module:
            pass


def _names_in(root: nn.Module) -> dict[int, str]:
    names = _names.get(root)
    if names is None:
        named = original(root).named_modules()
        names = _names[root] = {id(module): name for name, module in named}
    return names
