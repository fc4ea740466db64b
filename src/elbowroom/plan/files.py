"""Profiles and plans as JSON files, which are replaced whole and checked when they are read."""

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite, isnan
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from elbowroom.errors import DataError
from elbowroom.files import write_text

T = TypeVar("T")


def write(path: str | Path, data: dict[str, Any]) -> None:
    """Writes JSON so that a crash leaves the file that was there, and never half of one."""
    write_text(json.dumps(data), path)


def made(kind: Callable[..., T], data: dict[str, Any]) -> T:
    """The dataclass `kind` of these fields. Raises ValueError that names one of a wrong type."""
    types: dict[str, Any] = {field.name: field.type for field in fields(cast(Any, kind))}
    for name, value in data.items():
        known = _TYPES.get(types.get(name))
        if known is not None and not known[0](value):
            raise ValueError(f"{name} is {value!r}, and should be {known[1]}")
    return kind(**data)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not isnan(value)


_TYPES: dict[Any, tuple[Callable[[object], bool], str]] = {  # whole numbers: of bytes or steps
    int: (_is_count, "a whole number of 0 or more"),
    float: (_is_real, "a number"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    str: (lambda value: isinstance(value, str), "a string"),
}


def check_types(record: Any) -> None:
    """Raises ValueError where a field, however deep, is not of the type that its class declares.

    Of dataclasses and named tuples, and of tuples, dicts and unions in them. A number is finite.
    """
    whole: Any = type(record)
    for name, kind in _hints(whole).items():
        value = getattr(record, name)
        if not _is_of(value, kind):
            shown = f"{value!r:.40}" if isinstance(value, int | float | str) else type(value)
            raise ValueError(f"{name} is {shown}, and should be of type {kind}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    is_named = issubclass(kind, tuple)
    return hints if is_named else {one.name: hints[one.name] for one in fields(kind)}


def _is_of(value: Any, kind: Any) -> bool:
    if kind is int:
        return type(value) is int
    if kind is float:
        return type(value) in (int, float) and isfinite(value)
    origin, of = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_is_of(value, one) for one in of)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = of[:1] * len(value) if of[-1] is ... else of
        return len(kinds) == len(value) and all(map(_is_of, value, kinds))
    if origin is dict:
        return isinstance(value, dict) and all(
            _is_of(key, of[0]) and _is_of(one, of[1]) for key, one in value.items()
        )
    if not isinstance(value, NoneType if kind is None else kind):
        return False
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        check_types(value)
    return True


def _whole(text: str) -> int:
    """Reads a whole number that is one of bytes, moments or steps: no larger than memory can be."""
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{text[:20]}... is too large for a number of bytes")
    return number


def read(path: str | Path, kind: str, version: int, make: Callable[[dict[str, Any]], T]) -> T:
    """Returns what `make` makes of the data. kind: "plan", whose version is under "elbowroom_plan".

    Raises DataError for a file that is missing, of another version, or not what `make` takes.
    """
    try:
        data = json.loads(Path(path).read_text(), parse_int=_whole)
        found = data.pop(f"elbowroom_{kind}", None)
        other = next((key for key in data if found is None and key.startswith("elbowroom_")), "")
        if other:
            raise DataError(
                f"{path} is a {other.removeprefix('elbowroom_')}, not a {kind}; "
                f"`elbowroom {kind}` makes one"
            )
        if found is None:
            raise DataError(
                f"{path} is not a {kind} written by elbowroom; `elbowroom {kind}` makes one"
            )
        if found != version:
            raise DataError(
                f"{path} is a {kind} of version {found}; this elbowroom reads version {version}. "
                "Make it again."
            )
        return make(data)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        is_binary = isinstance(error, UnicodeDecodeError)  # whose repr has the whole file
        why = "it is not text" if is_binary else repr(error)
        if isinstance(error, json.JSONDecodeError):
            why = f"it is not JSON: {error}"
        raise DataError(
            f"{path} is not a {kind} written by elbowroom ({why}); `elbowroom {kind}` makes one"
        ) from error
