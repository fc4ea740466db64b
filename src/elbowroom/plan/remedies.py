"""Tells whether lossy codes could lower a peak that exact actions leave, for a refusal's advice."""

from elbowroom.codecs import Codec
from elbowroom.plan.build_problem import BuiltProblem, build_problem
from elbowroom.plan.problem import Choice, Item, Option, keep_all, levels, recomputed_items
from elbowroom.plan.profile import Profile

_LITTLE = 0.01  # of the peak


def codes_help(
    profile: Profile,
    exactly: BuiltProblem,
    choice: Choice | None = None,
    *,
    codecs: tuple[Codec, ...] | None,
) -> bool:
    """Returns whether codes could take at least 1 % off the peak of an exact choice.

    exactly  the problem of exact actions, without a place to move to
    choice   of it; None: each storage is held by its smallest exact option, and no module runs
             again

    Only what is held and not read at the highest moment counts: what is read is whole then.
    """
    kept = keep_all(exactly.problem) if choice is None else choice
    level = levels(exactly.problem, kept)
    freely = build_problem(profile.unmeasured, exact=False, recompute=False, codecs=codecs)
    coded = dict(zip(freely.storages, freely.problem.items, strict=True))
    at, gone = int(level.argmax()), recomputed_items(exactly.problem, kept.recomputed)
    saved = exactly.problem.base[at] - freely.problem.base[at]  # where convolutions take turns
    for i, (index, item) in enumerate(zip(exactly.storages, exactly.problem.items, strict=True)):
        if i not in gone and _waits(item, at):
            exact = item.options[kept.options[i]] if choice else _smallest(item)
            saved += max(exact.nbytes - _smallest(coded[index]).nbytes, 0)
    return bool(saved > _LITTLE * level[at])


def _smallest(item: Item) -> Option:
    return min(item.options, key=lambda one: one.nbytes)


def _waits(item: Item, moment: int) -> bool:
    """Returns whether an item is held at a moment that does not read it."""
    is_read = any(first <= moment <= last for first, last in item.needs)
    return item.used < moment <= item.freed and not is_read
