"""Cuts what a profiled step holds, moment by moment, into a few bands that people can tell apart.

    held before the step    weights, optimizer states
    a module, and others    what it saved for backward, from its birth to its last use
    the rest                gradients, workspaces, outputs: what the level has beyond those

The bands are as deep in the tree of modules as a handful of them allows.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elbowroom.plan.profile import Profile, Storage

_MOST = 7  # bands of modules; the smaller ones become one
BEFORE, OTHERS, REST = "held before the step", "other modules", "gradients, workspaces, outputs"


@dataclass(frozen=True)
class Band:
    """nbytes: held at each moment. colour: 0 before, 1 to 7 modules, 8 the rest."""

    name: str
    nbytes: NDArray[np.int64]
    colour: int

    @property
    def most_nbytes(self) -> int:
        return int(self.nbytes.max(initial=0))


def bands(profile: Profile) -> tuple[Band, ...]:
    """Returns bands from the bottom up; together they come to the level of each moment."""
    level = np.array(profile.level, np.int64)
    left = level.copy()
    found = [Band(BEFORE, np.minimum(left, profile.static), 0)]
    left = left - found[0].nbytes
    for number, (name, storages) in enumerate(_groups(profile.storages), start=1):
        held = np.minimum(_held(storages, len(level)), left)
        found.append(Band(name, held, number))
        left = left - held
    return (*found, Band(REST, left, 8))


def _held(storages: Iterable[Storage], moments: int) -> NDArray[np.int64]:
    steps = np.zeros(moments + 1, np.int64)
    for storage in storages:
        steps[storage.born] += storage.nbytes
        steps[storage.freed + 1] -= storage.nbytes
    return np.cumsum(steps[:-1])


def _groups(storages: Iterable[Storage]) -> list[tuple[str, list[Storage]]]:
    """Returns groups by module, in forward's order: the largest are split while there is room."""
    groups = _split(storages, 0)
    depths = dict.fromkeys(groups, 0)
    for name in _by_size(groups):
        parts = _split(groups[name], depths[name] + 1)
        if len(parts) > 1 and len(groups) + len(parts) - 1 <= _MOST:
            del groups[name]
            groups |= parts
            depths |= dict.fromkeys(parts, depths[name] + 1)
    largest = _by_size(groups)
    few = largest if len(largest) <= _MOST else largest[: _MOST - 1]
    order = sorted(few, key=lambda name: min(storage.born for storage in groups[name]))
    found = [(name, groups[name]) for name in order]
    rest = [storage for name in largest if name not in few for storage in groups[name]]
    return [*found, (OTHERS, rest)] if rest else found


def _split(storages: Iterable[Storage], depth: int) -> dict[str, list[Storage]]:
    found: dict[str, list[Storage]] = defaultdict(list)
    for storage in storages:
        modules = storage.saves[0].modules
        name = modules[min(depth, len(modules) - 1)] if modules else "the outermost module"
        found[name].append(storage)
    return dict(found)


def _by_size(groups: dict[str, list[Storage]]) -> list[str]:
    return sorted(groups, key=lambda name: -sum(one.nbytes for one in groups[name]))
