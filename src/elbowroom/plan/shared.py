"""Tensors that are rebuilt or decoded once, and wait for their next readers where there is room.

The softmax of an attention is read twice in backward, and the output of a norm by the products of
query, key and value; the code of a SiLU's input by the product that it is a factor of, by the SiLU,
and by the layer that reads the product. Restored for each reader, it takes memory only while that
reader runs. Restored once, and held from the first reader to the last, it takes less time. The peak
of a step is mostly where backward begins, and there is room later. So once a solver has chosen,
tensors are shared, those first that save the most time, as long as no moment is above what is
allowed.
"""

from dataclasses import dataclass

from elbowroom.plan.build_problem import BuiltProblem
from elbowroom.plan.problem import Choice, Item, Option, held_options, levels
from elbowroom.plan.profile import Profile, Storage
from elbowroom.plan.restored import is_mapped, runs_of, whole_needs
from elbowroom.plan.site import Need, Reads


@dataclass(frozen=True)
class Shared:
    """The storages that are shared, by index, and the seconds that this saves.

    peak  of the step with it, in bytes
    """

    saved_s: dict[int, float]
    peak: int


def share(profile: Profile, built: BuiltProblem, choice: Choice, allowed: int) -> Shared:
    """Returns which storages wait for their next readers, once they are restored.

    allowed: bytes that no moment may exceed
    """
    level = levels(built.problem, choice)
    held = {
        built.storages[i]: (built.problem.items[i], option)
        for i, option in held_options(built.problem, choice)
    }
    restores = _restores(profile, held, exact=built.exact)
    gains = {}
    for index, moments in restores.items():
        item, option = held[index]
        last = item.needs[-1][0] if _is_asked_by_all(profile.storages[index]) else item.freed
        times = [moment for moment in moments if moment <= last]
        if len(times) > 1:
            gains[index] = (runs_of(times) - 1) * option.restore_s, times[0], last
    saved_s = {}
    for index, (seconds, first, last) in sorted(gains.items(), key=lambda one: -one[1][0]):
        item, option = held[index]
        there = level[first : last + 1].copy()
        there += item.nbytes
        for moment, _ in item.needs:  # where it counts already
            if first <= moment <= last and moment not in dict(option.direct):
                there[moment - first] -= item.nbytes
        if there.max() <= allowed:
            level[first : last + 1] = there
            saved_s[index] = seconds
    return Shared(saved_s, int(level.max(initial=0)))


def _is_asked_by_all(storage: Storage) -> bool:
    """Returns whether each reader of its values restores it, so that the last one is known."""
    reads = (Reads.RESTORED, Reads.PLACE, Reads.GRADIENT, Reads.ROWS)
    values = [save for save in storage.saves if save.site.need in (Need.EXACT, Need.LOSSY)]
    return all(save.asked >= 0 and save.site.reads in reads for save in values)


def _restores(
    profile: Profile, held: dict[int, tuple[Item, Option]], *, exact: bool
) -> dict[int, list[int]]:
    """Returns, for each storage that is restored as a whole, the moments at which it is.

    That is at its own needs, and at those of what is rebuilt from it: but for what a code is
    decoded to in one pass.
    """
    restored = {i for i, (_, option) in held.items() if option.restore_s > 0}
    found = {}
    for i in restored:
        item, option = held[i]
        read = {need for need, _ in item.needs if need not in dict(option.direct)}
        found[i] = read if exact else whole_needs(profile.storages[i])
    for i in sorted(restored, reverse=True):  # what is made of others comes after them
        if exact or not is_mapped(profile.storages[i]):
            for source in profile.storages[i].made_of:
                if source in found:
                    found[source] |= found[i]
    return {i: sorted(moments) for i, moments in found.items() if held[i][0].needs and moments}
