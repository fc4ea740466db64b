"""Generators of random numbers besides PyTorch's default ones, and their states.

These are Python's `random`, NumPy's global state, and objects: torch.Generator, random.Random,
NumPy's Generator and RandomState.
"""

import ctypes
import random
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Generators:
    """Random generators that a module may draw from, and their states as they are now.

    They are among its arguments, or attributes of it or of a module inside it. Others are found by
    `reach.py`.
    """

    def __init__(self, modules: Iterable[nn.Module], given: Iterable[Any]) -> None:
        """given: generators among the arguments."""
        self._states = [(source, state_of(source)) for source in _sources(modules, given)]

    def forget_unchanged(self) -> None:
        """Drops states that have not changed."""
        self._states = [(one, state) for one, state in self._states if not _is_at(one, state)]

    def restore(self) -> None:
        """Sets the generators back to the recorded states."""
        for source, state in self._states:
            set_state(source, state)

    @property
    def any(self) -> bool:
        """True if there are states to be set."""
        return bool(self._states)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Sets the generators as they were recorded, and on exit back to what they are now."""
        now = [(source, state_of(source)) for source, _ in self._states]
        self.restore()
        try:
            yield
        finally:
            for source, state in now:
                set_state(source, state)


def _sources(modules: Iterable[nn.Module], given: Iterable[Any]) -> list[Any]:
    """Returns each generator once: modules that are functions of one state, or objects."""
    own = [module.__dict__ for module in modules]
    kinds = {*map(type, chain.from_iterable(map(dict.values, own)))}  # few, of many attributes
    held: list[Any] = [*given]
    if any(map(_may_be_generator, kinds - _PLAIN)):
        held += [x for each in own for x in each.values() if type(x) not in _PLAIN]
    found: dict[int, Any] = {id(x): x for x in held if _is_generator(x.__class__)}
    return [random, np.random, *found.values()]


# Types of most of a module's attributes.
_PLAIN = frozenset((dict, OrderedDict, set, bool, int, float, str, tuple, list, type(None)))


@lru_cache(4096)
def _is_generator(kind: type) -> bool:
    return issubclass(kind, KINDS)


@lru_cache(4096)
def _may_be_generator(kind: type) -> bool:
    """Returns whether an object of this type may be a generator, or stand for one as its proxy."""
    says_other = any("__class__" in vars(base) for base in kind.__mro__[:-1])
    return issubclass(kind, KINDS) or says_other or kind in weakref.ProxyTypes


class _GeneratorState(NamedTuple):
    """State of a global generator, and the memory of the MT19937 that it was read from."""

    source: Any
    memory: bytes
    state: Any


_UNKNOWN = _GeneratorState(None, b"", None)
_known: dict[Any, _GeneratorState] = {}  # of `random` and `np.random`
_MT19937_NBYTES = 624 * 4 + 4  # its key (uint32) and position (int32)
_MEMORY = ctypes.c_char * _MT19937_NBYTES


def _state_of_numpy() -> Any:
    """Returns the state of NumPy's global generator, the same object while it does not change.

    NumPy copies it number by number, in 60 us; its memory is compared in 1. Beside that memory
    there is a second normal number that waits to be drawn: where there is one, all is read.
    """
    source = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(source) is not np.random.MT19937:
        return np.random.get_state(legacy=False)
    place = _place_of_numpy(source)
    memory, known = place.raw, _known.get(np.random, _UNKNOWN)
    if known.source is source and known.memory == memory:
        return known.state
    state: Any = np.random.get_state(legacy=False)
    if not state["has_gauss"] and place.raw == memory:
        # No other thread has drawn meanwhile.
        _known[np.random] = _GeneratorState(source, memory, state)
    return state


def _state_of_python() -> Any:
    """Returns the state of Python's global generator, in the same way: to read it takes 35 us."""
    source: Any = getattr(random.getstate, "__self__", None)
    place = _place_of_python(source)
    if place is None or source.gauss_next is not None:  # which waits to be drawn
        return random.getstate()
    memory, known = place.raw, _known.get(random, _UNKNOWN)
    if known.source is source and known.memory == memory:
        return known.state
    state = random.getstate()
    if state[-1] is None and place.raw == memory:
        _known[random] = _GeneratorState(source, memory, state)
    return state


@lru_cache(4)  # which holds the generator, too
def _place_of_numpy(source: Any) -> Any:
    return _MEMORY.from_address(source.ctypes.state_address)


@lru_cache(4)
def _place_of_python(source: Any) -> Any:
    """Returns the memory of a `random.Random`; None: it is not where CPython has had it.

    There the position and the key follow the head of the object. As this is not documented, it is
    compared with what the generator says of itself.
    """
    kind = random.Random.__base__
    head = object.__basicsize__
    if type(source) is not random.Random or kind is None:
        return None
    if kind.__basicsize__ < head + _MT19937_NBYTES:
        return None
    place = _MEMORY.from_address(id(source) + head)
    *key, position = random.Random.getstate(source)[1]
    return place if np.frombuffer(place.raw, np.uint32).tolist() == [position, *key] else None


def state_of(source: Any) -> Any:
    """Returns the state of a generator, as `set_state` takes it."""
    if source is np.random:
        return _state_of_numpy()
    if source is random:
        return _state_of_python()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    if isinstance(source, torch.Generator):
        return source.get_state()
    return source.getstate() if hasattr(source, "getstate") else source.get_state(legacy=False)


def set_state(source: Any, state: Any) -> None:
    """Sets a generator to a state."""
    if source is np.random:
        _known.pop(source, None)  # another normal number may wait, at the same memory
    if isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    elif hasattr(source, "setstate"):
        source.setstate(state)
    else:
        source.set_state(state)


def _is_at(source: Any, state: Any) -> bool:
    return same_state(state_of(source), state)


def same_state(one: Any, other: Any) -> bool:
    """Returns whether two states are equal."""
    if one is other:
        return True
    if isinstance(one, Tensor):
        with torch._C.DisableTorchFunction():
            return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return all(same_state(value, other[name]) for name, value in one.items())
    return bool(one == other)
