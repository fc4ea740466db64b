"""This module reads, compares and puts back what mutable objects contain.

Each kind of object has an `Access`, by which `reach.py` remembers and restores it.
"""

import collections
import functools
import gc
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from elbowroom.runtime.generators import same_state, set_state, state_of

ATOMS = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    )
)
_FLOATS = (float, complex)
_LINK = "_lru_list_elem"  # in which a `functools.lru_cache` with a limit has each result
REGISTRIES = frozenset(vars(nn.Module()))  # what torch keeps in each module, "training" as well


@functools.cache
def slots_of(cls: Any) -> tuple[str, ...]:
    """Returns the names of the slots of a class."""
    found: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def same(one: Any, other: Any) -> bool:
    """Returns whether two contents are of the same objects, in the same order."""
    if isinstance(one, bytes):
        return bool(one == other)
    if isinstance(one, dict):
        if len(one) != len(other):
            return False
        keys = zip(one, other, strict=True)
        same = all(k is j or bool(k == j) for k, j in keys)
        return same and all(map(is_same, one.values(), other.values()))
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() == other.tobytes())
    return len(one) == len(other) and all(map(is_same, one, other))


class Access(NamedTuple):
    """How objects of a kind are read, filled and compared.

    read  returns the contents: by identity, not a copy of what is inside
    fill  makes an object contain just these
    same  returns whether two contents are equal
    """

    read: Callable[[Any], Any]
    fill: Callable[[Any, Any], None]
    same: Callable[[Any, Any], bool] = same


def is_same(x: Any, y: Any) -> bool:
    """Returns whether x and y are the same object, or equal numbers or words."""
    return x is y or (type(x) in ATOMS and are_equal(x, y))


def are_equal(x: Any, y: Any) -> bool:
    """Returns whether constants are of one type and have one value: 0.0 is not -0.0, NaN is NaN."""
    kind: Any = type(x)
    if kind is not type(y):
        return False
    return repr(x) == repr(y) if kind in _FLOATS else bool(x == y)


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


def _read_cell(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not filled yet
        return ()


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    if contents:
        (cell.cell_contents,) = contents
    else:
        del cell.cell_contents


def _read_class(cls: type) -> dict[str, Any]:
    """Returns the attributes of a class that are data: no methods, properties or slots."""
    return {
        name: x
        for name, x in vars(cls).items()
        if not (name.startswith("__") or hasattr(type(x), "__get__") or isinstance(x, type))
    }


def _fill_class(cls: type, contents: dict[str, Any]) -> None:
    now = _read_class(cls)
    for name in now.keys() - contents.keys():
        delattr(cls, name)
    for name, x in contents.items():
        if name not in now or now[name] is not x:
            setattr(cls, name, x)


def _read_variable(x: "ContextVar[Any]") -> tuple[Any, ...]:
    try:
        return (x.get(),)
    except LookupError:
        return ()


def _fill_variable(x: "ContextVar[Any]", contents: tuple[Any, ...]) -> None:
    if contents:
        x.set(*contents)


def _read_bytes(x: Any) -> bytes:
    return memoryview(x).tobytes()


def _fill_bytes(x: Any, contents: bytes) -> None:
    if isinstance(x, memoryview):
        x.cast("B")[:] = contents
    elif isinstance(x, bytearray):
        x[:] = contents
    else:
        del x[:]
        x.frombytes(contents)


def _read_stream(x: Any) -> tuple[Any, ...]:
    return () if x.closed else (x.getvalue(), x.tell())


def _fill_stream(x: Any, contents: tuple[Any, ...]) -> None:
    value, place = contents
    x.seek(0)
    x.truncate()
    x.write(value)
    x.seek(place)


def _read_array(x: Any) -> Any:
    return x.copy()


def _fill_array(x: Any, contents: Any) -> None:
    x[...] = contents


def _read_slots(x: Any) -> dict[str, Any]:
    kind: Any = type(x)
    return {n: getattr(x, n) for n in slots_of(kind) if hasattr(x, n)}


def _fill_slots(x: Any, contents: dict[str, Any]) -> None:
    for name in _read_slots(x).keys() - contents.keys():
        object.__delattr__(x, name)
    for name, value in contents.items():
        object.__setattr__(x, name, value)


def _entries_of(cache: Any) -> dict[Any, Any] | None:
    """Returns the table of a `functools.lru_cache`, which it does not give; None: not found."""
    own = getattr(cache, "__dict__", None)
    found = [x for x in gc.get_referents(cache) if type(x) is dict and x is not own]
    if len(found) > 1:  # results may be dictionaries, too
        found = [x for x in found if {type(y).__name__ for y in x.values()} == {_LINK}]
    size = cache.cache_info().currsize
    return found[0] if len(found) == 1 and len(found[0]) == size else None


def _read_cache(x: Any) -> Any:
    """Returns what a `functools.lru_cache` has; the number of results, where it has no table."""
    entries = _entries_of(x)
    return x.cache_info().currsize if entries is None else entries.copy()


def _fill_cache(x: Any, held: Any) -> None:
    """Drops what came in; what a full one has lost since stays lost."""
    if not held:
        x.cache_clear()
    elif (entries := _entries_of(x)) is not None and type(held) is dict:
        known = set(map(id, held))
        for key in [key for key in entries if id(key) not in known]:
            del entries[key]


def _same_cache(one: Any, other: Any) -> bool:
    if type(one) is dict and type(other) is dict:
        return len(one) == len(other) and all(map(is_, one, other))
    return bool(one == other)


def _set_event(x: threading.Event, is_set: bool) -> None:
    if is_set:
        x.set()
    else:
        x.clear()


def attributes_of(held: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a module, of its `vars`, without torch's registries of what it contains."""
    return {n: v for n, v in held.items() if n not in REGISTRIES or n == "training"}


def set_attributes(held: dict[str, Any], contents: dict[str, Any]) -> None:
    """Makes the attributes of a module these, and no others."""
    for name in attributes_of(held).keys() - contents.keys():
        del held[name]
    held.update(contents)


CELL = Access(_read_cell, _fill_cell)
CLASS = Access(_read_class, _fill_class)
VARIABLE = Access(_read_variable, _fill_variable)
BYTES = Access(_read_bytes, _fill_bytes)
STREAM = Access(_read_stream, _fill_stream)
ARRAY = Access(_read_array, _fill_array)
SLOTS = Access(_read_slots, _fill_slots)
LIST = Access(list.copy, _fill_list)
DEQUE = Access(list, _fill_deque)
DICT = Access(_read_dict, _fill_dict)
SET = Access(set.copy, _fill_set)
ATTRIBUTES = Access(attributes_of, set_attributes)
CACHE = Access(_read_cache, _fill_cache, _same_cache)
EVENT = Access(threading.Event.is_set, _set_event, is_)
GENERATOR = Access(state_of, set_state, same_state)
