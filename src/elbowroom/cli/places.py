"""`--offload`: the places to which plans may move tensors."""

from enum import StrEnum
from typing import Annotated

import typer


class OffloadPlace(StrEnum):
    """The places to offload to, named as in `offload=` of er.fit and er.plan."""

    file = "file"
    host = "host"


Offload = Annotated[
    OffloadPlace | None,
    typer.Option(
        help="Allow plans to move tensors to a temporary file, or from a GPU to host memory.",
        show_default="they stay",
    ),
]
