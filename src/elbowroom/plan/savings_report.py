"""Lists, for people, what could be done with each tensor of a profiled step at any budget."""

from dataclasses import dataclass

from elbowroom.plan.build_problem import build_problem
from elbowroom.plan.menu import EXACT_MENU, action_name, option, preset_named
from elbowroom.plan.profile import Profile, Storage, is_planned

_LOSSY = preset_named("dither, 16 levels")


@dataclass(frozen=True)
class Way:
    """One way to hold a storage. held: bytes that it would take."""

    action: str
    held: int
    exact: bool


@dataclass(frozen=True)
class Prospect:
    """A storage that autograd saves, and what could be done with it.

    ways  those that hold less: exact, lossy with 16 levels, the innermost module to run again
    why   the reason if there are none
    """

    storage: Storage
    ways: tuple[Way, ...]
    why: str

    @property
    def module(self) -> str:
        """The module of the first op that saves the storage."""
        return self.storage.saves[0].site.module


def prospects(profile: Profile) -> tuple[Prospect, ...]:
    """Returns the prospects of all storages, the largest first."""
    again = _run_again(profile)
    found = [
        _prospect(profile, storage, again.get(index, ""))
        for index, storage in enumerate(profile.storages)
    ]
    return tuple(sorted(found, key=lambda one: -one.storage.nbytes))


def _prospect(profile: Profile, storage: Storage, again: str) -> Prospect:
    left = storage.saves[0].left
    ways: list[Way] = []
    if is_planned(storage):
        for preset in (*EXACT_MENU, _LOSSY):
            made = option(profile, storage, preset)
            if made.nbytes < min([way.held for way in ways], default=storage.nbytes):
                ways.append(Way(action_name(preset, storage), made.nbytes, made.exact))
        if again:
            ways.append(Way(f"recompute {again}", 0, exact=True))
    asked = next((save.site.why for save in storage.saves if save.site.why), "")
    return Prospect(storage, tuple(ways), "" if ways else left or asked or "its bits are needed")


def _run_again(profile: Profile) -> dict[int, str]:
    """Returns, for each storage, the innermost module whose second forward would make it again."""
    built = build_problem(profile, exact=True)
    found: dict[int, str] = {}
    for region in sorted(built.problem.regions, key=lambda region: region.name.count(".")):
        for item in region.inside:
            found[built.storages[item]] = region.name
    return found
