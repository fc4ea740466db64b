"""Attributes of modules as they are when a module is called, for the second run of its forward.

Attributes  names and the objects behind them (counters, schedules, the state of the last call,
None), the hooks, and what the objects contain: lists, dictionaries, sets, small arrays, and the
attributes of other objects, such as a configuration, two levels deep

Whoever has changed them since, the forward or the program, a second run reads what the first one
has read. What is further away (globals, variables of closures, classes) is not recorded: a second
run whose values differ is an error (`rerun.py`).

The output of the call before, which a module may refer to, has a graph. That graph has such a
record in turn, and so on. So tensors with a graph are recorded without it.
"""

import collections
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, islice, repeat
from operator import is_, itemgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from elbowroom.runtime import contents
from elbowroom.runtime.contents import ATOMS, REGISTRIES, Access, attributes_of, set_attributes
from elbowroom.runtime.reach import is_walked_kind

_LONGEST = 256  # items of a container that is recorded
_LARGEST = 1 << 12  # bytes of an array that is recorded
_DEPTH = 2  # of containers and objects inside of each other
_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith("_forward_"))
_TABLES, _VALUES = itemgetter(*_HOOKS), methodcaller("values")


class _ModuleRecord(NamedTuple):
    """Record of a module: its `vars`, a copy of them, and copies of its hooks."""

    held: dict[str, Any]
    values: dict[str, Any]
    hooks: dict[str, dict[int, Any]]

    @property
    def has_changed(self) -> bool:
        """True if an attribute or a hook is another object, or has another place, than before."""
        held, values = self.held, self.values
        if held.keys() != values.keys() or not all(map(is_, held.values(), values.values())):
            return True
        return _hooks_of(held) != self.hooks

    def restore(self) -> None:
        """Sets the attributes and hooks as they were."""
        set_attributes(self.held, attributes_of(self.values))
        for name in _HOOKS:
            hooks = self.hooks.get(name, {})
            if self.held[name] != hooks:
                self.held[name].clear()
                self.held[name].update(hooks)


def _read(held: dict[str, Any]) -> _ModuleRecord:
    return _ModuleRecord(held, held.copy(), _hooks_of(held))


def _hooks_of(held: dict[str, Any]) -> dict[str, dict[int, Any]]:
    return {name: dict(held[name]) for name in _HOOKS if held[name]}


class _Contents(NamedTuple):
    """Record of a mutable object: what it contains."""

    it: Any
    access: Access
    held: Any

    @property
    def has_changed(self) -> bool:
        """True if it contains other objects than before."""
        now, held = self.access.read(self.it), self.held
        if (
            type(now) is dict
            and len(now) == len(held)
            and all(map(is_, now.values(), held.values()))
        ):
            return not all(map(is_, now, held)) and not contents.same(now, held)
        return not contents.same(now, held)

    def restore(self) -> None:
        """Makes it contain what it did."""
        self.access.fill(self.it, self.held)


@lru_cache(4096)
def _access_of(kind: Any) -> Access | None:
    """Returns how an object of a type is read, if its contents are recorded."""
    for of, access in _CONTAINERS.items():
        if issubclass(kind, of):
            return access
    if issubclass(kind, Tensor | nn.Module | tuple) or not is_walked_kind(kind):
        return None
    return contents.DICT  # of its `__dict__`


_CONTAINERS: dict[type, Access] = {
    list: contents.LIST,
    dict: contents.DICT,
    set: contents.SET,
    collections.deque: contents.DEQUE,
    np.ndarray: contents.ARRAY,
}


def _contents_of(x: Any) -> _Contents | None:
    """Returns the record of an object, unless nothing of it is recorded, or it is large."""
    kind: Any = type(x)
    access = _access_of(kind)
    if access is None:
        return None
    if isinstance(x, np.ndarray):
        if x.dtype == object or x.nbytes > _LARGEST or not x.flags.writeable:
            return None
    elif access is contents.DICT and not isinstance(x, dict):
        x = getattr(x, "__dict__", None)
        if type(x) is not dict:
            return None
    if len(x) > _LONGEST:
        return None
    return _Contents(x, access, _held(access.read(x)))


def _contents_below(level: Iterable[Any]) -> list[_Contents]:
    """Returns records of objects, each once, and of those that they contain."""
    found: dict[int, _Contents] = {}
    for depth in range(_DEPTH):
        below: list[Any] = []
        for x in level:
            if type(x) is tuple or id(x) in found or (one := _contents_of(x)) is None:
                continue
            found[id(x)] = one
            if depth + 1 < _DEPTH and type(one.held) in (list, dict):
                inner = one.held.values() if type(one.held) is dict else one.held
                below += [y for y in inner if type(y) not in ATOMS]
        level = below
    return [*found.values()]


def _held(now: Any) -> Any:
    """Returns contents, in which tensors have no graph."""
    if type(now) is list and any(map(_has_graph, now)):
        return [*map(_without_graph, now)]
    if type(now) is dict and any(map(_has_graph, now.values())):
        return {name: _without_graph(x) for name, x in now.items()}
    return now


def _has_graph(x: Any, depth: int = 0) -> bool:
    """Returns whether x is a tensor that has a graph, or a plain container of such."""
    kind: Any = type(x)
    if kind is tuple or kind is list or kind is dict:
        if len(x) > _LONGEST or depth > _DEPTH:
            return False
        inside = x.values() if kind is dict else x
        return any(_has_graph(y, depth + 1) for y in inside if type(y) not in ATOMS)
    return _is_tensor_kind(kind) and not x.is_leaf


@lru_cache(4096)
def _is_tensor_kind(kind: Any) -> bool:
    return issubclass(kind, Tensor)


def _without_graph(x: Any) -> Any:
    """Returns it without a graph, in another container if there is one; others as they are."""
    if not _has_graph(x):  # also if it contains itself
        return x
    if type(x) is dict:
        return {name: _without_graph(one) for name, one in x.items()}
    if type(x) is tuple or type(x) is list:
        return type(x)(map(_without_graph, x))
    return x.detach().requires_grad_()


_COUNT = len(REGISTRIES)


class Attributes:
    """Attributes of modules, and what they contain, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        held = [module.__dict__ for module in modules]
        hooks = map(_hooks_of, held) if _has_hooks(held) else repeat({})
        values = [*map(dict.copy, held)]
        # Torch's own come first in a module's `vars`.
        own = [*chain.from_iterable([islice(x.values(), _COUNT, None) for x in values])]
        odd = [(x, kind) for x, kind in zip(own, map(type, own), strict=True) if kind not in ATOMS]
        # Most of them are tuples of numbers, those of convolutions.
        tuples = [x for x, kind in odd if kind is tuple]
        found = [x for x, kind in odd if kind is not tuple]
        if not {*map(type, chain.from_iterable(tuples))} <= ATOMS:
            found += tuples
        if found and any(map(_has_graph, found)):
            for copy in values:
                copy.update({n: _without_graph(x) for n, x in copy.items() if _has_graph(x)})
            found = [x for x in found if not _has_graph(x)]
        self._contents = _contents_below(found) if found else []
        self._values = [*map(_ModuleRecord, held, values, hooks)]

    @property
    def have_changed(self) -> bool:
        """True if one is another object now: the forward has set it, or the program since."""
        if self._contents and any(one.has_changed for one in self._contents):
            return True
        held, values, hooks = zip(*self._values, strict=True)
        if any(hooks) or _has_hooks(held):
            return any(one.has_changed for one in self._values)
        return not are_same(held, values)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Sets the attributes as they were recorded, and on exit back to what they are now."""
        changed = [one for one in self._values if one.has_changed]
        inside = [one for one in self._contents if one.has_changed]
        now: list[_ModuleRecord | _Contents] = [
            *(_read(one.held) for one in changed),
            *(one._replace(held=one.access.read(one.it)) for one in inside),
        ]
        _restore(changed, inside)
        try:
            yield
        finally:
            _restore(now)


def _restore(*records: Iterable[_ModuleRecord | _Contents]) -> None:
    for some in records:
        for one in some:
            one.restore()


def _has_hooks(held: Iterable[dict[str, Any]]) -> bool:
    """Returns whether a module has a forward hook. held: the `vars` of each."""
    return any(chain.from_iterable(map(_TABLES, held)))


def are_same(some: Iterable[dict[str, Any]], others: Iterable[dict[str, Any]]) -> bool:
    """Returns whether dictionaries have the same names, in order, for the same objects."""
    one, other = (chain.from_iterable(map(_VALUES, each)) for each in (some, others))
    names = [[*chain.from_iterable(each)] for each in (some, others)]
    return names[0] == names[1] and all(map(is_, one, other))
