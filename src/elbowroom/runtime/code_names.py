"""Names in the code of functions and classes: what a forward may read, set and call.

Code that looks names up as words (`globals()["count"]`, `getattr(x, "count")`) counts as naming
each word that stands in it.
"""

import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

CACHED: Any = functools._lru_cache_wrapper
_SETS = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR")
_OPCODES = frozenset(dis.opmap[name] for name in _SETS)
_LOADS = ("LOAD_METHOD", "LOAD_ATTR")
_SETS_BY_WORD = frozenset(("globals", "vars", "__dict__", "setattr", "__setattr__"))
_BY_WORD = _SETS_BY_WORD | {"getattr", "modules", "import_module", "__import__"}


def held_by_function(x: Any) -> Iterator[Any]:
    """Yields a function's closure, its defaults, and the globals that it names."""
    if isinstance(x, functools.partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, types.MethodType):
        yield from (x.__func__, x.__self__)
    elif is_of_program(x):
        yield from x.__closure__ or ()
        yield from (x.__defaults__ or (), x.__kwdefaults__ or {})
        yield from named_in(x.__globals__, x.__code__)


def named_in(known: dict[str, Any], code: types.CodeType) -> Iterator[Any]:
    """Yields the globals that a function names, among these."""
    for name in names_in(code):
        if name not in known or isinstance(known[name], nn.Module | types.ModuleType):
            continue
        if isinstance(known[name], type):
            yield from own_classes(known[name])
        else:
            yield known[name]


def namespaces(x: Any) -> list[dict[str, Any]]:
    """Returns the globals of a function, and those of other Python modules that its code names."""
    found = [x.__globals__]
    for known in found:
        for name in names_in(x.__code__):
            one = known.get(name, sys.modules.get(name))  # which it may import
            if isinstance(one, types.ModuleType) and not is_of_library(one.__name__):
                held = vars(one)
                if all(held is not other for other in found):
                    found.append(held)
    return found


@functools.lru_cache(4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names in a function, and in those inside it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    words = () if _BY_WORD.isdisjoint(code.co_names) else _words_in(code)
    return (*code.co_names, *words, *(name for c in inner for name in names_in(c)))


@functools.lru_cache(4096)
def names_set_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals and attributes that a function, or one inside it, sets."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    own = []
    if not _OPCODES.isdisjoint(code.co_code[::2]):  # most set none, and to disassemble takes long
        own += [i.argval for i in dis.get_instructions(code) if i.opname in _SETS]
    own += [] if _SETS_BY_WORD.isdisjoint(code.co_names) else _words_in(code)
    return tuple({*own, *(name for c in inner for name in names_set_in(c))})


@functools.lru_cache(4096)
def sets_by_word(code: types.CodeType) -> bool:
    """Returns whether a function, or one inside it, may set names that its code does not spell."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return not _SETS_BY_WORD.isdisjoint(code.co_names) or any(map(sets_by_word, inner))


@functools.lru_cache(4096)
def sets_events(code: types.CodeType) -> bool:
    """Returns whether a function, or one inside it, calls a method `set` or `clear`."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    if not {"set", "clear"}.isdisjoint(code.co_names) and any(
        i.opname in _LOADS and i.argval in ("set", "clear") for i in dis.get_instructions(code)
    ):
        return True
    return any(map(sets_events, inner))


def _words_in(code: types.CodeType) -> list[str]:
    """Returns the words among a function's constants, names of keywords among them."""
    found = []
    for x in code.co_consts:
        each = x if type(x) is tuple else (x,)
        found += [word for word in each if type(word) is str and word.isidentifier()]
    return found


@functools.lru_cache(4096)
def own_classes(cls: Any) -> tuple[type, ...]:
    """Returns a class and those that it is derived from, but for those of libraries."""
    return tuple(one for one in cls.__mro__ if not is_of_library(one.__module__))


@functools.lru_cache(4096)
def own_methods(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the functions by which a class defines methods and properties, with their names."""
    own = {n: getattr(x, "__func__", getattr(x, "fget", x)) for n, x in vars(cls).items()}
    return tuple((n, x) for n, x in own.items() if isinstance(x, types.FunctionType | CACHED))


@functools.lru_cache(4096)
def methods_of(cls: Any, forward: Any) -> tuple[Any, ...]:
    """Returns the forward of a class of modules, and the methods that it calls, and so on."""
    found: dict[Any, None] = {forward: None}
    waiting = list(found)
    while waiting:
        code = getattr(waiting.pop(), "__code__", None)
        names = () if code is None else names_in(code)
        methods = [getattr(cls, name, None) for name in names]
        new = [x for x in methods if isinstance(x, types.FunctionType | CACHED) and x not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return tuple(found)


@functools.lru_cache(4096)
def names_of(cls: Any, forward: Any) -> frozenset[str]:
    """Returns the names that the forward of a class of modules uses, and the methods it calls."""
    codes = [getattr(one, "__code__", None) for one in methods_of(cls, forward)]
    return frozenset(name for code in codes if code is not None for name in names_in(code))


@functools.lru_cache(4096)
def is_of_library(module: str | None) -> bool:
    """Returns whether this is the name of a module of torch, of the standard library or of ours."""
    root = (module or "").partition(".")[0]
    if root == "__main__":
        return False
    return root in {"torch", "numpy", "elbowroom", ""} or root in sys.stdlib_module_names


def is_of_program(function: Any) -> bool:
    """Returns whether a function is of no such module, whatever `functools.wraps` has named it."""
    return not is_of_library(function.__globals__.get("__name__"))
