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
    table.add_column("codec", no_wrap=True)
    for name in ("lossless", "dtypes", "fields", "what it does"):
        table.add_column(name, overflow="fold")
    for name in er.codecs():
        table.add_row(*(Text(cell) for cell in _cells(er.codec(name))))
    Console().print(table)


def _cells(codec: object) -> tuple[str, str, str, str, str]:
    """Returns one row: id, lossless, dtypes, fields with defaults, first line of the docstring."""
    fields = "\n".join(
        f"{field.name}={getattr(codec, field.name)!r}"
        for field in dataclasses.fields(codec)  # type: ignore[arg-type]
        if field.init
    )
    dtypes = getattr(codec, "dtypes", None) or ()
    return (
        str(getattr(codec, "id", type(codec).__name__)),
        "yes" if getattr(codec, "lossless", False) else "no",
        ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "any",
        fields,
        (type(codec).__doc__ or "").strip().split("\n")[0],
    )
