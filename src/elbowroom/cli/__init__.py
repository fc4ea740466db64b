"""The command `elbowroom`: what the library can do, without writing a line.

    elbowroom demo        train on real data, plain and through elbowroom, and compare
    elbowroom run         train a script of yours, as it is, inside a budget
    elbowroom profile     where the memory of a script of yours goes: a table and a page
    elbowroom plan        a dry run: would a budget be met, at what cost
    elbowroom snapshot    what a memory snapshot of PyTorch's says
    elbowroom codecs      what can hold a tensor in fewer bytes
    elbowroom doctor      what this machine has, and what that means

stdout carries results, stderr progress and complaints. Exit codes: 0 done, 2 a mistake that one
line on stderr explains, 3 a budget that is too small, 4 a budget that `run` did not keep,
130 stopped by the user; `run` keeps the code of its script. A traceback means a bug of ours, or of
that script.
"""

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
    help="Elbow room for training: less memory for the model you already have.",
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
    """Parses the options that stand before a command."""


app.command()(demo)
app.command(context_settings=PASSED_ON)(run)
app.command(context_settings=PASSED_ON)(profile)
for command in (plan, snapshot, codecs, doctor):
    app.command()(command)


def main() -> None:
    """The entry point of the script `elbowroom`."""
    app()
