"""Exact actions where they apply; what is left and large enough is offloaded.

With a codec, what tolerates its error is encoded first: fewer bytes travel. A code of 4 bits takes
an eighth of the link, and of the place at its end; without one no bit changes.

Below a MiB a transfer costs more than the room is worth.
"""

from dataclasses import dataclass, replace
from typing import Literal

from elbowroom.codecs import Codec
from elbowroom.errors import UnknownField
from elbowroom.plan.action import Action, Encode, Keep, Offload
from elbowroom.plan.policy import Exact, Lossy
from elbowroom.plan.site import Need, Site

Tier = Literal["host", "file"]


@dataclass(frozen=True)
class OffloadRest:
    """Policy that uses exact actions where they apply, and moves all other tensors elsewhere.

    Codes of values are moved, too; masks stay.

    tier         "host", "file", or None: host memory for tensors on a GPU, otherwise a file
    directory    the folder of the file; None: the default of `tempfile`
    from_nbytes  storages smaller than this number of bytes are kept
    rebuild      outputs may be rebuilt from the tensors that their op saves
    codec        what encodes a tensor before it is moved, where its op tolerates the error; None:
                 all are moved as they are
    """

    tier: Tier | None = None
    directory: str | None = None
    from_nbytes: int = 1 << 20
    rebuild: bool = True
    codec: Codec | None = None

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
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise UnknownField(
                f"policy 'offload': codec={self.codec!r} is not possible; "
                "codec is a codec, the name of a setting as 'dither, 16 levels', or None"
            )
        nbytes = self.from_nbytes
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
            raise UnknownField(
                f"policy 'offload': from_nbytes={nbytes!r} is not possible; "
                "from_nbytes is an int of bytes, 0 or more"
            )

    @property
    def exact(self) -> bool:
        """True if no bit of any gradient changes."""
        return self.codec is None or self.codec.lossless

    @property
    def again(self) -> bool:
        """True if ops may run forward again, instead of saving intermediate results."""
        return not self.exact

    def __call__(self, site: Site) -> Action:
        held = Exact(self.rebuild)(site)
        if self.codec is not None:
            held = Lossy(self.codec, self.rebuild)(site)
        is_small = site.nbytes < self.from_nbytes
        if isinstance(held, Encode) and site.need is not Need.MASK and not is_small:
            return replace(held, moved=Offload(self.tier, self.directory))
        if not isinstance(held, Keep):
            return held
        if is_small:
            return Keep("too small to be worth a transfer")
        return Offload(self.tier, self.directory)
