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
    typer.Argument(metavar="SNAPSHOT.pickle", help="What torch.cuda.memory._dump_snapshot wrote."),
]
Html = Annotated[Path | None, typer.Option(help="Where the page goes; by default beside the file.")]
Device = Annotated[int | None, typer.Option(help="The GPU; by default the one that held most.")]


@says_mistakes
def snapshot(file: File, html: Html = None, device: Device = None) -> None:
    """Show what a memory snapshot of PyTorch holds at its peak, and write a page of it.

    The file is read without running any code of it. Exit code: 0; 2 for what is no snapshot.
    """
    page = html or file.with_suffix(".html")
    check_writable(page, "--html", file)
    with waiting("the snapshot is read"):
        found = er.load_snapshot(file, device)
    write_text(render_profile(snapshot_page(found, file.name)), page)
    Console().print(str(found), soft_wrap=True, highlight=False, markup=False)
    tell_path("Page:", page)
