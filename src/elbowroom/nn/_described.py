"""Describes what a module's outputs depend on besides parameters, buffers and input.

    attributes -> plain values · tensors · containers · objects (a configuration)
    functions  -> source · defaults · what they close over
    hooks      -> functions; those that `register_module_forward_hook` has set, too

What describes it are texts and tensors. The texts are the same in another process, so that a
checksum of them can be stored.

Left out are names that begin with an underscore. Objects of the standard library and of torch, and
what a function closes over besides plain values, tensors and functions, stand with their class.
"""

import argparse
import enum
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    )
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OF_ALL, _OURS = "hooks of all modules", f"{__package__.partition('.')[0]}."
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_sources: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()

Parts = Iterator[str | Tensor]


def described(module: nn.Module) -> Iterator[tuple[str, list[str | Tensor]]]:
    """Yields the name of each module in it, with what describes that module.

    Then come hooks of all modules of the process, if there are any but those of elbowroom itself.
    """
    inside = {*module.modules()}
    for name, m in module.named_modules():
        yield name, [f"{type(m).__qualname__} {m.extra_repr()}", *_attributes(m, inside)]
    found = [*_hooks_of_all_modules(inside)]
    if found:
        yield _OF_ALL, found


def source_of(it: Any) -> str:
    """Returns the source of a class or function, or its name if it is torch's or has none."""
    if it not in _sources:
        _sources[it] = _read_source(it)
    return _sources[it]


def _read_source(it: Any) -> str:
    name = f"{it.__module__}.{it.__qualname__}"
    if name.startswith(("torch.", "builtins.")):
        return name
    code = getattr(it, "__code__", None)
    try:
        text = inspect.getsource(it)
    except (OSError, TypeError):
        text = name
        is_told = code is None
    else:
        is_told = not name.endswith("<lambda>")  # several may stand in one line
    if is_told or code is None:
        return text
    values = [c for c in code.co_consts if type(c) in _PLAIN]
    return f"{text} {code.co_code.hex()} {code.co_names} {values}"


def _attributes(m: nn.Module, inside: set[nn.Module]) -> Parts:
    own = {k: v for k, v in vars(m).items() if not k.startswith("_")}
    yield str({k: v for k, v in own.items() if type(v) in _PLAIN})
    for name, value in own.items():
        if type(value) not in _PLAIN:
            yield name
            yield from _value(value, inside, ())
    for table in _HOOKS:
        for hook in getattr(m, table).values():
            yield table
            yield from _value(hook, inside, ())


def _hooks_of_all_modules(inside: set[nn.Module]) -> Parts:
    for table in _HOOKS:
        for hook in getattr(torch.nn.modules.module, f"_global{table}").values():
            if not str(getattr(hook, "__module__", "")).startswith(_OURS):
                yield table
                yield from _value(hook, inside, ())


def _value(x: Any, inside: set[nn.Module] | None, path: tuple[int, ...]) -> Parts:
    """Yields what describes a value.

    inside: the modules that are described by themselves; None: objects stand with their class
    path: ids of the objects that it was reached through, so that a cycle ends
    """
    if type(x) in _PLAIN or isinstance(x, enum.Enum):
        yield repr(x)
        return
    yield f"{type(x).__module__}.{type(x).__qualname__}"
    if id(x) in path:
        return
    path = (*path, id(x))
    if isinstance(x, Tensor):
        yield f"{x.dtype} {tuple(x.shape)}"
        yield x
    elif isinstance(x, np.ndarray):
        yield f"{x.dtype} {x.shape} {blake2b(x.tobytes(), digest_size=16).hexdigest()}"
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from _value(key, inside, path)
            yield from _value(value, inside, path)
    elif isinstance(x, list | tuple):
        for value in x:
            yield from _value(value, inside, path)
    elif isinstance(x, set | frozenset):
        yield str(sorted(map(repr, x)))
    elif isinstance(x, functools.partial):
        yield from _value((x.func, x.args, x.keywords), inside, path)
    elif isinstance(x, types.MethodType):
        yield from _value((x.__func__, x.__self__), inside, path)
    elif isinstance(x, types.FunctionType):
        yield source_of(x)
        held = [x.__defaults__, x.__kwdefaults__, *map(_content, x.__closure__ or ())]
        yield from _value(held, None, path)
    elif isinstance(x, type):
        yield source_of(x)
    elif isinstance(x, nn.Module):
        if inside is not None and x not in inside:  # of a list of the user's
            for name, state in x.state_dict(keep_vars=True).items():
                yield name
                yield from _value(state, inside, path)
            for m in x.modules():
                yield from _attributes(m, inside | {*x.modules()})
    elif inside is not None and hasattr(x, "__dict__") and not _is_of_libraries(x):
        for name, value in vars(x).items():
            if not name.startswith("_"):
                yield name
                yield from _value(value, inside, path)
    elif hasattr(x, "__name__"):  # a function of a library's C code
        yield f"{getattr(x, '__module__', '')}.{x.__name__}"


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _is_of_libraries(x: object) -> bool:
    """Returns whether it is of a class of the standard library or of torch, as locks are."""
    package = type(x).__module__.partition(".")[0]
    is_library = package == "torch" or package in sys.stdlib_module_names - {"__main__"}
    return is_library and type(x) not in _NAMESPACES
