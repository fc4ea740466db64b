"""A profile becomes a problem: what every option and every region would take, moment by moment.

    base(t) = level(t) - what the profiled step held for the storages that are planned

So for the actions of the profiled step, the memory model predicts what was measured. The seconds of
the profile are those of plain autograd: clocks stood still while these actions were performed.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from elbowroom.codecs import Codec
from elbowroom.errors import PlanError
from elbowroom.plan.composed import gated
from elbowroom.plan.menu import Menu, options, shared_s
from elbowroom.plan.policy import Tier
from elbowroom.plan.precision_floor import MIN_RECOMPUTED_LEVELS
from elbowroom.plan.prices import RESTORE, noise_again
from elbowroom.plan.problem import Item, Link, Problem, Region
from elbowroom.plan.profile import ModuleCall, Profile, Storage, is_planned
from elbowroom.plan.registered import all_settings
from elbowroom.plan.restored import is_mapped, spared, times_restored
from elbowroom.plan.site import Need, Rebuildable

Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]  # of each moment
_TIMES = 4  # the bytes of its inputs that a module saves at least, to start from codes of them
_SMALLEST_REGION = 1 << 18  # bytes inside; less is not worth a second forward

# Python of a second forward, besides that of its ops: as often the fixed seconds of a restored
# tensor, and so much more for each module inside. Measured between other work, as those are, of 1,
# 4 and 16 modules of one op: 206, 246 and 292 us, where a tensor took 69.
_SECOND_RUN, _EACH_MODULE = 3.0, 0.1


@dataclass(frozen=True)
class BuiltProblem:
    """A problem, and which storage each item is.

    modules  of each region, by index
    exact    no bit of any gradient may change
    apart    storages that are not rebuilt, as in `build_problem`
    """

    problem: Problem
    storages: tuple[int, ...]
    modules: tuple[int, ...]
    exact: bool
    apart: frozenset[int] = frozenset()


def build_problem(
    profile: Profile,
    *,
    exact: bool,
    recompute: bool = True,
    offload: str | None = None,
    whole: bool = True,
    codecs: tuple[Codec, ...] | None = None,
    apart: frozenset[int] = frozenset(),
) -> BuiltProblem:
    """The problem of a profiled step.

    exact      only actions that change no bit
    recompute  modules may run a second time
    offload    "file" or "host": a place for tensors outside of the device's memory
    whole      tensors may be moved there as they are, not only their codes
    codecs     the settings of codes that are allowed where it is not exact; None: all
    apart      storages that have codes of their own where they could be rebuilt, by index
    """
    weighed = all_settings() if codecs is None and not exact else codecs
    # More may be registered meanwhile.
    asked = exact, recompute, offload, whole, codecs is None, weighed, apart
    if asked not in profile.problems:
        profile.problems[asked] = _built(profile, exact, recompute, offload, whole, codecs, apart)
    built: BuiltProblem = profile.problems[asked]
    return built


def _built(
    profile: Profile,
    exact: bool,
    recompute: bool,
    offload: str | None,
    whole: bool,
    codecs: tuple[Codec, ...] | None,
    apart: frozenset[int],
) -> BuiltProblem:
    if recompute:  # which adds nothing but regions
        alone = build_problem(
            profile,
            exact=exact,
            recompute=False,
            offload=offload,
            whole=whole,
            codecs=codecs,
            apart=apart,
        )
        return _with_regions(alone, as_planned(profile, apart, exact=exact))
    menu = Menu(profile, () if exact else codecs, _tier(profile, offload), whole=whole)
    planned = [i for i, storage in enumerate(profile.storages) if is_planned(storage)]
    again = _made_from(profile, exact=exact)
    norms = set() if exact else gated(profile).keys() - apart
    profile = as_planned(profile, apart, exact=exact)
    items = tuple(
        _item(profile, i, menu, again.get(i, 0), exact=exact, is_gated=i in norms) for i in planned
    )
    base = np.array(profile.level, np.int64)
    for i in planned:
        base -= profiled_level(profile.storages[i], len(base))
    return BuiltProblem(
        Problem(
            base=tuple(base.tolist()),
            starts_s=profile.starts_s,
            backward=profile.backward,
            seconds=profile.seconds,
            items=items,
            links={} if offload is None else {offload: _link(profile, offload)},
            shared_s=() if exact else shared_s(profile),
            is_rough=not profile.measured,
        ),
        tuple(planned),
        (),
        exact,
        apart,
    )


def _with_regions(built: BuiltProblem, profile: Profile) -> BuiltProblem:
    """Returns the problem in which modules may run again, too.

    profile: as it is planned
    """
    base, floor = np.array(built.problem.base, np.int64), np.array(profile.floor, np.int64)
    for i in built.storages:
        floor -= profiled_level(profile.storages[i], len(floor), at_start=True)
    at = {storage: item for item, storage in enumerate(built.storages)}
    saved = _SavedIn.of(profile)
    calls = _candidates(profile, saved, at)
    regions = tuple(
        _region(profile, call, saved, at, base, floor, exact=built.exact) for call in calls
    )
    return replace(
        built,
        problem=replace(built.problem, regions=_nested(regions)),
        modules=tuple(profile.modules.index(call) for call in calls),
    )


def _tier(profile: Profile, offload: str | None) -> Tier | None:
    if offload is None:
        return None
    if f"out {offload}" not in profile.rates:
        raise PlanError(
            f"this profile has no speed of the {offload}, because there is none for "
            f"{profile.device[0]} tensors on the machine where it was measured; plan without "
            "offload"
        )
    return "host" if offload == "host" else "file"


def _link(profile: Profile, name: str) -> Link:
    return Link(profile.rates[f"out {name}"], profile.rates[f"in {name}"])


def profiled_level(storage: Storage, moments: int, *, at_start: bool = False) -> Bytes:
    """Bytes [moments] that a storage took in the profiled step.

    at_start: as each moment began, when what is restored in it was not there yet
    """
    level = np.zeros(moments, np.int64)
    if storage.kept:
        level[storage.born : storage.freed + 1] = storage.nbytes
        return level
    level[storage.born : storage.freed + 1] = storage.held
    level[storage.born : storage.used + 1] += storage.nbytes
    for need in () if at_start else storage.restored:
        level[need] += storage.nbytes
    return level


def _made_from(profile: Profile, *, exact: bool) -> dict[int, int]:
    """Returns, for each storage, how often it is restored for what can be made from it.

    That is nearly always rebuilt where its source is not kept: it then holds nothing. Readers that
    follow each other share what is restored, but for what a code is decoded to in one pass.
    """
    times: Counter[int] = Counter()
    moments: dict[int, set[int]] = {}
    for storage in profile.storages:
        values = {Need.EXACT, Need.LOSSY}
        if is_planned(storage) and values.intersection(save.site.need for save in storage.saves):
            for source in set(storage.made_of):
                if not exact and is_mapped(storage):
                    times[source] += len(storage.needs)
                else:
                    moments.setdefault(source, set()).update(storage.needs)
    for source, made in moments.items():
        one = profile.storages[source]
        times[source] += times_restored(one, made, exact=exact) - times_restored(one, exact=exact)
    return dict(times)


def _not_made(storage: Storage) -> Storage:
    sites = (replace(save.site, rebuildable=Rebuildable.NO) for save in storage.saves)
    pairs = zip(storage.saves, sites, strict=True)
    return replace(storage, saves=tuple(replace(save, site=site) for save, site in pairs))


def as_planned(profile: Profile, apart: Collection[int], *, exact: bool) -> Profile:
    """Returns the profile in which no storage is rebuilt from one that is held as signs only.

    A rehearsal notes that a leaky ReLU's output could be rebuilt from its input. But each preset
    below "keep" holds only the signs of that input, which backward reads, and the output as it is.

    apart: storages that are not rebuilt either, by index
    exact: nor what is made of exact tensors alone, unless all are
    """
    lost: set[int] = set()
    storages = list(profile.storages)
    for i, storage in enumerate(storages):
        is_lost = storage.made_of and (i in apart or all(at in lost for at in storage.made_of))
        sites = (save.site.rebuildable for save in storage.saves)
        if is_lost or (not exact and Rebuildable.FROM_EXACT in sites):
            storages[i] = storage = _not_made(storage)
        needs = {save.site.need for save in storage.saves}
        again = any(save.site.rebuildable is not Rebuildable.NO for save in storage.saves)
        if needs <= {Need.MASK, Need.SHAPE} and not again:
            lost.add(i)
    return replace(profile, storages=tuple(storages))


def _item(
    profile: Profile, index: int, menu: Menu, again: int, *, exact: bool, is_gated: bool
) -> Item:
    storage = profile.storages[index]
    presets = menu.of(storage, is_gated=is_gated)
    found = options(profile, storage, presets, again=again, is_gated=is_gated)
    return Item(
        nbytes=storage.nbytes,
        born=storage.born,
        used=storage.used,
        needs=tuple((need, need) for need in storage.needs),
        freed=storage.freed,
        options=tuple(found.values()),
        spared=() if exact else tuple(spared(profile, storage).items()),
    )


@dataclass(frozen=True)
class _SavedIn:
    """Says what ops inside of modules save, by the module's name: one pass for all of a profile.

    alone   storages, by index, that no op outside saves
    asked   the first moment at which backward asks for anything that an op inside has saved
    remade  storages, by index, that could be rebuilt, of whatever module
    """

    alone: dict[str, list[int]]
    asked: dict[str, int]
    remade: tuple[int, ...]

    @classmethod
    def of(cls, profile: Profile) -> "_SavedIn":
        alone: dict[str, list[int]] = {}
        asked: dict[str, int] = {}
        remade = []
        for i, storage in enumerate(profile.storages):
            first, *others = (save.modules for save in storage.saves)
            for name in dict.fromkeys(first):
                if all(name in modules for modules in others):
                    alone.setdefault(name, []).append(i)
            for save in storage.saves:
                for name in save.modules if save.asked >= 0 else ():
                    asked[name] = min(save.asked, asked.get(name, save.asked))
            if any(save.site.rebuildable is not Rebuildable.NO for save in storage.saves):
                remade.append(i)
        return cls(alone, asked, tuple(remade))

    def inside(self, profile: Profile, call: ModuleCall) -> list[int]:
        """Returns what only ops inside the call save, and what does not come from outside."""
        return [
            i
            for i in self.alone.get(call.name, ())
            if call.first <= profile.storages[i].born <= call.last and i not in call.inputs
        ]


def _candidates(profile: Profile, saved: _SavedIn, at: dict[int, int]) -> list[ModuleCall]:
    """Calls that could run again, and for which that frees something."""
    found = []
    for call in profile.modules:
        inside = () if call.why_not else saved.inside(profile, call)
        nbytes = sum(profile.storages[i].nbytes for i in inside if i in at)
        if nbytes >= _SMALLEST_REGION:
            found.append(call)
    return found


def _region(
    profile: Profile,
    call: ModuleCall,
    saved: _SavedIn,
    at: dict[int, int],
    base: Bytes,
    floor: Bytes,
    *,
    exact: bool,
) -> Region:
    inside = saved.inside(profile, call)
    storages = [i for i in inside if i in at]
    inner = [profile.storages[i] for i in storages]
    start = saved.asked.get(call.name, profile.backward)
    within = sum(call.first < one.first and one.last <= call.last for one in profile.modules)
    besides_s = (_SECOND_RUN + _EACH_MODULE * within) * profile.fixed_s.get(RESTORE, 0.0)
    # The second forward is over before the op that has asked for it begins.
    second = _workspace(call, inner, base, floor) + call.made_nbytes
    workspace = max(floor[start] + second - base[start], 0)
    given = sum(profile.storages[i].nbytes for i in call.inputs if i in at)
    saves = sum(storage.nbytes for storage in inner)
    may_be_coded = not (exact or call.rough or call.sources) and saves >= _TIMES * given > 0
    return Region(
        name=call.name,
        inside=tuple(at[i] for i in storages),
        inputs=tuple(
            dict.fromkeys(
                at[i]
                for i in (*call.inputs, *call.sources, *_made_inside(profile, call, saved, inside))
                if i in at
            )
        ),
        seconds=call.seconds + besides_s,
        workspace=int(workspace),
        extra=call.extra_nbytes + (_rows_nbytes(profile, call, at) if may_be_coded else 0),
        born=call.first,
        start=start,
        levels=MIN_RECOMPUTED_LEVELS if may_be_coded else inf,
        noise=noise_again(profile, inner) if may_be_coded else 0.0,
        noise_s=profile.seconds,
    )


def _rows_nbytes(profile: Profile, call: ModuleCall, at: dict[int, int]) -> int:
    """Returns the bytes of the means and sizes of rows that codes of its inputs have besides."""
    sites = (profile.storages[i].saves[0].site for i in call.inputs if i in at)
    return sum(site.rows.nbytes for site in sites if site.rows is not None)


def _made_inside(
    profile: Profile, call: ModuleCall, saved: _SavedIn, inside: Collection[int]
) -> list[int]:
    """Returns what is made inside the call and saved outside: no producer can rebuild it.

    Or it would be made of what is inside. As an input of the region, it is held by an option that
    needs neither.
    """
    inside = set(inside)

    def is_made(storage: Storage) -> bool:
        return call.name in storage.made_in or not inside.isdisjoint(storage.made_of)

    return [i for i in saved.remade if i not in inside and is_made(profile.storages[i])]


def _workspace(call: ModuleCall, inner: Sequence[Storage], base: Bytes, floor: Bytes) -> int:
    """Bytes that the forward of a call takes at its worst, beyond all that it saves."""
    level = base[call.first : call.last + 1] - floor[call.first]
    for storage in inner:
        level[max(storage.born - call.first, 0) :] += storage.nbytes
    return int(max(level.max() - sum(storage.nbytes for storage in inner), 0))


def _nested(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Returns the regions, each with its nearest enclosing one, by name."""
    names = {region.name: index for index, region in enumerate(regions)}
    found = []
    for region in regions:
        parts = region.name.split(".")
        above = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
        found.append(replace(region, within=next((names[n] for n in above if n in names), -1)))
    return tuple(found)
