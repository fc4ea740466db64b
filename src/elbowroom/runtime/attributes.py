"""Numbers, flags and words that modules keep as plain attributes: counters, schedules, None.

A forward that runs again must find what it found the first time, and leave what is there now. Lists
and other objects that it changes inside are not seen to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


class Attributes:
    """Those of a module and of all inside it, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._values: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (vars(child), {name: x for name, x in vars(child).items() if type(x) in _PLAIN})
            for child in module.modules()
        ]

    def restore(self) -> None:
        """Make them what they were."""
        for held, values in self._values:
            held.update(values)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside they are what they were; afterwards what they are now."""
        now = [(held, {n: held[n] for n in values if n in held}) for held, values in self._values]
        self.restore()
        try:
            yield
        finally:
            for held, values in now:
                held.update(values)
