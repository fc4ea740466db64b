"""A forward that held nothing was written down; its backward is made up, to plan the first step.

    order      that of forward, reversed: each op asks for what it has saved
    base(t)    what stood before the step + what cannot be planned and is still to be asked for +
               the gradients of all modules that have been asked, and one more + `transients` x
               the largest tensor near that may have a gradient + 2 x the largest workspace near,
               where nobody hopes; at the first, the loss's input three times, if that is more

`transients` covers the gradient that comes in, the one that goes out, that of a shortcut, a
workspace, and what a tensor is rebuilt from. Measured: 2 to 3 where exact tensors are kept, 4 in a
U-Net, 5.7 in a ResNet that rebuilds from codes. So SAFE is for all of these, ENOUGH where no code
is decoded, USUAL what most take, and BEST the least that any op needs. An op that saves a workspace
(an LSTM) takes 0.4 to 2.4 times as much for that of its backward.
The plan that comes of it is corrected by the first measurement.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from elbowroom.plan.profile import Profile, Storage, is_planned
from elbowroom.plan.sequence import without_prefix

SAFE, ENOUGH, USUAL, BEST = 6, 4, 3, 1  # transients
_NEAR = 2  # so many neighbours in the order of backward
_WORKSPACES = 2
_LOSS = 3  # of its input: what the loss saves of it, its gradient, and, mostly, the input itself


@dataclass(frozen=True)
class Unborn:
    """A gradient that the step will create. owners: modules that have the parameter; by name."""

    nbytes: int
    owners: tuple[str, ...]


def with_backward(
    profile: Profile,
    gradients: Iterable[Unborn],
    state_nbytes: int,
    transients: int,
    loss_nbytes: int = 0,
) -> Profile:
    """A whole step, from the profile of a forward whose storages were all dropped.

    state_nbytes  of the optimizer's, which the step will create
    loss_nbytes   of what the loss is taken of
    """
    profile = profile.shifted(state_nbytes)
    order = _order(profile.storages)
    first = len(profile.level)
    small = _small(profile.storages, order)
    sizes = [_differentiable_nbytes(profile.storages[i]) for i, _ in order]
    workspaces = [_workspace_nbytes(profile.storages[i]) for i, _ in order]
    asking = (profile.storages[i].saves[nth].site.module for i, nth in order)
    born = _births(gradients, list(map(without_prefix, asking)))
    born_so_far = list(accumulate(born))
    base = []
    asked: dict[tuple[int, int], int] = {}
    for k, save in enumerate(order):
        asked[save] = first + k
        near = slice(max(k - _NEAR, 0), k + _NEAR + 1)
        another = max(born[near])  # a gradient's workspace, or the next
        there = min(born_so_far[k] + another, born_so_far[-1])
        beside = transients * max(sizes[near])
        if k == 0:
            beside = max(beside, (_LOSS - (transients == BEST)) * loss_nbytes)
        if transients > BEST:
            beside += _WORKSPACES * max(workspaces[near])
        base.append(profile.static + small[k] + there + beside)
    storages = [_asked(storage, i, asked, first) for i, storage in enumerate(profile.storages)]
    dropped = [storage for storage in storages if is_planned(storage)]
    forward_s = profile.seconds
    step_s = 2 * forward_s / max(len(order), 1)
    level = (*profile.level, *_with(dropped, base, first))
    return replace(
        profile,
        level=level,
        floor=(*profile.floor, *level[first:]),
        starts_s=(*profile.starts_s, *(forward_s + k * step_s for k in range(len(order)))),
        backward=first,
        seconds=3 * forward_s,
        storages=tuple(storages),
    )


def _small(storages: tuple[Storage, ...], order: list[tuple[int, int]]) -> list[int]:
    """Bytes that autograd holds by itself as each op asks; a storage goes after its last op."""
    asked_last = {index: k for k, (index, _) in enumerate(order)}
    small = [0] * len(order)
    for index, k in asked_last.items():
        if not is_planned(storages[index]):
            small[k] = storages[index].nbytes
    return list(accumulate(reversed(small)))[::-1]


def _differentiable_nbytes(storage: Storage) -> int:
    """Of a tensor that may have a gradient as large as itself; a workspace or a mask has none."""
    dtypes = (save.site.dtype for save in storage.saves)
    return storage.nbytes if any(d.is_floating_point or d.is_complex for d in dtypes) else 0


def _workspace_nbytes(storage: Storage) -> int:
    """Of what only the op that has filled it can read: bytes without a dtype of their own."""
    return storage.nbytes if storage.saves[0].site.dtype is torch.uint8 else 0


def _births(gradients: Iterable[Unborn], asked: list[str]) -> list[int]:
    """Bytes that are born as each module is asked; of modules that save nothing, at the start."""
    born = [0] * max(len(asked), 1)
    for gradient in gradients:
        at = (asked.index(owner) for owner in gradient.owners if owner in asked)
        born[min(at, default=0)] += gradient.nbytes
    return born


def _order(storages: tuple[Storage, ...]) -> list[tuple[int, int]]:
    """(storage, save) that each op of backward asks for: the last first."""
    saves = [
        (save.at, index, nth)
        for index, storage in enumerate(storages)
        for nth, save in enumerate(storage.saves)
    ]
    return [(index, nth) for _, index, nth in sorted(saves, reverse=True)]


def _asked(storage: Storage, index: int, asked: dict[tuple[int, int], int], first: int) -> Storage:
    """The storage as backward will ask for it; it was dropped, and held nothing after its use."""
    saves = tuple(replace(save, asked=asked[index, nth]) for nth, save in enumerate(storage.saves))
    needs = tuple(sorted(save.asked for save in saves))
    return replace(
        storage, saves=saves, needs=needs, freed=needs[-1] if needs else first, held=0, kept=False
    )


def _with(storages: list[Storage], base: list[int], first: int) -> list[int]:
    """The levels of a backward that restores what each moment needs, and holds nothing else."""
    level = list(base)
    for storage in storages:
        for need in storage.needs:
            level[need - first] += storage.nbytes
    return level
