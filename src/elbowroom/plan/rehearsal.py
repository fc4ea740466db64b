"""The plan of a first step is made from a rehearsal: a forward that ran without holding tensors.

Its ops and sizes were recorded. Its backward is estimated here, node by node:

    order      autograd's own, over the graph that forward has built (`backward.py`)
    base(t)    what stood before the step + what forward has left behind + what cannot be planned
               and is still to be asked for + gradients of parameters so far + `care.ops` x what the
               op takes: its gradients and all that wait + a workspace for one that it has saved;
               at the first, the loss's input three times, if that is more and the loss is not part
               of forward; with care, what forward gives, besides, as the program may hold it

Workspaces inside of libraries are not known, so CAREFUL leaves a little for them; MIDDLE takes the
graph at its word, LIKELY also supposes that the loss reads no result that others were made of, and
that nobody holds what it reads, and LEAST, for refusals, that the loss takes less. An op that saves
a workspace (an LSTM) takes 0.4 to 2.4 times as much for that of its backward. The plan that comes
of it is corrected by the first measurement. Where a forward gives nothing that a graph is found
from, what it saves is taken for one chain of ops.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

import torch

from elbowroom.plan.backward import BackwardOp, Graph, run
from elbowroom.plan.profile import ModuleCall, Profile, Storage, is_planned
from elbowroom.plan.site import Reads

# Largest tensors that are set aside for backward while nothing is known of it.
SAFE, USUAL = 6, 3


class Care(NamedTuple):
    """How much an estimate of backward leaves for what the graph does not tell.

    ops         times what the graph says that an op takes
    workspaces  times the workspace that an op has saved, for that of its backward
    any_loss    the loss may read all that forward gives, and the program may hold that until
                backward has ended; else the loss reads what nothing else was made of, and is all
                that holds it
    loss        times its input that a loss outside of forward takes beside that: what it saves of
                it, the gradient of that, and its own
    """

    ops: float
    workspaces: float
    any_loss: bool
    loss: float = 3


CAREFUL, MIDDLE, LIKELY = Care(1.25, 0.75, True), Care(1.0, 0.5, True), Care(1.0, 0.5, False)
LEAST = LIKELY._replace(loss=2)

HELD = "an input that others hold, too"

EMPTY = Graph()


@dataclass(frozen=True)
class Unallocated:
    """A gradient that the step will create. owners: modules that have the parameter; by name."""

    nbytes: int
    owners: tuple[str, ...]


@dataclass(frozen=True)
class ForwardProfile:
    """A forward that was written down, and held nothing.

    loss_nbytes  of the largest tensor that the loss may be taken of, and of the smallest; 0: the
                 loss is part of forward
    out_nbytes   of all that forward gives
    resident     storages, by index, that stood before it: the model's buffers, which take no more
    outs         storages, by index, that what forward gives lies in: there until backward
    gone         storages, by index, that nothing held any more as forward ended: those of a branch
                 whose result it does not use
    inputs       storages, by index, of what forward was given, which no measurement counts
    """

    profile: Profile
    graph: Graph = EMPTY
    loss_nbytes: tuple[int, int] = (0, 0)
    out_nbytes: int = 0
    resident: frozenset[int] = frozenset()
    outs: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()

    @property
    def left_nbytes(self) -> int:
        """The bytes left behind that were not noted: inputs of the user's checkpoints, mostly."""
        profile = self.profile
        noted = sum(self.profile.storages[i].nbytes for i in self.small)
        left = profile.floor[-1] - profile.static if profile.floor else 0
        return max(left - noted - self.out_nbytes, 0)

    @property
    def small(self) -> tuple[int, ...]:
        """The storages, by index, that autograd holds by itself, and that forward has left."""
        storages, others = enumerate(self.profile.storages), self.resident | self.gone
        return tuple(i for i, one in storages if i not in others and not is_planned(one))

    def with_co_resident(self, nbytes: int) -> "ForwardProfile":
        """Returns the same with so many bytes more held before it, and all the while."""
        return replace(self, profile=self.profile.shifted(nbytes))

    def followed_by(self, later: "ForwardProfile") -> "ForwardProfile":
        """Returns both forwards joined, before one backward."""
        graph = self.graph.followed_by(later.graph)
        # A loss that has read all of the outputs is known, and is no guess any more.
        most, least = self.loss_nbytes if graph.begins_at(self.graph) else (0, 0)
        shift = len(self.profile.storages)
        profile = in_sequence(self.profile, later.profile)
        last = max(len(profile.level) - 1, 0)
        storages = (
            replace(one, used=last) if i in self.outs else one
            for i, one in enumerate(profile.storages)
        )
        return ForwardProfile(
            replace(profile, storages=tuple(storages)),
            graph,
            (most + later.loss_nbytes[0], least + later.loss_nbytes[1]),
            self.out_nbytes + later.out_nbytes,
            self.resident.union(i + shift for i in later.resident),
            self.outs.union(i + shift for i in later.outs),
            self.gone.union(i + shift for i in later.gone),
            self.inputs.union(i + shift for i in later.inputs),
        )

    def without_inputs(self) -> "ForwardProfile":
        """Returns the same, with inputs that take nothing where they are saved."""
        storages = (
            replace(one, nbytes=0) if i in self.inputs else one
            for i, one in enumerate(self.profile.storages)
        )
        return replace(self, profile=replace(self.profile, storages=tuple(storages)))

    def given(self, indices: Collection[int]) -> "ForwardProfile":
        """Returns the same, with these storages as inputs that others hold, too."""
        storages = (
            replace(one, saves=tuple(replace(save, left=HELD) for save in one.saves))
            if i in indices
            else one
            for i, one in enumerate(self.profile.storages)
        )
        profile = replace(self.profile, storages=tuple(storages))
        return replace(self, profile=profile, resident=self.resident.union(indices))


@dataclass
class _AskingMoment:
    """One moment of backward: an op that asks for something, or several that do not.

    waits: gradients that wait as it begins
    """

    asks: list[tuple[int, int]]
    nbytes: int = 0
    waits: int = 0
    stay: int = 0


def with_backward(
    forward_profile: ForwardProfile,
    gradients: Iterable[Unallocated],
    state_nbytes: int,
    care: Care = CAREFUL,
    *,
    turns: bool = False,
    update_nbytes: int = 0,
) -> Profile:
    """A whole step, from a forward whose storages were all dropped.

    state_nbytes  of the optimizer's, which the step will create
    update_nbytes  that its step takes besides, once backward has ended
    care          what is left for what the graph does not tell
    turns         plans know what convolutions spare by taking turns, which they do not in the first
                  step, for it is profiled
    """
    results = forward_profile.outs if care.any_loss else frozenset[int]()
    held_nbytes = forward_profile.out_nbytes if care.any_loss else 0
    forward_profile = forward_profile.given(results)
    profile = forward_profile.profile.shifted(state_nbytes)
    storages, first = profile.storages, len(profile.level)
    graph = forward_profile.graph if forward_profile.graph.roots else _chain(storages)
    loss_nbytes = int(care.loss * forward_profile.loss_nbytes[0])
    if not care.any_loss:
        graph = replace(graph, roots=graph.least_roots or graph.roots)
        loss_nbytes = int(care.loss * forward_profile.loss_nbytes[1])
    moments = _moments(graph, care)
    born = sum(gradient.nbytes for gradient in gradients)
    small = _small({i: storages[i].nbytes for i in forward_profile.small}, moments)
    stands = profile.static + forward_profile.left_nbytes + held_nbytes
    base, floor = [], []
    asked: dict[tuple[int, int], int] = {}
    for k, moment in enumerate(moments):
        asked.update(dict.fromkeys(moment.asks, first + k))
        taken, waits = moment.nbytes, moment.waits
        if k == 0 and loss_nbytes > taken:
            taken = waits = loss_nbytes
        taken += int(care.workspaces * _workspace_nbytes(storages, moment))
        taken += _kept_places_nbytes(storages, moment, results)
        stays = stands + small[k] + min(moment.stay, born)
        base.append(stays + taken)
        samples = any(storages[i].saves[nth].site.reads is Reads.SAMPLES for i, nth in moment.asks)
        floor.append(stays + waits if turns or not samples else -1)
    asked_storages = tuple(
        storage
        if i in forward_profile.gone
        else _as_requested(storage, i, asked, first, first + len(base) - 1)
        for i, storage in enumerate(storages)
    )
    dropped = [storage for storage in asked_storages if is_planned(storage)]
    forward_s = profile.seconds
    step_s = 2 * forward_s / max(len(base), 1)
    level = (*profile.level, *_with(dropped, base, first))
    floors = (*profile.floor, *(level[first + k] if n < 0 else n for k, n in enumerate(floor)))
    if update_nbytes:
        stays = profile.static + born
        level, floors = (*level, stays + update_nbytes), (*floors, stays)
    return replace(
        profile,
        level=level,
        floor=floors,
        starts_s=(*profile.starts_s, *(forward_s + k * step_s for k in range(len(level) - first))),
        backward=min(first, len(level) - 1),
        seconds=3 * forward_s,
        storages=asked_storages,
        measured=False,
    )


def _chain(storages: tuple[Storage, ...]) -> Graph:
    """Returns ops one after another, each with a gradient as large as what it has saved."""
    saves = sorted(
        (save.at, i, nth)
        for i, storage in enumerate(storages)
        for nth, save in enumerate(storage.saves)
    )
    at = {(i, nth): k for k, (_, i, nth) in enumerate(saves)}
    nodes = tuple(
        BackwardOp(k, "", (_differentiable_nbytes(storages[i]),), ((k - 1, 0),))
        for k, (_, i, _) in enumerate(saves)
    )
    asks = tuple(
        tuple(at[i, nth] for nth in range(len(storage.saves))) for i, storage in enumerate(storages)
    )
    return Graph(nodes, ((len(nodes) - 1, 0),) if nodes else (), asks)


def _moments(graph: Graph, care: Care) -> list[_AskingMoment]:
    """Returns the moments of backward: its ops; several in a row that ask for nothing are one."""
    ran = run(graph)
    asks = _requests(graph, sorted(one.nth for one in ran if not one.is_leaf))
    found: list[_AskingMoment] = []
    for one in ran:
        nbytes, waits = (int(care.ops * part) + one.hidden for part in (one.nbytes, one.waits))
        asking = [] if one.is_leaf else asks.pop(one.nth, [])
        if asking or not found:
            found.append(_AskingMoment(asking, nbytes, waits, one.stay))
            continue
        last = found[-1]
        if nbytes + one.stay <= last.nbytes + last.stay:
            continue
        if last.asks:
            found.append(_AskingMoment([], nbytes, waits, one.stay))
        else:
            last.nbytes, last.stay = nbytes, one.stay
    return found or [_AskingMoment([])]


def _requests(graph: Graph, there: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Returns the pairs (storage, save) that each op of backward asks for, by the op's number.

    there: the numbers of all ops, ascending

    What no op of the graph has saved is the input of the user's checkpoint, whose ops come between
    that save and the next: the first of them that runs asks for it. Or it is a branch that leads
    nowhere, and is let go of at the latest by the op that was made before it.
    """
    saved = sorted({nth for nths in graph.asks for nth in nths})
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i, nths in enumerate(graph.asks):
        for k, nth in enumerate(nths):
            later = bisect_right(saved, nth)
            end = nth + 1 if _contains(there, nth) else saved[later] if later < len(saved) else inf
            at = bisect_left(there, end) - 1
            found[there[max(at, 0)] if there else nth].append((i, k))
    return found


def _contains(numbers: list[int], one: int) -> bool:
    at = bisect_left(numbers, one)
    return at < len(numbers) and numbers[at] == one


def _small(held: Mapping[int, int], moments: list[_AskingMoment]) -> list[int]:
    """Bytes that autograd holds by itself in each moment; a storage goes after its last op.

    held: bytes of each of these storages, by index
    """
    asked_last = {i: k for k, moment in enumerate(moments) for i, _ in moment.asks}
    small = [0] * len(moments)
    for i, nbytes in held.items():
        small[asked_last.get(i, len(moments) - 1)] += nbytes
    return list(accumulate(reversed(small)))[::-1]


def _differentiable_nbytes(storage: Storage) -> int:
    """Returns the bytes that may have an equal gradient; a workspace or a mask has none."""
    dtypes = (save.site.dtype for save in storage.saves)
    return storage.nbytes if any(d.is_floating_point or d.is_complex for d in dtypes) else 0


def _workspace_nbytes(storages: tuple[Storage, ...], moment: _AskingMoment) -> int:
    """Returns the bytes that only the op that filled them can read: those without a dtype."""
    asked = {i for i, _ in moment.asks}
    return sum(storages[i].nbytes for i in asked if storages[i].saves[0].site.dtype is torch.uint8)


def _kept_places_nbytes(
    storages: tuple[Storage, ...], moment: _AskingMoment, results: frozenset[int]
) -> int:
    """Returns the bytes of what is asked for, and whose place no gradient takes: others hold it."""
    asked = (
        storages[i]
        for i, nth in moment.asks
        if i in results and storages[i].saves[nth].site.reads is Reads.ROWS
    )
    return sum(storage.nbytes for storage in asked)


def _as_requested(
    storage: Storage, index: int, asked: dict[tuple[int, int], int], first: int, last: int
) -> Storage:
    """The storage as backward will ask for it; it was dropped, and held nothing after its use."""
    saves = tuple(
        save.asked_at(asked.get((index, nth), last)) for nth, save in enumerate(storage.saves)
    )
    needs = tuple(sorted({save.asked for save in saves}))
    return replace(
        storage, saves=saves, needs=needs, freed=needs[-1] if needs else first, held=0, kept=False
    )


def _with(storages: list[Storage], base: list[int], first: int) -> list[int]:
    """The levels of a backward that restores what each moment needs, and holds nothing else."""
    level = list(base)
    for storage in storages:
        for need in storage.restored:
            level[need - first] += storage.nbytes
    return level


def in_sequence(first: Profile, second: Profile) -> Profile:
    """Returns one profile of both. static, rates and what stands are those of the first.

    first   its last floor is what it leaves behind: outputs, and what autograd holds by itself
    second  lies on that, moment after moment
    """
    moments, storages = len(first.level), len(first.storages)
    left = max(first.floor[-1] - first.static, 0) if first.floor else 0
    second = second.shifted(first.static + left - second.static)
    return replace(
        first,
        level=(*first.level, *second.level),
        floor=(*first.floor, *second.floor),
        starts_s=(*first.starts_s, *(first.seconds + at_s for at_s in second.starts_s)),
        backward=moments + second.backward,
        seconds=first.seconds + second.seconds,
        unlisted_nbytes=first.unlisted_nbytes + second.unlisted_nbytes,
        storages=(
            *first.storages,
            *(_later(storage, moments, storages) for storage in second.storages),
        ),
        modules=(
            *first.modules,
            *(_later_call(call, moments, storages) for call in second.modules),
        ),
    )


def _later(storage: Storage, moments: int, storages: int) -> Storage:
    """Returns it so many moments later; `storages` come before those that it names."""
    saves = tuple(replace(save, at=save.at + moments) for save in storage.saves)
    return replace(
        storage,
        born=storage.born + moments,
        used=storage.used + moments,
        freed=storage.freed + moments,
        saves=saves,
        made_of=tuple(at + storages for at in storage.made_of),
    )


def _later_call(call: ModuleCall, moments: int, storages: int) -> ModuleCall:
    """Returns a call of a module so many moments later; `storages` come before those it names."""
    return replace(
        call,
        inputs=tuple(i + storages if i >= 0 else i for i in call.inputs),
        sources=tuple(i + storages for i in call.sources),
        first=call.first + moments,
        last=call.last + moments,
    )
