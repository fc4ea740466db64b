"""Profiles of a step that has several backwards, of which each ends a part of the step.

    part 0   G, D(real), D(fake)   backward of D's graphs; that of G waits
    part 1   (G,) D(fake)          backward of both

So what D saves in part 0 is never held together with what it saves in part 1, and what G saves is
held beside both. The forwards were written down, and held nothing (`rehearsal.py`). Each part is
made a step of its own, which begins with the forwards that wait from before. Then the parts are put
one behind the other, without what comes twice: of a forward that waits, a storage is asked for in
the last part alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from elbowroom.plan.profile import ModuleCall, Profile, Storage
from elbowroom.plan.rehearsal import ForwardProfile


@dataclass(frozen=True)
class StepPart:
    """Forwards before one backward.

    forwards  by their numbers in the step; those that wait from before come first
    waits     those that its backward does not come to
    """

    forwards: Mapping[int, ForwardProfile]
    waits: frozenset[int]


def step_of_parts(parts: Sequence[StepPart], whole: Callable[[ForwardProfile], Profile]) -> Profile:
    """Returns the whole step. whole: makes a step of one part, its backward included."""
    places: dict[int, int] = {}  # of the storages of each forward in the step: the first of them
    step: Profile | None = None
    for part in parts:
        own = whole(_joined(part))
        at, moments = {}, {}
        storages = 0
        for nth, one in part.forwards.items():
            at[nth], moments[nth] = storages, len(one.profile.level)
            storages += len(one.profile.storages)
        last = len(own.level) - 1
        for nth in part.waits:
            own = _unasked(own, at[nth], len(part.forwards[nth].profile.storages), last)
        if step is None:
            step, places = own, at
            continue
        known = [nth for nth in part.forwards if nth in places]
        numbers: dict[int, int] = {}
        for nth, first in at.items():
            for i in range(len(part.forwards[nth].profile.storages)):
                numbers[first + i] = places[nth] + i if nth in places else -1
        new = [i for i, number in numbers.items() if number < 0]
        numbers |= {i: len(step.storages) + k for k, i in enumerate(new)}
        places |= {nth: numbers.get(first, 0) for nth, first in at.items() if nth not in places}
        step = _behind(step, own, sum(moments[nth] for nth in known), numbers, frozenset(new))
    assert step is not None
    return step


def _joined(part: StepPart) -> ForwardProfile:
    """Returns the forwards of a part, in whose graph no gradient comes into those that wait."""
    forwards = [
        replace(one, loss_nbytes=(0, 0)) if nth in part.waits else one
        for nth, one in part.forwards.items()
    ]
    joined = reduce(ForwardProfile.followed_by, forwards)
    left: set[int] = set()
    first = 0
    for nth, one in part.forwards.items():
        nodes = len(one.graph.nodes)
        if nth in part.waits:
            left.update(range(first, first + nodes))
        first += nodes
    roots, least_roots = (
        tuple(root for root in some if root[0] not in left)
        for some in (joined.graph.roots, joined.graph.least_roots)
    )
    return replace(joined, graph=replace(joined.graph, roots=roots, least_roots=least_roots))


def _unasked(step: Profile, first: int, count: int, last: int) -> Profile:
    """Returns the step, in which so many storages wait for a later part."""
    waiting = tuple(
        replace(
            one, needs=(), freed=last, saves=tuple(replace(save, asked=-1) for save in one.saves)
        )
        for one in step.storages[first : first + count]
    )
    storages = (*step.storages[:first], *waiting, *step.storages[first + count :])
    level = list(step.level)
    for before in step.storages[first : first + count]:
        for need in before.restored if not before.kept else ():
            level[need] -= before.nbytes
    return replace(step, level=tuple(level), storages=storages)


def _behind(
    step: Profile, later: Profile, known: int, numbers: Mapping[int, int], new: frozenset[int]
) -> Profile:
    """Returns a step with another part behind it.

    known: the moments of `later` that the step has already; numbers: of its storages in the step;
    new: those that the step has not
    """
    shift = len(step.level) - known
    storages = list(step.storages)
    for i, one in enumerate(later.storages):
        moved = _moved(one, shift, numbers)
        if i in new:
            storages.append(moved)
            continue
        before = storages[numbers[i]]
        used = max(before.used, moved.used) if one.used >= known else before.used
        asked = zip(before.saves, moved.saves, strict=True)
        saves = tuple(replace(mine, asked=its.asked) for mine, its in asked)
        storages[numbers[i]] = replace(
            before, used=used, needs=moved.needs, freed=moved.freed, saves=saves
        )
    began_s = later.starts_s[known] if known < len(later.starts_s) else later.seconds
    starts_s = (step.seconds + at_s - began_s for at_s in later.starts_s[known:])
    calls = (_moved_call(one, shift, numbers) for one in later.modules if one.first >= known)
    return replace(
        step,
        level=(*step.level, *later.level[known:]),
        floor=(*step.floor, *later.floor[known:]),
        starts_s=(*step.starts_s, *starts_s),
        seconds=step.seconds + later.seconds - began_s,
        storages=tuple(storages),
        modules=(*step.modules, *calls),
    )


def _moved(one: Storage, shift: int, numbers: Mapping[int, int]) -> Storage:
    return replace(
        one,
        born=one.born + shift,
        used=one.used + shift,
        needs=tuple(need + shift for need in one.needs),
        freed=one.freed + shift,
        saves=tuple(
            replace(save, at=save.at + shift, asked=save.asked + shift if save.asked >= 0 else -1)
            for save in one.saves
        ),
        made_of=tuple(numbers[i] for i in one.made_of),
    )


def _moved_call(call: ModuleCall, shift: int, numbers: Mapping[int, int]) -> ModuleCall:
    return replace(
        call,
        inputs=tuple(numbers[i] if i >= 0 else i for i in call.inputs),
        sources=tuple(numbers[i] for i in call.sources),
        first=call.first + shift,
        last=call.last + shift,
    )
