"""Memory of a step, moment by moment: as it was profiled, or as a plan would have it.

    profiled  level and storages as the profile has them
    plain     the same, with every tensor kept, as plain autograd does
    planned   the same moments under the actions of a plan, by the planner's memory model

A storage takes spans (first moment, last moment, bytes), as in `plan/problem.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elbowroom.errors import DataError
from elbowroom.plan.build_problem import BuiltProblem, build_problem
from elbowroom.plan.plan import Plan
from elbowroom.plan.problem import (
    Choice,
    Item,
    Region,
    Span,
    levels,
    option_spans,
    recomputed_items,
    region_starts,
    summed,
)
from elbowroom.plan.profile import Profile, Storage, is_planned

Bytes = NDArray[np.int64]  # of each moment
_PLACES = {f"offload to {place}": place for place in ("file", "host")}


@dataclass(frozen=True)
class Step:
    """One step.

    level  bytes held at each moment, all counted
    held   the spans of each storage, by its index in the profile
    more   spans of what a plan holds besides: inputs of modules that will run again
    """

    profile: Profile
    level: Bytes
    held: Mapping[int, list[Span]]
    more: list[Span] = field(default_factory=list)

    @property
    def peak_moment(self) -> int:
        """The moment with the highest level."""
        return int(self.level.argmax()) if len(self.level) else 0

    @property
    def peak(self) -> int:
        """The highest level, in bytes."""
        return int(self.level.max(initial=0))

    @property
    def saved(self) -> Bytes:
        """Bytes held at each moment for backward."""
        spans = [span for one in self.held.values() for span in one]
        return summed([*spans, *self.more], len(self.level))

    def nbytes_at(self, index: int, moment: int) -> int:
        """Returns the bytes that one storage takes at a moment, at least 0."""
        spans = self.held.get(index, ())
        return max(sum(nbytes for first, last, nbytes in spans if first <= moment <= last), 0)


def module_label(profile: Profile, name: str) -> str:
    """Returns "layer1.0 (Block)": names alone say little in an `nn.Sequential`."""
    kind = next((call.kind for call in profile.modules if call.name == name), "")
    return f"{name} ({kind})" if kind else name


def profiled(profile: Profile) -> Step:
    """Returns the step as it was profiled, perhaps with exact actions."""
    held = {i: profiled_spans(storage) for i, storage in enumerate(profile.storages)}
    return Step(profile, np.array(profile.level, np.int64), held)


def is_plain(profile: Profile) -> bool:
    """Returns whether the profiled step took what plain autograd does: it kept all tensors."""
    return not profile.spared and all(storage.kept for storage in profile.storages)


def plain(profile: Profile) -> Step:
    """Returns the step in plain autograd: as profiled if that was plain, else an estimate."""
    found = profiled(profile)
    if is_plain(profile):
        return found
    held = {i: [(s.born, s.freed, s.nbytes)] for i, s in enumerate(profile.storages)}
    kept = Step(profile, found.level, held)
    level = found.level - found.saved + kept.saved
    for moment, nbytes in profile.spared.items():
        level[moment] += nbytes
    return Step(profile, level, held)


def planned(profile: Profile, plan: Plan) -> Step:
    """Returns the same step under a plan. Raises DataError for a plan that is of another step."""
    known = {save.site.name for storage in profile.storages for save in storage.saves}
    if plan.sites and not known.intersection(plan.sites):
        raise DataError(
            "this plan belongs to another step: it knows none of the tensors in the profile. Make "
            "a plan from this profile: elbowroom plan PROFILE.json --budget ..."
        )
    presets = {one.preset for one in plan.sites.values()}
    place = next((place for preset, place in _PLACES.items() if preset in presets), None)
    built = build_problem(profile, exact=plan.exact, offload=place)
    choice = _choice(profile, built, plan)
    problem = built.problem
    gone = recomputed_items(problem, choice.recomputed)
    starts = region_starts(problem, choice.recomputed)
    held = {
        i: profiled_spans(storage)
        for i, storage in enumerate(profile.storages)
        if not is_planned(storage)
    }
    for i, (item, option) in enumerate(zip(problem.items, choice.options, strict=True)):
        if i not in gone:
            held[built.storages[i]] = option_spans(item, option, starts.get(i, ()))
    more: list[Span] = []
    for r in choice.recomputed:
        region = problem.regions[r]
        more.append((region.born, region.start, region.extra))
        for i in region.inside:
            held[built.storages[i]] = _again(problem.items[i], region)
    return Step(profile, levels(problem, choice), held, more)


def profiled_spans(storage: Storage) -> list[Span]:
    """Returns what a storage took in the profiled step."""
    if storage.kept:
        return [(storage.born, storage.freed, storage.nbytes)]
    needs = [(need, need, storage.nbytes) for need in storage.needs]
    whole = (storage.born, storage.used, storage.nbytes)
    return [(storage.born, storage.freed, storage.held), whole, *needs]


def _again(item: Item, region: Region) -> list[Span]:
    later = max(region.start, item.used + 1)
    return [(item.born, item.used, item.nbytes), (later, item.freed, item.nbytes)]


def _choice(profile: Profile, built: BuiltProblem, plan: Plan) -> Choice:
    options = []
    for index, item in zip(built.storages, built.problem.items, strict=True):
        names = [option.name for option in item.options]
        known = plan.sites.get(profile.storages[index].saves[0].site.name)
        options.append(names.index(known.preset) if known and known.preset in names else 0)
    regions = enumerate(built.problem.regions)
    return Choice(tuple(options), frozenset(r for r, one in regions if one.name in plan.recompute))
