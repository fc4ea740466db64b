"""`elbowroom snapshot`: what a memory snapshot of PyTorch says."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import elbowroom as er
from elbowroom.cli.mistakes import check_writable, says_mistakes, tell_path
from elbowroom.files import write_text
from elbowroom.report import render_profile, snapshot_page
from elbowroom.waiting import waiting

File = Annotated[
    Path,
    typer.Argument(
        metavar="SNAPSHOT.pickle", help="A file that torch.cuda.memory._dump_snapshot wrote."
    ),
]
Html = Annotated[
    Path | None, typer.Option(help="Write the page to this file; by default beside the snapshot.")
]
Device = Annotated[
    int | None, typer.Option(help="The index of the GPU; by default the one with the highest peak.")
]


@says_mistakes
def snapshot(file: File, html: Html = None, device: Device = None) -> None:
    """Show what a memory snapshot of PyTorch contains at its peak, and write a page of it.

    The file is read without running any of its code. Exit code: 0; 2 if the file is no snapshot.
    """
    page = html or file.parent / f"{file.stem}.html"  # a folder such as "." has no suffix
    check_writable(page, "--html", file)
    with waiting("the snapshot is read"):
        found = er.load_snapshot(file, device)
    write_text(render_profile(snapshot_page(found, file.name)), page)
    Console().print(str(found), soft_wrap=True, highlight=False, markup=False)
    tell_path("Page:", page)
