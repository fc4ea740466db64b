"""Runs a user's script as Python would: as `__main__`, with its own arguments and folder.

It ends with an exit code, and a traceback of the script shows only the script's own frames.
"""

import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from elbowroom.errors import DataError

Script = Annotated[Path, typer.Argument(help="The script to run.", show_default=False)]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ARGS]", help="The script's own arguments.", show_default=False),
]
IsModule = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")
]
PASSED_ON = {"allow_interspersed_args": False}  # what follows the script is not ours to read
_PACKAGE = str(Path(__file__).parents[1])


class NoScript(DataError):
    """Raised if there is no such script or module."""


def check_script(path: Path, *, is_module: bool = False) -> None:
    """Raises NoScript if `path` is not a script, or not a module that can be found from here."""
    if is_module:
        with _stage([str(path)], Path.cwd()):
            if path.is_file() or not _is_found(str(path).partition(".")[0]):
                raise NoScript(_no_module(str(path)))
    elif path.is_dir():
        raise NoScript(f"{path} is a folder; name the script in it, or a package by -m")
    elif not path.is_file():
        raise NoScript(f"there is no script {path} (looked in {Path.cwd()})")
    elif path.suffix == ".ipynb":  # JSON, which Python would often run as an expression
        raise NoScript(
            f"{path} is a notebook; make a script of it, as by "
            f"`jupyter nbconvert --to script {path}`, or call er.fit in it"
        )


def run_script(path: Path, arguments: list[str], *, is_module: bool = False) -> int:
    """Runs a script and returns the exit code that it would have under `python`.

    Errors of the script are passed on. Raises NoScript if a package has no such module.

    arguments  everything that follows the script; a first "--" does not belong to the script
    is_module  whether the script is the name of a module, as for "python -m"
    """
    given = arguments[1:] if arguments[:1] == ["--"] else arguments
    folder = Path.cwd() if is_module else path.resolve().parent
    sys.excepthook = sys.__excepthook__  # typer has one of its own, which the script must not see
    with _stage([str(path), *given], folder):
        try:
            if not is_module:
                # `__file__` is absolute, as under `python`: a script may change the folder
                runpy.run_path(os.path.abspath(path), run_name="__main__")
            elif _can_run(str(path)):
                runpy.run_module(str(path), run_name="__main__", alter_sys=True)
            else:
                raise NoScript(_no_module(str(path)))
        except SystemExit as end:
            return exit_code(end)
    return 0


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # of a name that is none, such as "train/"
        return False


def _can_run(module: str) -> bool:
    """Returns whether there is such a module, or a package with a module `__main__`.

    Imports the packages that contain it.
    """
    if not _is_found(module):
        return False
    spec = importlib.util.find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    return not is_package or _is_found(f"{module}.__main__")


def _no_module(name: str) -> str:
    hint = f"; leave out -m to run the file {name}" if Path(name).is_file() else ""
    looked = f"looked in {Path.cwd()} and on Python's path"
    return f"there is no module '{name}' that can be run ({looked}){hint}"


def exit_code(end: SystemExit) -> int:
    """Returns the exit code of a SystemExit.

    None means 0, and a number is the exit code itself. Anything else is printed, and means 1.
    """
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    typer.echo(str(end.code), err=True)
    return 1


def show_traceback(error: BaseException) -> None:
    """Prints the traceback that Python would print: from the first frame of the script on.

    A `sys.excepthook` of the script's own is called instead, as Python would call it.
    """
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(type(error), error, frames)
    else:
        sys.excepthook(type(error), error.with_traceback(frames), frames)


def _is_ours(filename: str) -> bool:
    """Returns whether a frame above the script belongs to the code that runs the script."""
    return filename.startswith(("<frozen", _PACKAGE)) or filename == runpy.__file__


@contextmanager
def _stage(argv: list[str], folder: Path) -> Iterator[None]:
    before, folders = sys.argv, list(sys.path)
    sys.argv = argv
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before, folders
