"""Saved-tensor hooks that step aside where torch.func takes gradients.

`torch.func.grad`, `vjp`, `jacrev` and `hessian` end in an error wherever hooks are in force, even
hooks around a whole forward in which one line calls them. But what they save, plain autograd holds
just as well. So hooks of ours are taken off while such a function runs, and put back as it ends.
Hooks of others stay: with these, it ends in the error as it does without elbowroom.

torch switches hooks off by one context manager. As long as hooks of ours are open on any thread,
another one stands in its place that takes ours off first.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_lock = threading.RLock()
_open = 0  # threads with pairs of ours
_plain: Any = None  # what stood in the place of ours, as ours was put there last


class _Thread(threading.local):
    """The pack functions of our pairs of hooks on this thread, innermost last."""

    def __init__(self) -> None:
        self.packs: list[Callable[[Any], Any]] = []


_thread = _Thread()


class OwnHooks:
    """A pair of saved-tensor hooks that is off while torch.func takes gradients."""

    __slots__ = ("_pack", "_unpack")

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._pack, self._unpack = pack, unpack

    def __enter__(self) -> None:
        _push_hooks(self._pack, self._unpack)  # first: it raises inside of torch.func
        if not _thread.packs:
            _count(1)
        _thread.packs += (self._pack,)  # each call here is one more in each second run

    def __exit__(self, *_: object) -> None:
        _pop_hooks()
        del _thread.packs[-1]
        if not _thread.packs:
            _count(-1)


def _count(more: int) -> None:
    """Changes the number of threads; the first takes torch's place, the last gives it back."""
    global _open, _plain
    with _lock:
        _open += more
        now = graph.disable_saved_tensors_hooks
        if _open and now is not _disabled:
            _plain = now
            graph.disable_saved_tensors_hooks = _disabled  # type: ignore[assignment]
        elif not _open and now is _disabled:
            graph.disable_saved_tensors_hooks = _plain


def _disabled(error_message: str) -> AbstractContextManager[None]:
    """Returns torch's context without hooks. Ours are off in it; those of others raise."""
    plain = _plain
    return _without_ours(plain, error_message) if _thread.packs else plain(error_message)


@contextmanager
def _without_ours(plain: Any, error_message: str) -> Iterator[None]:
    taken = []
    while (pair := _top_hooks(True)) is not None:
        if pair[0] not in _thread.packs:
            break
        taken.append(pair)
        _pop_hooks()
    try:
        with plain(error_message):
            yield
    finally:
        for pack, unpack in reversed(taken):
            _push_hooks(pack, unpack)
