"""Which module runs now, by its name in the outermost module that was called. For the ledger's table.

Global module hooks, so that no module is changed; they are there only while a context is open, and look away on
other threads.
"""

import threading
import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_names: "weakref.WeakKeyDictionary[nn.Module, dict[int, str]]" = weakref.WeakKeyDictionary()


class ModuleStack:
    """The modules whose forward runs on this thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._running: list[nn.Module] = []
        self._hooks: list[Any] = []

    def open(self) -> None:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._running.clear()

    @property
    def name(self) -> str:
        """The innermost module's name, "layer1.0.conv2"; the class of a module that the outermost does not contain."""
        if not self._running:
            return ""
        root, module = self._running[0], self._running[-1]
        return _names_in(root).get(id(module)) or type(module).__name__

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.append(module)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        # A module that raised is still on top of its callers' frames: cut down to the one that ends.
        if threading.get_ident() == self._thread and module in self._running:
            while self._running.pop() is not module:
                pass


def _names_in(root: nn.Module) -> dict[int, str]:
    names = _names.get(root)
    if names is None:
        names = _names[root] = {id(module): name for name, module in root.named_modules()}
    return names
