"""What a rehearsal tries, in the order of regret.

A rehearsed plan is an estimate (`plan/rehearsal.py`), and is made again once its step was measured.
Lossy codes are gone with the step then, while states that were encoded keep a mark: so encoded
states come after all codes, and only what is hopeful about backward comes after them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from elbowroom.control.states import CHOICES

SAFE = 6
_HOPEFUL = 3  # what takes less than this is
# Exact or lossy, and how many largest tensors backward takes beside what is held.
_TRIES: dict[bool | None, tuple[tuple[bool | None, int], ...]] = {
    True: ((True, SAFE), (True, 4), (True, 2), (True, 1)),
    None: ((True, SAFE), (True, 3), (None, SAFE), (None, 3), (None, 1)),
    False: ((False, SAFE), (False, 3), (False, 1)),
}


@dataclass(frozen=True)
class Try:
    """state: which of the formats that states may have, the mildest is 0."""

    state: int
    exact: bool | None
    transients: int


def tries(exact: bool | None) -> Iterator[Try]:
    """Under terms of this exactness."""
    for hopeful in (False, True):
        for state in range(1 if exact else len(CHOICES)):
            for allowed, transients in _TRIES[exact]:
                if (transients < _HOPEFUL) == hopeful:
                    yield Try(state, allowed, transients)
