"""The mutable objects that can be reached from some values, and their contents at a moment.

A forward may change more than it returns: a cache argument, a dictionary from which it removes an
entry, a list to which a forward hook appends, an attribute. `Reach` walks from such values through
containers, instances, modules and their classes, and through functions to what these close over and
to the globals that they name or set, to what they name in other Python modules, and to methods of
the names that they call. It remembers the contents of each mutable object (by identity,
not a copy of what is inside), so it knows which objects have changed since, and can restore their
contents.

Iterators, generators, files and context variables without a value cannot be set back: what can
reach one is not run a second time (`Reach.not_set_back`). Those of a trainer that a module refers
to, under a name that its forward does not use, and of other Python modules do not count.

Left as they are, and not walked into: instances of classes of torch and of the standard library
other than containers (locks, queues, threads and loggers are shared with others), and parameters
and buffers of modules.
"""

import array
import collections
import functools
import io
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from contextvars import ContextVar, copy_context
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from elbowroom.runtime import contents, generators
from elbowroom.runtime.code_names import (
    CACHED,
    held_by_function,
    is_of_library,
    is_of_program,
    methods_of,
    named_in,
    names_in,
    names_of,
    names_set_in,
    namespaces,
    own_classes,
    own_methods,
    sets_by_word,
    sets_events,
)
from elbowroom.runtime.contents import ATOMS, REGISTRIES, Access, same, slots_of
from elbowroom.runtime.storage import version_of

_MAX = 20_000  # objects of one walk; objects beyond this number are not seen
_TABLES = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_modules")))
_TABLES_OF = itemgetter(*_TABLES)
_WALKED_OF_STDLIB = (
    *(collections.UserDict, collections.UserList, collections.ChainMap),
    *(types.SimpleNamespace, types.MappingProxyType),
)
_UNMADE = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# Methods that run although no code names them.
_UNNAMED_METHODS = ("__call__", "__enter__", "__exit__", "__getitem__", "forward", "setup_context")
_LONGEST = 1 << 20  # bytes of an array that is compared and restored


class _Object(NamedTuple):
    """A mutable object, its kind, and what it contained."""

    it: Any
    kind: str
    held: Any
    access: Access

    @property
    def has_changed(self) -> bool:
        return not self.access.same(self.access.read(self.it), self.held)

    def restore(self) -> None:
        self.access.fill(self.it, self.held)


class _Module(NamedTuple):
    """A module by its `vars`: its attributes, and its tables of hooks and children.

    A network has hundreds of modules, with a dozen tables each, most of which stay empty.

    tables  of those that are not empty, by name
    """

    it: dict[str, Any]
    kind: str
    attributes: dict[str, Any]
    tables: dict[str, dict[Any, Any]]

    @property
    def has_changed(self) -> bool:
        if not same(contents.ATTRIBUTES.read(self.it), self.attributes):
            return True
        tables = self.tables
        return any(
            not same(dict(table), tables.get(name, _EMPTY))  # of TorchScript it is no dictionary
            for name, table in zip(_TABLES, _TABLES_OF(self.it), strict=True)
            if table or name in tables
        )

    def restore(self) -> None:
        contents.ATTRIBUTES.fill(self.it, self.attributes)
        for name in _TABLES:
            if not same(dict(self.it[name]), self.tables.get(name, _EMPTY)):
                contents.DICT.fill(self.it[name], self.tables.get(name, _EMPTY))


_EMPTY: dict[Any, Any] = {}


class Reach:
    """Objects and tensors that can be reached from `roots`, as they are now.

    tensors       all tensors but parameters and buffers of modules, with their versions
    not_set_back  kinds of the objects that cannot be set back: iterators give their items once
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._objects: list[_Object | _Module] = []
        self.tensors: list[tuple[Tensor, int]] = []
        self.not_set_back: list[str] = []
        # Attributes of modules that no forward names, and what may be named in other modules.
        self._unnamed: list[Any] = []
        self._names = set(_UNNAMED_METHODS)  # in the code that was visited
        self._methods: dict[str, list[Any]] = {}  # of other names, which are not visited
        self._parameters: list[Tensor] = []  # of modules
        self._sets_events = False  # so does code that was visited
        self._events: list[_Object] = []
        self._walk(roots)
        if self._sets_events:  # otherwise other threads do, which nobody can undo
            self._objects += self._events
        with torch._C.DisableTorchFunction():
            hooked = [*self._parameters, *(x for x, _ in self.tensors)]
            self._hooks = [(x, _hooks_of(x)) for x in hooked]
            self._flags = [(x, x.requires_grad) for x in hooked if x.is_leaf]
            leaves = (x for x, _ in self.tensors if x.requires_grad and x.is_leaf)
            self._gradients = [(x, x.grad) for x in leaves]
            for x in hooked:
                self._note(vars(x), contents.DICT, "attribute of a tensor")

    def changed(self) -> list[str]:
        """The kinds of the objects, including tensors, that have changed."""
        found = [one.kind for one in self._objects if one.has_changed]
        with torch._C.DisableTorchFunction():
            found += ["hook on a tensor" for x, before in self._hooks if _hooks_of(x) != before]
            found += ["requires_grad" for x, before in self._flags if x.requires_grad is not before]
        return found + ["tensor" for x, version in self.tensors if version_of(x) != version]

    def restore(self) -> None:
        """Restores the contents of each changed object.

        Of tensors it restores hooks, gradients and `requires_grad`; values are left as they are.
        """
        for one in self._objects:
            if one.has_changed:
                one.restore()
        with torch._C.DisableTorchFunction():
            for x, before in self._hooks:
                if _hooks_of(x) != before:
                    _set_hooks(x, before)
            for x, wants in self._flags:
                if x.requires_grad is not wants and x.is_leaf:
                    x.requires_grad = wants
            for x, gradient in self._gradients:
                if x.grad is not gradient:
                    x.grad = gradient

    def _walk(self, roots: Iterable[Any]) -> None:
        seen: dict[int, Any] = {}  # holds what it names: ids are not used again meanwhile
        todo = collections.deque(roots)
        count = None  # of those that cannot be set back, among what is named
        while (todo or self._unnamed) and len(seen) < _MAX:
            if not todo:
                count = len(self.not_set_back) if count is None else count
                todo.extend(self._unnamed)
                self._unnamed = []
            x = todo.popleft()
            if type(x) in ATOMS or id(x) in seen:
                continue
            seen[id(x)] = x
            try:
                todo.extend(self._visited(x))
            except Exception:
                continue
        if count is not None:
            del self.not_set_back[count:]

    def _visited(self, x: Any) -> list[Any]:
        """Notes an object, and returns what it holds."""
        if isinstance(x, Tensor):
            if not isinstance(x, nn.Parameter):
                self.tensors.append((x, version_of(x)))
            return []
        if isinstance(x, nn.Module):
            self._module(x)
            held = {n: v for n, v in vars(x).items() if n not in REGISTRIES}
            kind: Any = type(x)
            used = names_of(kind, kind.forward)
            unnamed = [n for n, v in held.items() if n not in used and _is_walked(v)]
            self._unnamed += [held.pop(n) for n in unnamed]
            return [*held.values(), *own_classes(kind)]
        if isinstance(x, types.CellType):
            return list(self._note(x, contents.CELL, "variable of a closure"))
        if isinstance(x, types.FunctionType) and is_of_program(x):
            self._function(x)
            own = self._note(vars(x), contents.DICT, "attribute of a function")
            return [*held_by_function(x), *own.values()]
        if isinstance(x, _FUNCTIONS):
            return list(held_by_function(x))
        if isinstance(x, CACHED):
            self._note(x, contents.CACHE)
            return [x.__wrapped__]
        if isinstance(x, type):
            self._class(x)
            return list(self._note(x, contents.CLASS, f"class {x.__name__}").values())
        if isinstance(x, ContextVar):
            value = self._note(x, contents.VARIABLE)
            if not value:
                self.not_set_back.append("ContextVar without a value")
            return list(value)
        return list(self._other(x))

    def _function(self, x: Any) -> None:
        """Notes the globals that a function sets, and walks later where its code may lead."""
        own, *others = namespaces(x)
        names, by_word = names_set_in(x.__code__), sets_by_word(x.__code__)
        if names or by_word:
            for known in (own, *others):
                self._note_names(known, names, by_word=by_word)
        self._sets_events = self._sets_events or sets_events(x.__code__)
        for known in others:
            self._unnamed += named_in(known, x.__code__)
        new = set(names_in(x.__code__)) - self._names
        self._names |= new
        self._unnamed += [method for name in new for method in self._methods.pop(name, ())]

    def _class(self, cls: Any) -> None:
        """Walks the methods of a class that visited code names later; others may be named yet."""
        if not issubclass(cls, nn.Module):  # of which `methods_of` finds them
            for name, method in own_methods(cls):
                known = self._unnamed if name in self._names else self._methods.setdefault(name, [])
                known.append(method)

    def _note_names(self, known: dict[str, Any], names: tuple[str, ...], *, by_word: bool) -> None:
        """Notes global variables of a module: those of these names; by_word: all constants, too."""

        def read(known: dict[str, Any]) -> dict[str, Any]:
            found = {name: known[name] for name in names if name in known}
            if by_word:
                found |= {name: x for name, x in known.items() if type(x) in ATOMS}
            return found

        def fill(known: dict[str, Any], held: dict[str, Any]) -> None:
            for name in read(known).keys() - held.keys():
                del known[name]
            known.update(held)

        self._note(known, Access(read, fill), "global variable")

    def _module(self, module: nn.Module) -> None:
        """Walks a module's attributes and its tables of hooks and children."""
        if any(isinstance(p, _UNMADE) for p in _own_tensors(module)):
            return  # its first forward creates it, once for all
        self._parameters += [p for p in module._parameters.values() if p is not None]
        held = vars(module)
        attributes = contents.ATTRIBUTES.read(held)
        both = zip(_TABLES, _TABLES_OF(held), strict=True)
        tables = {name: dict(table) for name, table in both if table}
        self._objects.append(_Module(held, type(module).__name__, attributes, tables))

    def _other(self, x: Any) -> Iterator[Any]:
        """Notes a container or an instance, and returns what it holds."""
        if isinstance(x, list):
            yield from self._note(x, contents.LIST)
        elif isinstance(x, collections.deque):
            yield from self._note(x, contents.DEQUE)
        elif isinstance(x, dict):
            yield from self._note(x, contents.DICT).values()
        elif isinstance(x, set):
            yield from self._note(x, contents.SET)
        elif isinstance(x, np.ndarray):
            if x.dtype != object and x.nbytes <= _LONGEST and x.flags.writeable:
                self._note(x, contents.ARRAY)
            return
        elif isinstance(x, bytearray | array.array | memoryview):
            if memoryview(x).nbytes <= _LONGEST and not memoryview(x).readonly:
                self._note(x, contents.BYTES)
            return
        elif isinstance(x, generators.KINDS):
            self._note(x, contents.GENERATOR)
            return
        elif isinstance(x, threading.Event):
            self._events.append(_Object(x, "Event", x.is_set(), contents.EVENT))
            return
        elif isinstance(x, io.StringIO | io.BytesIO):
            if not x.closed:
                self._note(x, contents.STREAM)
            return
        elif isinstance(x, threading.local):
            yield from self._note(x.__dict__, contents.DICT, "threading.local").values()
            return
        elif isinstance(x, collections.abc.Iterator | io.IOBase):
            if not any(x is one for one in (sys.stdout, sys.stderr)):
                self.not_set_back.append(type(x).__name__)
            return
        elif isinstance(x, tuple | frozenset):
            yield from x
        elif isinstance(x, types.MappingProxyType):
            yield from x.values()
        if _is_walked(x):
            kind: Any = type(x)
            yield from own_classes(kind)
            held = getattr(x, "__dict__", None)
            if type(held) is dict:
                yield from self._note(held, contents.DICT, type(x).__name__).values()
            if slots_of(kind):
                yield from self._note(x, contents.SLOTS).values()

    def _note(self, x: Any, access: Access, kind: str = "") -> Any:
        held = access.read(x)
        self._objects.append(_Object(x, kind or type(x).__name__, held, access))
        return held


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooks_of(x: Tensor) -> tuple[dict[int, Any], ...]:
    """Returns the hooks that are registered on a tensor for its gradient, but for our own."""
    tables = (getattr(x, name, None) or _EMPTY for name in _HOOKS)
    return tuple(
        {key: hook for key, hook in table.items() if not _is_ours(hook)} if table else _EMPTY
        for table in tables
    )


def _set_hooks(x: Tensor, before: tuple[dict[int, Any], ...]) -> None:
    for name, own, now in zip(_HOOKS, before, _hooks_of(x), strict=True):
        table: Any = getattr(x, name)
        for key in now.keys() - own.keys():
            del table[key]
        if table is not None:
            table.update(own)


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "elbowroom"


def behind_calls(module: nn.Module) -> list[Any]:
    """Returns the roots of all that a forward of this module may change besides its arguments.

    They are the module and all inside it, the functions of their forwards and hooks, and the
    context's variables.
    """
    children = list(module.modules())
    classes: dict[Any, None] = {
        type(child): None for child in children if not _is_of_torch(type(child))
    }
    forwards = dict.fromkeys(chain.from_iterable(methods_of(cls, cls.forward) for cls in classes))
    tables = (vars(child)[name] for child in children for name in _TABLES if "forward" in name)
    hooks = [hook for table in tables for hook in table.values()]
    return [*children, *forwards, *hooks, *copy_context().values()]


def _own_tensors(module: nn.Module) -> Iterable[Any]:
    return (*module._parameters.values(), *module._buffers.values())


def _is_walked(x: Any) -> bool:
    """Returns whether the attributes of this instance are walked."""
    kind: Any = type(x)
    return is_walked_kind(kind)


@functools.lru_cache(4096)
def is_walked_kind(kind: Any) -> bool:
    """Returns whether the attributes of instances of this class are walked."""
    if issubclass(kind, _WALKED_OF_STDLIB):
        return True
    if issubclass(
        kind, type | types.ModuleType | types.BuiltinFunctionType | collections.abc.Iterator
    ):
        return False
    return not is_of_library(kind.__module__)


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"
