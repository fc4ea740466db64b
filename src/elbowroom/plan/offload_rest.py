"""Exact actions where they apply; what is left and large enough is offloaded. No bit changes.

Below a MiB a transfer costs more than the room is worth.
"""

from dataclasses import dataclass
from typing import Literal

from elbowroom.errors import UnknownField
from elbowroom.plan.action import Action, Keep, Offload
from elbowroom.plan.policy import Exact
from elbowroom.plan.site import Site


@dataclass(frozen=True)
class OffloadRest:
    """Policy that uses exact actions where they apply, and moves all other tensors elsewhere.

    tier         "host", "file", or None: host memory for tensors on a GPU, otherwise a file
    directory    the folder of the file; None: the default of `tempfile`
    from_nbytes  storages smaller than this number of bytes are kept
    rebuild      outputs may be rebuilt from the tensors that their op saves
    """

    tier: Literal["host", "file"] | None = None
    directory: str | None = None
    from_nbytes: int = 1 << 20
    rebuild: bool = True

    def __post_init__(self) -> None:
        if self.tier not in ("host", "file", None):
            raise UnknownField(
                f"policy 'offload': tier={self.tier!r} is not possible; tier is 'host', 'file', or "
                "None for host memory on a GPU and a file elsewhere"
            )
        if self.directory is not None and not isinstance(self.directory, str):
            raise UnknownField(
                f"policy 'offload': directory={self.directory!r} is not possible; "
                "directory is the path of one, as a str, or None"
            )
        nbytes = self.from_nbytes
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
            raise UnknownField(
                f"policy 'offload': from_nbytes={nbytes!r} is not possible; "
                "from_nbytes is an int of bytes, 0 or more"
            )

    def __call__(self, site: Site) -> Action:
        exact = Exact(self.rebuild)(site)
        if not isinstance(exact, Keep):
            return exact
        if site.nbytes < self.from_nbytes:
            return Keep("too small to be worth a transfer")
        return Offload(self.tier, self.directory)
