"""The mutable objects that can be reached from some values, and their contents at a moment.

A forward may change more than it returns: a cache argument, a dictionary from which it removes an
entry, a list to which a forward hook appends, an attribute. `Reach` walks from such values through
containers, instances and modules, and through functions to what these close over and to the globals
that they name. It remembers the contents of each mutable object (by identity, not a copy of what is
inside), so it knows which objects have changed since, and can restore their contents.

Left as they are, and not walked into: instances of classes of torch and of the standard library
other than containers (locks, queues, threads and loggers are shared with others), parameters and
buffers of modules, and iterators, which cannot be reset.
"""

import collections
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar, copy_context
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from elbowroom.errors import PlanError
from elbowroom.runtime.storage import version_of

LARGE = 1 << 24  # bytes of a tensor that forward has in reach besides its arguments
SMALL = 1 << 16  # bytes of a tensor that is always copied
_MAX = 20_000  # objects of one walk; objects beyond this number are not seen
_ATOMS = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    )
)
_REGISTRIES = frozenset(vars(nn.Module()))  # what torch keeps in each module, "training" as well
_TABLES = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_modules")))
_TABLES_OF = itemgetter(*_TABLES)
_WALKED_OF_STDLIB = (
    *(collections.UserDict, collections.UserList, collections.ChainMap),
    *(types.SimpleNamespace, types.MappingProxyType),
)
_UNMADE = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class _Object(NamedTuple):
    """A mutable object, its kind, what it contained, and how to read and fill it."""

    it: Any
    kind: str
    contents: Any
    read: Callable[[Any], Any]
    fill: Callable[[Any, Any], None]

    @property
    def has_changed(self) -> bool:
        return not _same(self.read(self.it), self.contents)

    def restore(self) -> None:
        self.fill(self.it, self.contents)


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
        if not _same(attributes_of(self.it), self.attributes):
            return True
        tables = self.tables
        return any(
            not _same(dict(table), tables.get(name, _EMPTY))  # of TorchScript it is no dictionary
            for name, table in zip(_TABLES, _TABLES_OF(self.it), strict=True)
            if table or name in tables
        )

    def restore(self) -> None:
        set_attributes(self.it, self.attributes)
        for name in _TABLES:
            if not _same(dict(self.it[name]), self.tables.get(name, _EMPTY)):
                _fill_dict(self.it[name], self.tables.get(name, _EMPTY))


_EMPTY: dict[Any, Any] = {}


class Reach:
    """Objects and tensors that can be reached from `roots`, as they are now.

    tensors    all tensors but parameters and buffers of modules, with their versions
    iterators  number of iterators, which give their items only once
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._objects: list[_Object | _Module] = []
        self.tensors: list[tuple[Tensor, int]] = []
        self.iterators = 0
        self._walk(roots)

    def changed(self) -> list[str]:
        """The kinds of the objects, including tensors, that have changed."""
        found = [one.kind for one in self._objects if one.has_changed]
        return found + ["tensor" for x, version in self.tensors if version_of(x) != version]

    def restore(self) -> None:
        """Restores the contents of each changed object. Tensors are left as they are."""
        for one in self._objects:
            if one.has_changed:
                one.restore()

    def _walk(self, roots: Iterable[Any]) -> None:
        seen: dict[int, Any] = {}  # holds what it names: ids are not used again meanwhile
        todo = collections.deque(roots)
        while todo and len(seen) < _MAX:
            x = todo.popleft()
            if type(x) in _ATOMS or id(x) in seen:
                continue
            seen[id(x)] = x
            try:
                todo.extend(self._visited(x))
            except Exception:
                continue

    def _visited(self, x: Any) -> list[Any]:
        """Notes an object, and returns what it holds."""
        if isinstance(x, Tensor):
            if not isinstance(x, nn.Parameter):
                self.tensors.append((x, version_of(x)))
            return []
        if isinstance(x, nn.Module):
            self._module(x)
            return [v for n, v in vars(x).items() if n not in _REGISTRIES]
        if isinstance(x, _FUNCTIONS):
            return list(_held_by_function(x))
        if isinstance(x, ContextVar):
            return [x.get(None)]
        self.iterators += isinstance(x, collections.abc.Iterator)
        return list(self._other(x))

    def _module(self, module: nn.Module) -> None:
        """Walks a module's attributes and its tables of hooks and children."""
        if any(isinstance(p, _UNMADE) for p in _own_tensors(module)):
            return  # its first forward creates it, once for all
        held = vars(module)
        attributes = attributes_of(held)
        both = zip(_TABLES, _TABLES_OF(held), strict=True)
        tables = {name: dict(table) for name, table in both if table}
        self._objects.append(_Module(held, type(module).__name__, attributes, tables))

    def _other(self, x: Any) -> Iterator[Any]:
        """Notes a container or an instance, and returns what it holds."""
        if isinstance(x, list):
            yield from self._note(x, list.copy, _fill_list)
        elif isinstance(x, collections.deque):
            yield from self._note(x, list, _fill_deque)
        elif isinstance(x, dict):
            yield from self._note(x, _read_dict, _fill_dict).values()
        elif isinstance(x, set):
            yield from self._note(x, set.copy, _fill_set)
        elif isinstance(x, np.ndarray):
            if x.dtype != object and x.nbytes <= 1 << 20 and x.flags.writeable:
                self._note(x, _read_array, _fill_array)
            return
        elif isinstance(x, tuple | frozenset):
            yield from x
        elif isinstance(x, types.MappingProxyType):
            yield from x.values()
        if _is_walked(x):
            held = getattr(x, "__dict__", None)
            if type(held) is dict:
                yield from self._note(held, dict, _fill_dict, type(x).__name__).values()
            kind: Any = type(x)
            if _slots_of(kind):
                yield from self._note(x, _read_slots, _fill_slots).values()

    def _note(
        self,
        x: Any,
        read: Callable[[Any], Any],
        fill: Callable[[Any, Any], None],
        kind: str = "",
    ) -> Any:
        contents = read(x)
        self._objects.append(_Object(x, kind or type(x).__name__, contents, read, fill))
        return contents


class Values:
    """The current values of tensors, which restore tensors that are changed in place.

    No value is kept for a tensor that needs a gradient: its changes are part of a graph.
    """

    def __init__(
        self, tensors: Iterable[tuple[Tensor, int]], max_nbytes: int = sys.maxsize
    ) -> None:
        """tensors: with their versions. max_nbytes: larger ones are not copied."""
        self._tensors = [(x, version, _copy_of(x, max_nbytes)) for x, version in tensors]

    @property
    def nbytes(self) -> int:
        """The bytes of all copies."""
        return sum(nbytes_of(copy) for _, _, copy in self._tensors if copy is not None)

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
            if version_of(x) == version:
                continue
            if copy is None:
                raise PlanError(
                    "forward had to be run a second time, and the first has changed a tensor in "
                    f"place that needs a gradient, is large or is not strided, {tuple(x.shape)}; "
                    "that cannot be undone. Change a clone of it, or make it a buffer of a module."
                )
            x.copy_(copy)
            torch._C._autograd._unsafe_set_version_counter((x,), (version,))


def is_left_alone(x: Tensor, version: int, copy: Tensor | None) -> bool:
    """Returns whether a large tensor is unchanged since it had this version, and was copied."""
    if copy is None or nbytes_of(copy) <= SMALL or version_of(x) != version:
        return False
    if copy.layout is not torch.strided:
        return False
    with torch._C.DisableTorchFunction():
        return torch.equal(x, copy)


def behind_calls(module: nn.Module) -> list[Any]:
    """Returns the roots of all that a forward of this module may change besides its arguments.

    They are the module and all inside it, the functions of their forwards and hooks, and the
    context's variables.
    """
    children = list(module.modules())
    forwards = {type(child).forward for child in children if not _is_of_torch(type(child))}
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
    elif not _is_of_library(x.__module__):
        for cell in x.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from (x.__defaults__ or (), x.__kwdefaults__ or {})
        known = x.__globals__
        for name in _names_in(x.__code__):
            if name in known and not isinstance(known[name], nn.Module | types.ModuleType | type):
                yield known[name]


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (*code.co_names, *(name for c in inner for name in _names_in(c)))


def _is_walked(x: Any) -> bool:
    """Returns whether the attributes of this instance are walked."""
    if isinstance(x, _WALKED_OF_STDLIB):
        return True
    if isinstance(
        x, type | types.ModuleType | types.BuiltinFunctionType | collections.abc.Iterator
    ):
        return False
    return not _is_of_library(type(x).__module__)


@functools.lru_cache(4096)
def _is_of_library(module: str | None) -> bool:
    """Returns whether this is the name of a module of torch, of the standard library or of ours."""
    root = (module or "").partition(".")[0]
    if root == "__main__":
        return False
    return root in {"torch", "numpy", "elbowroom", ""} or root in sys.stdlib_module_names


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


@functools.cache
def _slots_of(cls: type) -> tuple[str, ...]:
    found: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _same(one: Any, other: Any) -> bool:
    """Returns whether two contents are of the same objects, in the same order."""
    if isinstance(one, dict):
        if len(one) != len(other):
            return False
        keys = zip(one, other, strict=True)
        same = all(k is j or bool(k == j) for k, j in keys)
        return same and all(map(_is_same, one.values(), other.values()))
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() == other.tobytes())
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(x: Any, y: Any) -> bool:
    """Returns whether x and y are the same object, or equal numbers or words."""
    return x is y or (type(x) is type(y) and type(x) in _ATOMS and (x == y or repr(x) == repr(y)))


def _fill_list(x: list[Any], contents: list[Any]) -> None:
    list.__setitem__(x, slice(None), contents)


def _fill_deque(x: "collections.deque[Any]", contents: list[Any]) -> None:
    x.clear()
    x.extend(contents)


def _read_dict(x: dict[Any, Any]) -> dict[Any, Any]:
    return dict(dict.items(x))


def _fill_dict(x: dict[Any, Any], contents: dict[Any, Any]) -> None:
    kind: Any = collections.OrderedDict if isinstance(x, collections.OrderedDict) else dict
    kind.clear(x)
    for key, value in contents.items():
        kind.__setitem__(x, key, value)


def _fill_set(x: set[Any], contents: set[Any]) -> None:
    set.clear(x)
    set.update(x, contents)


def _read_array(x: Any) -> Any:
    return x.copy()


def _fill_array(x: Any, contents: Any) -> None:
    x[...] = contents


def attributes_of(held: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a module, of its `vars`, without torch's registries of what it contains."""
    return {n: v for n, v in held.items() if n not in _REGISTRIES or n == "training"}


def set_attributes(held: dict[str, Any], contents: dict[str, Any]) -> None:
    """Makes the attributes of a module these, and no others."""
    for name in attributes_of(held).keys() - contents.keys():
        del held[name]
    held.update(contents)


def _read_slots(x: Any) -> dict[str, Any]:
    kind: Any = type(x)
    return {n: getattr(x, n) for n in _slots_of(kind) if hasattr(x, n)}


def _fill_slots(x: Any, contents: dict[str, Any]) -> None:
    for name in _read_slots(x).keys() - contents.keys():
        object.__delattr__(x, name)
    for name, value in contents.items():
        object.__setattr__(x, name, value)
