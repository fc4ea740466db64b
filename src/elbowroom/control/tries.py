"""What a rehearsal tries, in the order of regret.

A rehearsed plan is an estimate (`plan/rehearsal.py`), and is made again once its step was measured.
Lossy codes are gone with the step then, while states that were encoded keep a mark: so encoded
states come after all codes, and only what is hopeful about backward comes after them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from elbowroom.control.states import CHOICES

SAFE, BEST = 6, 1
_ENOUGH = 4  # where no code is decoded: plan/rehearsal.py
_HOPEFUL = 3  # what takes less than this is
# Exact or lossy, how many largest tensors backward takes beside what is held, and whether modules
# may run again. A step in which none does can be written down, which ends all guessing.
_TRIES: dict[bool | None, tuple[tuple[bool | None, int, bool], ...]] = {
    True: (
        *((True, SAFE, False), (True, _ENOUGH, False)),
        *((True, SAFE, True), (True, _ENOUGH, True), (True, 2, True), (True, BEST, True)),
    ),
    None: (
        *((True, SAFE, False), (True, _ENOUGH, False), (True, SAFE, True), (True, 3, True)),
        *((None, SAFE, False), (None, SAFE, True), (None, 3, True), (None, BEST, True)),
    ),
    False: (*((False, SAFE, False), (False, SAFE, True), (False, 3, True), (False, BEST, True)),),
}


@dataclass(frozen=True)
class Try:
    """state: which of the formats that states may have, the mildest is 0."""

    state: int
    exact: bool | None
    transients: int
    recompute: bool


def tries(exact: bool | None) -> Iterator[Try]:
    """Under terms of this exactness."""
    for hopeful in (False, True):
        for state in range(1 if exact else len(CHOICES)):
            for allowed, transients, recompute in _TRIES[exact]:
                if (transients < _HOPEFUL) == hopeful:
                    yield Try(state, allowed, transients, recompute)
