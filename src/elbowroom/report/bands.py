"""Cuts what a step holds, moment by moment, into bands: by category, or by module.

By category, from the bottom up:

    weights           of all parameters
    optimizer states  as `ResidentBytes` has them
    held throughout   all else that exists throughout the step: buffers, a data set on the device
    gradients         memory that is allocated in backward and stays until its end; if the program
                      keeps gradients between steps, memory of their size that exists throughout
    saved             tensors that are held for backward
    transients        the rest: outputs, workspaces, gradients of activations

Only the level, weights and states are known exactly; gradients are inferred from the level. Bands
always add up to the level. If the model is not known, weights and states are one band, "held before
the step".

By module: what each module has saved for backward. Large modules are split into their children, as
long as there are only a few bands.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from elbowroom.plan.problem import summed
from elbowroom.plan.profile import Profile, Storage
from elbowroom.report.step import Bytes, Step, module_label, profiled

_MAX = 7  # bands of modules; the smaller ones become one
BEFORE, OTHERS, REST = "held before the step", "other modules", "gradients, workspaces, outputs"
WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
THROUGHOUT, SAVED, TRANSIENTS = "held throughout", "saved for backward", "transients"


@dataclass(frozen=True)
class Band:
    """One band of a chart. nbytes: held at each moment. color: its number in the page's style."""

    name: str
    nbytes: Bytes
    color: int

    @property
    def max_nbytes(self) -> int:
        """The most that it ever holds."""
        return int(self.nbytes.max(initial=0))


def by_category(step: Step) -> tuple[Band, ...]:
    """Returns bands from the bottom up; together they come to the level of each moment."""
    profile = step.profile
    weights, states, throughout = _resident_nbytes(profile)
    gradients, throughout = _gradients(profile, weights + states, throughout)
    ones = np.ones(len(step.level), np.int64)
    is_known = profile.standing is not None
    parts = [
        (WEIGHTS if is_known else BEFORE, weights * ones, 0),
        (STATES, states * ones, 5),
        (THROUGHOUT, throughout * ones, 7),
        (GRADIENTS, gradients, 3),
        (SAVED, step.saved, 1),
    ]
    return _stacked(step.level, parts, (TRANSIENTS, 8))


def by_module(step: Step) -> tuple[Band, ...]:
    """Returns bands from the bottom up; together they come to the level of each moment."""
    ones = np.ones(len(step.level), np.int64)
    parts = [(BEFORE, step.profile.static * ones, 0)]
    for number, (name, indices) in enumerate(_groups(step.profile.storages), start=1):
        spans = [span for index in indices for span in step.held.get(index, ())]
        label = module_label(step.profile, name)
        parts.append((label, summed(spans, len(step.level)), number))
    return _stacked(step.level, parts, (REST, 8))


def _stacked(
    level: Bytes, parts: Iterable[tuple[str, Bytes, int]], rest: tuple[str, int]
) -> tuple[Band, ...]:
    """Returns bands of which none goes above the level, and what is left of it on top."""
    left = level.copy()
    found = []
    for name, nbytes, color in parts:
        found.append(Band(name, np.clip(nbytes, 0, left), color))
        left = left - found[-1].nbytes
    return (*found, Band(rest[0], left, rest[1]))


def _resident_nbytes(profile: Profile) -> tuple[int, int, int]:
    """Returns the bytes of weights, of states, and of what else is there all the while."""
    least = min((*profile.floor, profile.static))
    if profile.standing is None:
        return least, 0, 0
    weights = min(profile.standing.weights_nbytes, least)
    states = min(profile.standing.states_nbytes, least - weights)
    return weights, states, least - weights - states


def _gradients(profile: Profile, standing: int, throughout: int) -> tuple[Bytes, int]:
    """Returns what is held of gradients at each moment, and what else is held throughout."""
    moments, backward = len(profile.level), profile.backward
    above = np.array(profile.floor, np.int64) - standing - throughout - profiled(profile).saved
    above = np.clip(above, 0, None)
    known = None if profile.standing is None else profile.standing.gradients_nbytes
    most = int(above.max(initial=0)) if known is None else known
    asked = (need for storage in profile.storages for need in storage.needs)
    end = max(asked, default=moments - 1)
    found = np.zeros(moments, np.int64)
    # What is there at the first moment, and goes when the program clears it, is the last step's.
    found[:backward] = np.minimum.accumulate(above[:backward])
    # What is there in backward, and still there when it ends, stays.
    found[backward : end + 1] = np.minimum.accumulate(above[backward : end + 1][::-1])[::-1]
    found[end + 1 :] = np.minimum.accumulate(above[end + 1 :])
    made = int(found[backward:].max(initial=0))
    kept = 0 if known is None else min(throughout, max(known - made, 0))
    return np.minimum(found + kept, most), throughout - kept


def _groups(storages: Iterable[Storage]) -> list[tuple[str, list[int]]]:
    """Returns groups by module, in forward's order: the largest are split while there is room."""
    storages = list(storages)
    groups = _split(storages, range(len(storages)), 0)
    depths = dict.fromkeys(groups, 0)
    for name in _by_size(storages, groups):
        parts = _split(storages, groups[name], depths[name] + 1)
        if len(parts) > 1 and len(groups) + len(parts) - 1 <= _MAX:
            del groups[name]
            groups |= parts
            depths |= dict.fromkeys(parts, depths[name] + 1)
    largest = _by_size(storages, groups)
    few = largest if len(largest) <= _MAX else largest[: _MAX - 1]
    order = sorted(few, key=lambda name: min(storages[i].born for i in groups[name]))
    found = [(name, groups[name]) for name in order]
    rest = [index for name in largest if name not in few for index in groups[name]]
    return [*found, (OTHERS, rest)] if rest else found


def _split(storages: list[Storage], indices: Iterable[int], depth: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for index in indices:
        modules = storages[index].saves[0].modules
        name = modules[min(depth, len(modules) - 1)] if modules else "the outermost module"
        found[name].append(index)
    return dict(found)


def _by_size(storages: list[Storage], groups: dict[str, list[int]]) -> list[str]:
    return sorted(groups, key=lambda name: -sum(storages[i].nbytes for i in groups[name]))
