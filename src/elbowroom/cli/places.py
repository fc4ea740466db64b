"""`--offload`: where plans may move tensors to."""

from enum import StrEnum
from typing import Annotated

import typer


class Place(StrEnum):
    """The places to offload to, named as in `offload=` of er.fit and er.plan."""

    file = "file"
    host = "host"


Offload = Annotated[
    Place | None,
    typer.Option(
        help="Tensors may be moved to a file that leaves nothing behind, or from a GPU to host "
        "memory.",
        show_default="they stay",
    ),
]
