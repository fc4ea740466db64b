"""`elbowroom codecs`: every registered codec, from its own class."""

import dataclasses

from rich.console import Console
from rich.table import Table
from rich.text import Text

import elbowroom as er
from elbowroom.cli.mistakes import says_mistakes


@says_mistakes
def codecs() -> None:
    """List the codecs, which store a tensor in fewer bytes."""
    table = Table(show_lines=True)
    for name in ("codec", "fields"):  # to be typed
        table.add_column(name, no_wrap=True)
    for name in ("what it does", "dtypes"):
        table.add_column(name, overflow="fold")
    for name in er.codecs():
        table.add_row(*(Text(cell) for cell in _cells(er.codec(name))))
    Console().print(table)


def _cells(codec: object) -> tuple[str, str, str, str]:
    """Returns one row: id, fields with defaults, first line of the docstring, dtypes."""
    fields = "\n".join(
        f"{field.name}={getattr(codec, field.name)!r}"
        for field in dataclasses.fields(codec)  # type: ignore[arg-type]
        if field.init
    )
    dtypes = getattr(codec, "dtypes", None) or ()
    return (
        str(getattr(codec, "id", type(codec).__name__)),
        fields,
        (type(codec).__doc__ or "").strip().split("\n")[0],
        ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "any",
    )
