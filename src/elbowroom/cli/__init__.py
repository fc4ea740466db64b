"""The command `elbowroom`, which needs no line of code.

    elbowroom demo        train on real data, plainly and through elbowroom, and compare
    elbowroom run         train an unchanged script inside a budget
    elbowroom profile     show where the memory of a script goes: a table and a page
    elbowroom plan        estimate whether a budget can be met, and at what cost
    elbowroom snapshot    show what a memory snapshot of PyTorch says
    elbowroom codecs      list the codecs
    elbowroom doctor      show what this machine has, and what that means

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 2 a mistake that one line
on stderr explains, 3 a budget that is too small, 4 a budget that `run` did not keep, 130 stopped by
the user; `run` keeps the exit code of its script. A traceback means a bug of elbowroom or of that
script.
"""

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated

import typer

from elbowroom import __version__
from elbowroom.cli.codecs import codecs
from elbowroom.cli.demo import demo
from elbowroom.cli.doctor import doctor
from elbowroom.cli.plan import plan
from elbowroom.cli.profile import profile
from elbowroom.cli.run import run
from elbowroom.cli.script import PASSED_ON
from elbowroom.cli.snapshot import snapshot

app = typer.Typer(
    name="elbowroom",
    help="Train the PyTorch model that you already have inside a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"elbowroom {__version__}")
        raise typer.Exit


@app.callback()
def elbowroom(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Parses the options before a command."""


def _help_of(command: Callable[..., None]) -> str:
    """Returns a docstring with one line a paragraph, which typer wraps to the terminal's width."""
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


for command in (demo, run, profile, plan, snapshot, codecs, doctor):
    passed_on = PASSED_ON if command in (run, profile) else None
    app.command(help=_help_of(command), context_settings=passed_on)(command)


def main() -> None:
    """The entry point of the script `elbowroom`."""
    app()
