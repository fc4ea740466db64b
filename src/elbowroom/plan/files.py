"""Profiles and plans as JSON files: written aside first, and read with suspicion."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from elbowroom.errors import DataError
from elbowroom.files import write_text

T = TypeVar("T")


def write(path: str | Path, data: dict[str, Any]) -> None:
    """Write JSON so that a crash leaves the file that was there, and never half of one."""
    write_text(json.dumps(data), path)


def read(path: str | Path, kind: str, version: int, make: Callable[[dict[str, Any]], T]) -> T:
    """What `make` makes of the data. kind: "plan", whose version is under "elbowroom_plan".

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
