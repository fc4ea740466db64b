"""Profiles and plans as JSON files: written aside first, and read with suspicion."""

import json
from collections.abc import Callable
from dataclasses import fields
from math import isnan
from pathlib import Path
from typing import Any, TypeVar, cast

from elbowroom.errors import DataError
from elbowroom.files import write_text

T = TypeVar("T")


def write(path: str | Path, data: dict[str, Any]) -> None:
    """Write JSON so that a crash leaves the file that was there, and never half of one."""
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


def read(path: str | Path, kind: str, version: int, make: Callable[[dict[str, Any]], T]) -> T:
    """Returns what `make` makes of the data. kind: "plan", whose version is under "elbowroom_plan".

    Raises DataError for a file that is missing, of another version, or not what `make` takes.
    """
    try:
        data = json.loads(Path(path).read_text())
        found = data.pop(f"elbowroom_{kind}")
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
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"{path} is not a {kind} written by elbowroom ({error!r})") from error
