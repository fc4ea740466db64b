"""Running somebody's script as Python would: as `__main__`, with its own arguments and folder.

How it ends is a code, as a shell sees it; a traceback that it causes shows its own frames only.
"""

import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from elbowroom.errors import DataError

Script = Annotated[
    Path, typer.Argument(help="The script, as python would get it.", show_default=False)
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ARGS]", help="The script's own arguments.", show_default=False),
]
PASSED_ON = {"allow_interspersed_args": False}  # what follows the script is not ours to read


def check_script(path: Path) -> None:
    """Raises DataError for what is no script."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name the script in it")
    if not path.is_file():
        raise DataError(f"there is no script {path} (looked in {Path.cwd()})")


def run_script(path: Path, arguments: list[str]) -> int:
    """Runs a script and returns the exit code that it would have had under `python`.

    Errors of the script are passed on.

    arguments  all that follows the script; a first "--" is not the script's
    """
    with _stage(path, arguments[1:] if arguments[:1] == ["--"] else arguments):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return exit_code(end)
    return 0


def exit_code(end: SystemExit) -> int:
    """Returns the exit code of a SystemExit.

    None is 0, a number itself; anything else is printed, and is 1.
    """
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    typer.echo(str(end.code), err=True)
    return 1


def show_traceback(error: BaseException, path: Path) -> None:
    """Prints what Python would have printed."""
    frames = error.__traceback__
    while frames is not None and not _is_in(frames, path):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames or error.__traceback__)


def _is_in(frames: TracebackType, path: Path) -> bool:
    return frames.tb_frame.f_code.co_filename == str(path)


@contextmanager
def _stage(path: Path, arguments: list[str]) -> Iterator[None]:
    argv, folders = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, folders
