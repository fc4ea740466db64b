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
import dis
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

from elbowroom.errors import PlanError
from elbowroom.runtime import contents, generators
from elbowroom.runtime.contents import ATOMS, REGISTRIES, Access, same, slots_of
from elbowroom.runtime.storage import version_of

LARGE = 1 << 24  # bytes of a tensor that forward has in reach besides its arguments
SMALL = 1 << 16  # bytes of a tensor that is always copied
_MAX = 20_000  # objects of one walk; objects beyond this number are not seen
_TABLES = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_modules")))
_TABLES_OF = itemgetter(*_TABLES)
_WALKED_OF_STDLIB = (
    *(collections.UserDict, collections.UserList, collections.ChainMap),
    *(types.SimpleNamespace, types.MappingProxyType),
)
_UNMADE = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CACHED: Any = functools._lru_cache_wrapper
_SETS = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR")
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
        self._walk(roots)
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
            used = _names_of(kind, kind.forward)
            unnamed = [n for n, v in held.items() if n not in used and _is_walked(v)]
            self._unnamed += [held.pop(n) for n in unnamed]
            return [*held.values(), *_own_classes(kind)]
        if isinstance(x, types.CellType):
            return list(self._note(x, contents.CELL, "variable of a closure"))
        if isinstance(x, types.FunctionType) and _is_of_program(x):
            self._function(x)
            own = self._note(vars(x), contents.DICT, "attribute of a function")
            return [*_held_by_function(x), *own.values()]
        if isinstance(x, _FUNCTIONS):
            return list(_held_by_function(x))
        if isinstance(x, _CACHED):
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
        own, *others = _namespaces(x)
        if names := _names_set_in(x.__code__):
            for known in (own, *others):
                self._note_names(known, names)
        for known in others:
            self._unnamed += _named_in(known, x.__code__)
        new = set(_names_in(x.__code__)) - self._names
        self._names |= new
        self._unnamed += [method for name in new for method in self._methods.pop(name, ())]

    def _class(self, cls: Any) -> None:
        """Walks the methods of a class that visited code names later; others may be named yet."""
        if not issubclass(cls, nn.Module):  # of which `_methods_of` finds them
            for name, method in _own_methods(cls):
                known = self._unnamed if name in self._names else self._methods.setdefault(name, [])
                known.append(method)

    def _note_names(self, known: dict[str, Any], names: tuple[str, ...]) -> None:
        """Notes global variables of a module, by name."""

        def read(known: dict[str, Any]) -> dict[str, Any]:
            return {name: known[name] for name in names if name in known}

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
            yield from _own_classes(kind)
            held = getattr(x, "__dict__", None)
            if type(held) is dict:
                yield from self._note(held, contents.DICT, type(x).__name__).values()
            if slots_of(kind):
                yield from self._note(x, contents.SLOTS).values()

    def _note(self, x: Any, access: Access, kind: str = "") -> Any:
        held = access.read(x)
        self._objects.append(_Object(x, kind or type(x).__name__, held, access))
        return held


class TensorValues:
    """The current values of tensors, which restore tensors that are changed in place.

    No value is kept for a tensor that needs a gradient: its changes are part of a graph.
    """

    def __init__(self, tensors: Iterable[tuple[Tensor, int]], max_nbytes: int) -> None:
        """tensors: with their versions. max_nbytes: larger ones are not copied."""
        self._tensors = [(x, version, _copy_of(x, max_nbytes)) for x, version in tensors]

    @property
    def nbytes(self) -> int:
        """The bytes of all copies."""
        return sum(nbytes_of(copy) for _, _, copy in self._tensors if copy is not None)

    @property
    def is_lost(self) -> bool:
        """True if a tensor has changed of which there is no copy."""
        return any(copy is None and version_of(x) != v for x, v, copy in self._tensors)

    @property
    def have_changed(self) -> bool:
        """True if a tensor has changed."""
        return any(_has_changed(*one) for one in self._tensors)

    @property
    def have_changed_large(self) -> bool:
        """True if a large tensor has changed."""
        large = (one for one in self._tensors if nbytes_of(one[0]) > SMALL)
        return any(_has_changed(*one) for one in large)

    def let_go(self) -> None:
        """Drops large copies of tensors that have not changed since."""
        self._tensors = [
            (x, version, None if is_left_alone(x, version, copy) else copy)
            for x, version, copy in self._tensors
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the values of changed tensors.

        Raises PlanError where that is not possible.
        """
        for x, version, copy in self._tensors:
            if not _has_changed(x, version, copy):
                continue
            if copy is None or not leave_graph(x):
                raise PlanError(
                    "forward had to be run a second time, and the first has changed a tensor in "
                    f"place that needs a gradient, is large or is not strided, {tuple(x.shape)}; "
                    "that cannot be undone. Change a clone of it, or make it a buffer of a module."
                )
            if x.shape != copy.shape:
                x.data = copy.clone()
            else:
                x.copy_(copy)
            torch._C._autograd._unsafe_set_version_counter((x,), (version,))


def _has_changed(x: Tensor, version: int, copy: Tensor | None) -> bool:
    return version_of(x) != version or not (copy is None or is_same(x, copy))


def is_same(x: Tensor, copy: Tensor) -> bool:
    """Returns whether a tensor has the values of its copy, which are compared if it is plain.

    `x.data` and an array of NumPy that shares its memory change it without a new version.
    """
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_quantized:
        return True
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if torch.equal(x, copy):
            return True
        if x.shape != copy.shape or not (x.is_floating_point() or x.is_complex()):
            return False
        return bool(((x == copy) | (x.isnan() & copy.isnan())).all())


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


def is_left_alone(x: Tensor, version: int, copy: Tensor | None) -> bool:
    """Returns whether a large tensor is unchanged since it had this version, and was copied."""
    if copy is None or nbytes_of(copy) <= SMALL or version_of(x) != version:
        return False
    if copy.layout is not torch.strided:
        return False
    with torch._C.DisableTorchFunction():
        return torch.equal(x, copy)


def leave_graph(x: Tensor) -> bool:
    """Takes a tensor that had no graph out of the one that it has got by a change in place.

    Otherwise the next forward would go on with the graph of the one that is undone. Returns whether
    that was possible: views do not leave the graph of what they show.
    """
    if x.grad_fn is None:
        return True
    if x._is_view():
        return False
    x.detach_()
    return True


def behind_calls(module: nn.Module) -> list[Any]:
    """Returns the roots of all that a forward of this module may change besides its arguments.

    They are the module and all inside it, the functions of their forwards and hooks, and the
    context's variables.
    """
    children = list(module.modules())
    classes: dict[Any, None] = {
        type(child): None for child in children if not _is_of_torch(type(child))
    }
    forwards = dict.fromkeys(chain.from_iterable(_methods_of(cls, cls.forward) for cls in classes))
    tables = (vars(child)[name] for child in children for name in _TABLES if "forward" in name)
    hooks = [hook for table in tables for hook in table.values()]
    return [*children, *forwards, *hooks, *copy_context().values()]


def _copy_of(x: Tensor, max_nbytes: int) -> Tensor | None:
    if x.requires_grad or x.layout is not torch.strided or x.is_inference():
        return None
    if nbytes_of(x) > max_nbytes:
        return None
    return x.clone()


def nbytes_of(x: Tensor) -> int:
    """Returns the bytes of all its elements."""
    return x.numel() * x.element_size()


def _own_tensors(module: nn.Module) -> Iterable[Any]:
    return (*module._parameters.values(), *module._buffers.values())


def _held_by_function(x: Any) -> Iterator[Any]:
    """Yields a function's closure, its defaults, and the globals that it names."""
    if isinstance(x, functools.partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, types.MethodType):
        yield from (x.__func__, x.__self__)
    elif _is_of_program(x):
        yield from x.__closure__ or ()
        yield from (x.__defaults__ or (), x.__kwdefaults__ or {})
        yield from _named_in(x.__globals__, x.__code__)


def _named_in(known: dict[str, Any], code: types.CodeType) -> Iterator[Any]:
    """Yields the globals that a function names, among these."""
    for name in _names_in(code):
        if name not in known or isinstance(known[name], nn.Module | types.ModuleType):
            continue
        if isinstance(known[name], type):
            yield from _own_classes(known[name])
        else:
            yield known[name]


def _namespaces(x: Any) -> list[dict[str, Any]]:
    """Returns the globals of a function, and those of other Python modules that its code names."""
    found = [x.__globals__]
    for known in found:
        for name in _names_in(x.__code__):
            one = known.get(name, sys.modules.get(name))  # which it may import
            if isinstance(one, types.ModuleType) and not _is_of_library(one.__name__):
                held = vars(one)
                if all(held is not other for other in found):
                    found.append(held)
    return found


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (*code.co_names, *(name for c in inner for name in _names_in(c)))


@functools.lru_cache(4096)
def _names_set_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals and attributes that a function, or one inside it, sets."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    own = [i.argval for i in dis.get_instructions(code) if i.opname in _SETS]
    return tuple({*own, *(name for c in inner for name in _names_set_in(c))})


@functools.lru_cache(4096)
def _own_classes(cls: Any) -> tuple[type, ...]:
    """Returns a class and those that it is derived from, but for those of libraries."""
    return tuple(one for one in cls.__mro__ if not _is_of_library(one.__module__))


@functools.lru_cache(4096)
def _own_methods(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the functions by which a class defines methods and properties, with their names."""
    own = {n: getattr(x, "__func__", getattr(x, "fget", x)) for n, x in vars(cls).items()}
    return tuple((n, x) for n, x in own.items() if isinstance(x, types.FunctionType | _CACHED))


@functools.lru_cache(4096)
def _methods_of(cls: Any, forward: Any) -> tuple[Any, ...]:
    """Returns the forward of a class of modules, and the methods that it calls, and so on."""
    found: dict[Any, None] = {forward: None}
    waiting = list(found)
    while waiting:
        code = getattr(waiting.pop(), "__code__", None)
        names = () if code is None else _names_in(code)
        methods = [getattr(cls, name, None) for name in names]
        new = [x for x in methods if isinstance(x, types.FunctionType | _CACHED) and x not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return tuple(found)


@functools.lru_cache(4096)
def _names_of(cls: Any, forward: Any) -> frozenset[str]:
    """Returns the names that the forward of a class of modules uses, and the methods it calls."""
    codes = [getattr(one, "__code__", None) for one in _methods_of(cls, forward)]
    return frozenset(name for code in codes if code is not None for name in _names_in(code))


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
    return not _is_of_library(kind.__module__)


@functools.lru_cache(4096)
def _is_of_library(module: str | None) -> bool:
    """Returns whether this is the name of a module of torch, of the standard library or of ours."""
    root = (module or "").partition(".")[0]
    if root == "__main__":
        return False
    return root in {"torch", "numpy", "elbowroom", ""} or root in sys.stdlib_module_names


def _is_of_program(function: Any) -> bool:
    """Returns whether a function is of no such module, whatever `functools.wraps` has named it."""
    return not _is_of_library(function.__globals__.get("__name__"))


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"
