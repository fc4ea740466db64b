"""Errors of the command line: one line and exit code 2, or 3 for a budget that is too small."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from elbowroom.errors import BudgetTooSmall, DataError, ElbowroomError
from elbowroom.files import partial_path
from elbowroom.units import budget_argument, show_at_least

P = ParamSpec("P")


def says_mistakes(command: Callable[P, None]) -> Callable[P, None]:
    """Decorator that turns errors that a user can cause into a line on stderr.

    The signature of the command stays the same, because typer reads it.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BudgetTooSmall as error:
            mistake(on_the_command_line(error))
            raise typer.Exit(3) from None
        except (ElbowroomError, ValueError, OSError) as error:
            mistake(str(error))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("elbowroom: stopped", err=True)
            raise typer.Exit(130) from None

    return run


def mistake(message: str) -> None:
    """Prints one line on stderr."""
    typer.echo(f"elbowroom: {' '.join(message.split())}", err=True)


def on_the_command_line(error: BudgetTooSmall) -> str:
    """Returns the message of a refusal, with its remedies as options of the command line."""
    message = str(error).replace("with exact=None", "by leaving out --exact")
    message = message.replace("with offload='file'", "by --offload file")
    typed = typed_budget(error.least_nbytes)
    return message.replace(budget_argument(error.least_nbytes), f"--budget {typed}")


def typed_budget(nbytes: int) -> str:
    """Returns a size, rounded up, as it is typed behind --budget: "9.031MiB"."""
    return show_at_least(nbytes).replace(" ", "")


def check_writable(out: Path, option: str, *others: Path | None) -> None:
    """Raises DataError if a result cannot be written, before the work begins.

    others: files that the command reads, or writes elsewhere; `out` must not replace them.
    """
    if out.is_dir():
        raise DataError(f"{option} {out} is a folder; name a file in it")
    if out.exists() and not out.is_file():
        return  # a device, or a pipe
    try:
        real = out.resolve()
        read = [other for other in others if other is not None and other.resolve() == real]
    except (OSError, RuntimeError) as error:  # a link that leads to itself
        raise DataError(f"cannot write {option} {out}: {error}") from error
    if read:
        raise DataError(f"{option} {out} would replace {read[0]}; name another file")
    probe = partial_path(real)
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DataError(
            f"cannot write {option} {out}: no folder {real.parent} that can be written to "
            f"({error.strerror})"
        ) from error


def tell_path(what: str, path: Path | str) -> None:
    """Prints a path on stderr. Brackets in it are not markup."""
    errors_console().print(Text.assemble((what, "dim"), f" {path}"), soft_wrap=True)


def errors_console() -> Console:
    """A rich console on stderr, so that stdout carries results only."""
    return Console(stderr=True)
