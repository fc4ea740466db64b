"""Calls of modules, seen whole: to open a context around one, to record it, to run it again.

PyTorch's global module hooks are not shown keyword arguments, and cannot change how a call runs. So
while somebody wants to, and only then, `__call__` itself is another function (as under torch.fx's
tracer); no module is changed, and nothing is left behind.

    nn.Module.__call__     where any module may be meant: it costs about 1 us for each of them
    that of some classes   where modules are known (`known_calls.py`): others cost nothing
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_plain_call = nn.Module.__call__
_dynamo_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
_everywhere: Around | None = None
_of: Callable[[nn.Module], bool] | None = None
_users = 0
_lock = threading.RLock()  # see attach.py


class _Thread(threading.local):
    def __init__(self) -> None:
        self.around: list[Around] = []


_thread = _Thread()


def watch(around: Around | None, of: Callable[[nn.Module], bool] | None = None) -> None:
    """Makes calls of modules on all threads go through `around` from now on. None ends that.

    of: only the calls of modules for which it is true
    """
    global _everywhere, _of
    if (around is None) != (_everywhere is None):
        (_uninstall if around is None else _install)()
    _everywhere, _of = around, of


@contextmanager
def intercepted(around: Around) -> Iterator[None]:
    """Makes calls of modules on this thread go through around(module, call, args, kwargs).

    `call` is the plain call, without the module. Of several contexts, only the innermost sees it.
    """
    _install()
    _thread.around.append(around)
    try:
        yield
    finally:
        _thread.around.remove(around)
        _uninstall()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Suspends `intercepted` on this thread: inside, modules are called as if nobody looked."""
    held, _thread.around = _thread.around, []
    try:
        yield
    finally:
        _thread.around = held


def _install() -> None:
    global _users
    with _lock:
        _users += 1
        nn.Module.__call__ = _call  # type: ignore[method-assign]
    pass_through()


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users and nn.Module.__call__ is _call:  # else somebody has wrapped it since
            nn.Module.__call__ = _plain_call  # type: ignore[method-assign]


def pass_through() -> None:
    """Let Dynamo, if it is there, look through our functions as it looks through torch.nn's own.

    After a graph break each call of a module would be compiled by itself else, and after eight
    modules none any more.
    """
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        for function in OURS:
            skip(function.__code__)


def dynamo_looks() -> bool:
    """Returns whether a compiled call is running, so that what is called next is compiled, too."""
    return _dynamo_callback() not in (None, False)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Asked first, and so that it costs little: Dynamo would guard on whatever else is asked, on the
    # identity of each module above all.
    if torch.compiler.is_dynamo_compiling():  # inside somebody's compiled region: not covered
        return _plain_call(module, *args, **kwargs)
    if _of is not None and not (_thread.around or _of(module)):
        return _plain_call(module, *args, **kwargs)  # most calls, so little else is asked
    if torch.compiler.is_compiling() or dynamo_looks():  # after a graph break, the same
        return _plain_call(module, *args, **kwargs)

    def inner(*args: Any, **kwargs: Any) -> Any:
        return _plain_call(module, *args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        around = _thread.around[-1] if _thread.around else None
        return inner(*args, **kwargs) if around is None else around(module, inner, args, kwargs)

    everywhere = _everywhere
    return call(*args, **kwargs) if everywhere is None else everywhere(module, call, args, kwargs)


OURS: list[Callable[..., Any]] = [_call]  # what takes the place of a `__call__`
