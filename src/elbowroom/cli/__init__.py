"""The command `elbowroom`: what the library can do, without writing a line.

    elbowroom demo        train on real data, plain and through elbowroom, and compare
    elbowroom codecs      what can hold a tensor in fewer bytes
    elbowroom doctor      what this machine has, and what that means

stdout carries results, stderr progress and complaints. Exit codes: 0 done, 2 a mistake that one
line on stderr explains, 130 stopped by the user. A traceback means a bug of ours.
"""

import typer

from elbowroom.cli.codecs import codecs
from elbowroom.cli.demo import demo
from elbowroom.cli.doctor import doctor

app = typer.Typer(
    name="elbowroom",
    help="Elbow room for training: less memory for the model you already have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, codecs, doctor):
    app.command()(command)


def main() -> None:
    """The entry point of the script `elbowroom`."""
    app()
