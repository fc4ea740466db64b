"""What can be done with a saved tensor. `runtime/perform.py` is the one place that does it."""

from dataclasses import dataclass

from elbowroom.codecs import Codec, Facts
from elbowroom.codecs.facts import NOTHING


@dataclass(frozen=True)
class Keep:
    """It stays as it is. `why` goes to the ledger."""

    why: str


@dataclass(frozen=True)
class Encode:
    """It is held in fewer bits.

    with_mask  for the input of a norm: the codec to take instead if a ReLU follows the norm, whose
               mask is held anyway (`facts.mask`)
    """

    codec: Codec
    facts: Facts = NOTHING
    with_mask: Codec | None = None


@dataclass(frozen=True)
class Rebuild:
    """It is dropped, and made again from what its producer saves."""


Action = Keep | Encode | Rebuild
