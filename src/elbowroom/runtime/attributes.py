"""Attributes of modules: counters, schedules, the state of the last call, None.

A forward that runs again must find those that it found the first time, and leave what is there now.
Here they are names and the objects behind them, and the hooks that forward installs; what changes
inside of an object (a list that is appended to) is seen to in `reach.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from elbowroom.runtime.reach import attributes_of, set_attributes

_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith("_forward_"))
_Values = tuple[dict[str, Any], list[dict[int, Any]]]


class Attributes:
    """Attributes of a module and of all modules inside it, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._values = [(vars(child), _read(vars(child))) for child in module.modules()]

    def forget_unchanged(self) -> None:
        """Drops the attributes of modules where none has changed."""
        self._values = [
            (held, values) for held, values in self._values if not _same(_read(held), values)
        ]

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Sets the attributes as they were recorded, and on exit back to what they are now."""
        now = [(held, _read(held)) for held, _ in self._values]
        for held, values in self._values:
            _set(held, values)
        try:
            yield
        finally:
            for held, values in now:
                _set(held, values)


def _read(held: dict[str, Any]) -> _Values:
    """Attributes of a module, and its hooks."""
    return attributes_of(held), [dict(held[name]) for name in _HOOKS]


def _set(held: dict[str, Any], values: _Values) -> None:
    set_attributes(held, values[0])
    for name, hooks in zip(_HOOKS, values[1], strict=True):
        if held[name] != hooks:
            held[name].clear()
            held[name].update(hooks)


def _same(now: _Values, before: _Values) -> bool:
    (mine, my_hooks), (others, other_hooks) = now, before
    equal = mine.keys() == others.keys() and all(mine[name] is x for name, x in others.items())
    return equal and my_hooks == other_hooks
