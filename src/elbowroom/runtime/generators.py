"""Random numbers that a module may draw besides those of PyTorch's default generators.

From Python's `random`, from NumPy's global state, and from generators that it is handed, or that
are attributes of it or of a module inside (torch.Generator, random.Random, NumPy's Generator and
RandomState). A forward that runs again must draw the same ones. A generator that is kept elsewhere
nobody can see.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Generators:
    """Random generators that a module may draw from, and their states as they are now."""

    def __init__(self, module: nn.Module, given: Iterable[Any] = ()) -> None:
        """given: some that it is handed."""
        self._states = [(source, _state_of(source)) for source in _sources(module, given)]

    def forget_unchanged(self) -> None:
        """Drops states that have not changed."""
        self._states = [(one, state) for one, state in self._states if not _is_at(one, state)]

    def restore(self) -> None:
        """Sets the generators back to the recorded states."""
        for source, state in self._states:
            _set_state(source, state)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Sets the generators as they were recorded, and on exit back to what they are now."""
        now = [(source, _state_of(source)) for source, _ in self._states]
        self.restore()
        try:
            yield
        finally:
            for source, state in now:
                _set_state(source, state)


def _sources(module: nn.Module, given: Iterable[Any]) -> Iterator[Any]:
    """Yields each generator once: modules that are functions of one state, or objects."""
    yield random
    yield np.random
    held = (x for child in module.modules() for x in vars(child).values())
    yield from {id(x): x for x in (*given, *held) if isinstance(x, KINDS)}.values()


def _state_of(source: Any) -> Any:
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    if isinstance(source, torch.Generator):
        return source.get_state()
    return source.getstate() if hasattr(source, "getstate") else source.get_state(legacy=False)


def _set_state(source: Any, state: Any) -> None:
    if isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    elif hasattr(source, "setstate"):
        source.setstate(state)
    else:
        source.set_state(state)


def _is_at(source: Any, state: Any) -> bool:
    return _same(_state_of(source), state)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return all(_same(value, other[name]) for name, value in one.items())
    return bool(one == other)
