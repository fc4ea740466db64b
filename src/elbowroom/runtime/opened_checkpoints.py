"""The user's own checkpoints (`torch.utils.checkpoint`), opened: a plan decides on what is inside.

What a checkpoint's second run saves is held whole until the piece's backward is over, and is seen
by no hook of ours. That run may be the highest moment of a step, which no plan can lower. Opened,
a piece runs as any other part of forward, and plans hold, encode, rebuild and recompute its tensors
as if the program had no checkpoint; the bits are the same, because a second run gives the same.

    context.has_checkpoints    a forward of `er.fit` has come to one
    context.opens_checkpoints  they are opened, in every forward

Those with use_reentrant=True or with a `context_fn` stay as they are, and so does whatever runs on
other threads, or outside of the model.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch.utils.checkpoint

from elbowroom.runtime.context import Context

# What gives the context of a piece, a generator; in torch 2.14 the public one calls the other.
_NAMES = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
_NOTHING = torch.utils.checkpoint.noop_context_fn


class _Thread(threading.local):
    context: Context | None = None  # of the forward that runs


_thread = _Thread()
_lock = threading.Lock()
_is_watching = False


@contextmanager
def noticing(context: Context) -> Iterator[None]:
    """Context around a forward: checkpoints are noted, and opened where `context` says so."""
    _watch()
    before, _thread.context = _thread.context, context
    try:
        yield
    finally:
        _thread.context = before


def as_now() -> Callable[[], AbstractContextManager[None]]:
    """Returns what opens, in backward, the checkpoints that are opened as it is called."""
    context = _thread.context
    is_open = context is not None and context.opens_checkpoints
    return partial(noticing, context) if is_open and context is not None else nullcontext


def _watch() -> None:
    """Makes torch's checkpoints ask here, once a process."""
    global _is_watching
    with _lock:
        if _is_watching:
            return
        _is_watching = True
        name = next((name for name in _NAMES if hasattr(torch.utils.checkpoint, name)), None)
        if name is not None:  # else of another version of torch: they are left alone
            original = getattr(torch.utils.checkpoint, name)
            setattr(torch.utils.checkpoint, name, _asking(original))


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(original)

    def opened_or_not(*args: Any, **kwargs: Any) -> Iterator[None]:
        context = _thread.context
        if context is not None:
            given = parameters.bind(*args, **kwargs).arguments
            is_plain = given.get("context_fn", _NOTHING) is _NOTHING
            context.has_checkpoints |= is_plain
            if is_plain and context.opens_checkpoints:
                yield
                return
        yield from original(*args, **kwargs)

    return opened_or_not
