"""Hooks that are registered on nodes of the graph while a forward runs that is undone.

`node.register_prehook` and `node.register_hook` change nodes that outlive the forward: of the graph
before the model, and those that add up a parameter's gradient. PyTorch does not list the hooks of a
node. So the function by which it registers one is replaced meanwhile.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch.autograd.function
from torch import nn

_MIXIN: Any = torch.autograd.function._HookMixin
_registers = _MIXIN._register_hook
_lock = threading.Lock()
# Ids of modules that were seen to register hooks on nodes. A stale one costs a context, no more.
REGISTERING: set[int] = set()
_open: "list[NodeHooks]" = []


class NodeHooks:
    """Context that notes the hooks which its thread registers on nodes.

    any  whether there were any
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._thread = 0

    @property
    def any(self) -> bool:
        return bool(self._handles)

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        with _lock:
            _open.append(self)
            _MIXIN._register_hook = staticmethod(_noted)
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            _open.remove(self)
            if not _open:
                _MIXIN._register_hook = staticmethod(_registers)

    def remove(self) -> None:
        """Removes them from their nodes."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()


def note_node_hooks(module: nn.Module) -> None:
    """Notes that the forward of a module registers hooks on nodes."""
    REGISTERING.add(id(module))


@contextmanager
def without_node_hooks() -> Iterator[None]:
    """Context around a second run of such a module: its hooks on nodes are removed at the end."""
    hooks = NodeHooks()
    try:
        with hooks:
            yield
    finally:
        hooks.remove()


def _noted(hooks: Any, hook: Any) -> Any:
    """Registers a hook, as PyTorch does, and notes it."""
    hooks, handle = _registers(hooks, hook)
    if getattr(hook, "__module__", "").partition(".")[0] != "elbowroom":
        now = threading.get_ident()
        for one in list(_open):
            if one._thread == now:
                one._handles.append(handle)
    return hooks, handle
