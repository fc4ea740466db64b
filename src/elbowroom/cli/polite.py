"""Mistakes end with one line and exit code 2, never with a traceback."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer
from rich.console import Console

from elbowroom.errors import ElbowroomError

P = ParamSpec("P")


def polite(command: Callable[P, None]) -> Callable[P, None]:
    """Turn errors that a user can cause into a line on stderr. The signature stays, for typer."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (ElbowroomError, ValueError, OSError) as error:
            message = " ".join(str(error).split())
            typer.echo(f"elbowroom: {message}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("elbowroom: stopped; nothing was written", err=True)
            raise typer.Exit(130) from None

    return run


def errors_console() -> Console:
    """A rich console on stderr, so that stdout carries results only."""
    return Console(stderr=True)
