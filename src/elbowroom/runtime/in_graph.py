"""Compiled modules inside a context, whose graphs follow the context's policy.

A compiled region passes all its saved tensors to hooks at once, without the ops that saved them. So
where a policy has a form for graphs (`ActsInGraph`), a compiled module runs through it: its call
leaves the context's hooks and function mode, and Dynamo compiles with another backend. Code that
was compiled for the plain module stays cached, and is used again outside.

Dynamo's backend is a setting of the process, so such calls run one at a time.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from elbowroom.runtime import modules
from elbowroom.runtime.calls import intercepted, undisturbed, watches_calls_of
from elbowroom.runtime.compiler import forced_backend, inductor_options, is_compiled, may_compile
from elbowroom.runtime.ledger import Ledger

_running = threading.RLock()
_autograd = torch._C._autograd


class ActsInGraph(Protocol):
    """A policy as it acts in compiled graphs."""

    def backend(self, options: Mapping[str, Any]) -> Callable[..., Any] | None:
        """The backend of torch.compile for these options of Inductor; None: as it is."""
        ...

    def running(self, report: Callable[[int, int, Any], None]) -> AbstractContextManager[None]:
        """Calls `report` for each region that runs: bytes of plain compile, bytes held, owner."""
        ...


@contextmanager
def compiled_by(form: ActsInGraph, ledger: Ledger, *, watches: bool) -> Iterator[list[str]]:
    """Compiles modules on this thread by `form`, where Inductor compiles them.

    Yields the names of those that have been called so far.

    ledger   counts what they hold
    watches  whether the context around knows which module runs (`modules.watch`)
    """
    called: list[str] = []

    def call(
        module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        options = inductor_options(module) if is_compiled(module) else None
        if options is None or watches_calls_of(module):  # a fitted one has a plan of its own
            with modules.entered(module) if watches else nullcontext():
                return plain(*args, **kwargs)
        called.append(modules.name_of(module))
        with ExitStack() as alone:
            if not may_compile() or not _leave_context(alone):
                return plain(*args, **kwargs)
            alone.enter_context(_running)
            alone.enter_context(forced_backend(form.backend(options)))
            alone.enter_context(form.running(_teller(ledger, called[-1])))
            alone.enter_context(undisturbed())
            return plain(*args, **kwargs)

    with modules.seen_by_calls() if watches else nullcontext(), intercepted(call):
        yield called


def _teller(ledger: Ledger, module: str) -> Callable[[int, int, Any], None]:
    """Counts a region that has run in the ledger, until the graph that holds it is freed."""

    def count(plain_nbytes: int, held_nbytes: int, owner: Any) -> None:
        entry = ledger.open(module, "compiled region", "", plain_nbytes)
        entry.action = "in its graph" if held_nbytes < plain_nbytes else "keep"
        entry.why = "" if held_nbytes < plain_nbytes else "its graph has nothing to code"
        entry.hold(held_nbytes)
        weakref.finalize(owner, entry.close).atexit = False

    return count


def _leave_context(stack: ExitStack) -> bool:
    """Takes off our function mode and hooks until the stack unwinds; False: another's lie above."""
    modes, hooks = [], []
    while _is_ours(_top_mode()):
        modes.append(torch._C._pop_torch_function_stack())
    while (top := _autograd._top_saved_tensors_default_hooks(True)) and _is_ours(top[0]):
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()

    def back() -> None:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)

    stack.callback(back)
    depth = torch._C._len_torch_function_stack()
    return not any(_is_ours(torch._C._get_function_stack_at(n)) for n in range(depth))


def _top_mode() -> Any:
    depth = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(depth - 1) if depth else None


def _is_ours(x: Any) -> bool:
    """Returns whether a mode or a hook is of this package."""
    name = getattr(x, "__module__", None) or ""
    return name.startswith("elbowroom.")
