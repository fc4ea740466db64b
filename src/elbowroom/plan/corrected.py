"""A profile whose prices measured steps have corrected, and what a plan pays of each class."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elbowroom.codecs import Codec
from elbowroom.plan.build_problem import BuiltProblem, build_problem
from elbowroom.plan.factors import (
    CLASSES,
    CODES,
    LINKS,
    MODULES,
    REBUILDS,
    STEP,
    TENSORS,
)
from elbowroom.plan.menu import EXACT_MENU, preset_named
from elbowroom.plan.plan import Plan
from elbowroom.plan.problem import Choice, added_seconds
from elbowroom.plan.profile import Profile


class _Times(dict[str, float]):
    """Numbers of another dict times a factor by name, those too that are measured only later."""

    def __init__(self, numbers: dict[str, float], by_start: Mapping[str, float]) -> None:
        super().__init__()
        self._numbers, self._by_start = numbers, by_start
        for name in numbers:
            self.__missing__(name)

    def __missing__(self, name: str) -> float:
        start = name.partition(" ")[0]
        self[name] = found = self._numbers[name] * self._by_start.get(start, self._by_start[""])
        return found

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def corrected(profile: Profile, factors: Mapping[str, float]) -> Profile:
    """Returns the profile with the seconds of each class times its factor; 1 for what is not named.

    Memory is as it was measured.
    """
    times = {name: factors.get(name, 1.0) for name in CLASSES}
    link = 1 / times[LINKS]
    return replace(
        profile,
        seconds=times[STEP] * profile.seconds,
        starts_s=tuple(times[STEP] * at_s for at_s in profile.starts_s),
        rates=_Times(profile.rates, {"": 1 / times[CODES], "out": link, "in": link}),
        fixed_s=_Times(profile.fixed_s, {"": times[TENSORS]}),
        storages=tuple(
            replace(one, producer_s=times[REBUILDS] * one.producer_s) for one in profile.storages
        ),
        modules=tuple(
            replace(one, seconds=times[MODULES] * one.seconds) for one in profile.modules
        ),
    )


def seconds_by_class(
    profile: Profile,
    plan: Plan,
    *,
    offload: str | None = None,
    codecs: tuple[Codec, ...] | None = None,
) -> dict[str, float] | None:
    """Returns the predicted seconds that a step of this profile pays of each class under the plan.

    offload and codecs are those that the plan was made with. None: it is of another step.
    """
    exact = any(known.preset == EXACT_MENU[0].name for known in plan.sites.values()) or all(
        preset_named(known.preset).exact for known in plan.sites.values()
    )

    def added_s(priced: Profile) -> float | None:
        built = build_problem(priced, exact=exact, offload=offload, codecs=codecs)
        choice = choice_of(priced, built, plan)
        return None if choice is None else added_seconds(built.problem, choice)

    whole_s = added_s(profile)
    if whole_s is None:
        return None
    found = {STEP: profile.seconds}
    for name in CLASSES:
        if name != STEP:
            twice_s = added_s(corrected(profile, {name: 2.0}))
            found[name] = 0.0 if twice_s is None else max(twice_s - whole_s, 0.0)
    return found


def choice_of(profile: Profile, built: BuiltProblem, plan: Plan) -> Choice | None:
    """Returns the choice that a plan has made; None where it does not know this profile's step."""
    problem, options = built.problem, list[int]()
    names = {region.name: r for r, region in enumerate(problem.regions)}
    if not plan.recompute <= names.keys():
        return None
    recomputed = frozenset(names[name] for name in plan.recompute)
    gone = {i for r in recomputed for i in problem.regions[r].inside}
    for i, (index, item) in enumerate(zip(built.storages, problem.items, strict=True)):
        if i in gone:
            options.append(0)
            continue
        known = plan.sites.get(profile.storages[index].saves[0].site.name)
        held = (a for a, one in enumerate(item.options) if known and one.name == known.preset)
        option = next(held, None)
        if option is None:
            return None
        options.append(option)
    return Choice(tuple(options), recomputed)
