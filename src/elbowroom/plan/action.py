"""The actions that can be taken on a saved tensor. `runtime/serving.py` alone carries them out."""

from dataclasses import dataclass
from typing import Literal

from elbowroom.codecs import Codec, Facts
from elbowroom.codecs.facts import NOTHING
from elbowroom.plan.site import Rows


@dataclass(frozen=True)
class Keep:
    """Action: the tensor stays as it is. `why` goes to the ledger."""

    why: str


@dataclass(frozen=True)
class Encode:
    """Action: the tensor is held in fewer bits.

    For the input of a norm, what to take instead once it is known who reads the norm's output: a
    ReLU, whose mask is held anyway (`facts.mask`), or a GELU or SiLU, which is not linear in it.

    with_mask   if the ReLU is that of the norm's output
    gated       if, besides, all of the norm's gradient comes through it (`runtime/deferred.py`)
    behind_sum  if all of it comes through the ReLU of a sum that the norm's output is a part of
    curved      if it is read by a GELU or SiLU
    rows        normalized by their own mean and std, where a reader divides by their size
    least       what is below is encoded as this: of log-probabilities, whose readers take exp
    fewest      levels that `dither` may have where the values allow it (`precision_floor.py`)
    adds_up     the dimension along which exponentials of what is decoded are to add up to 1
    moved       where the code itself is moved to; None: it stays on the tensor's device
    """

    codec: Codec
    facts: Facts = NOTHING
    with_mask: Codec | None = None
    gated: Codec | None = None
    behind_sum: Codec | None = None
    curved: Codec | None = None
    rows: Rows | None = None
    least: float | None = None
    fewest: int | None = None
    adds_up: int | None = None
    moved: "Offload | None" = None

    @property
    def may_change(self) -> bool:
        """True if it is worth waiting for the reader of the norm's output."""
        return self.with_mask is not None or self.curved is not None


@dataclass(frozen=True)
class Rebuild:
    """Action: the tensor is dropped, and rebuilt from what its producer saves."""


@dataclass(frozen=True)
class Offload:
    """Action: the tensor is moved away, and brought back when backward asks for it or before.

    tier       "host": pinned memory of the host, for what is on a GPU; "file": a temporary file;
               None: the host for what is on a GPU, a file for what is in host memory already
    directory  where the file lies; None: where `tempfile` puts its own
    """

    tier: Literal["host", "file"] | None = None
    directory: str | None = None


Action = Keep | Encode | Rebuild | Offload
