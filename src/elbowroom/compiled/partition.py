"""The partitioner that Inductor calls: PyTorch's min-cut, with another choice of saved values.

`min_cut_rematerialization_partition` does much more than choosing: it removes common
subexpressions, keeps user checkpoints, collectives and effects where they are, makes random ops
repeat, and orders backward. All of that is kept. Only `choose_saved_values_set`, which it calls for
the saved values, is replaced by `decide.py` while it runs. Both are private to torch; `check_torch`
raises an error where a version lacks them.

A partitioner holds settings only: Inductor pickles it for its cache of compiled graphs and calls
its `uuid`, so that a second start finds the graphs of the first.
"""

import gc
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import networkx
import torch
from torch import fx
from torch._functorch import partitioners
from torch._inductor import custom_graph_pass

from elbowroom.codecs import Codec
from elbowroom.codecs.names import setting_name, setting_named
from elbowroom.compiled.attention import from_inputs
from elbowroom.compiled.codable import ladder
from elbowroom.compiled.collect import is_away, nbytes_of
from elbowroom.compiled.cut import minimum_cut
from elbowroom.compiled.decide import Search, choose, judge_all_cuts
from elbowroom.compiled.decision import Decision as Decision
from elbowroom.compiled.decision import HeldAtBackward, too_small
from elbowroom.compiled.expand import expand
from elbowroom.compiled.joint import Joint, Step
from elbowroom.compiled.layouts import mark_layouts, sums_up_groups, sums_up_transforms
from elbowroom.compiled.lossy import Least, code, code_all
from elbowroom.compiled.ops import DRAW
from elbowroom.compiled.order import gradients_first
from elbowroom.compiled.sums import fuse, split
from elbowroom.compiled.tails import may_end_in_few
from elbowroom.compiled.twice import late_operands, own_functions, plain_loops, undo
from elbowroom.errors import BudgetTooSmall

_TIGHTER = (0.8, 0.6, 0.4)  # rooms in which a step that holds less is searched
_Graphs = tuple[fx.GraphModule, fx.GraphModule]


class _Thread(threading.local):
    """Listeners that are notified of decisions on this thread."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Decision], None]] = []


_thread = _Thread()
_patching = threading.RLock()


@contextmanager
def listening(listener: Callable[[Decision], None]) -> Iterator[None]:
    """Passes decisions that are made on this thread to `listener`.

    A region from Inductor's cache was decided when it was stored, and is not passed.
    """
    _thread.listeners.append(listener)
    try:
        yield
    finally:
        _thread.listeners.remove(listener)


def _base() -> type:
    """Inductor's base class of partitioners; `object` where a version of torch has none."""
    return getattr(custom_graph_pass, "CustomPartitionerFn", object)


@dataclass(frozen=True)
class Partitioner(_base()):  # type: ignore[misc]
    """Partitions a joint graph so that the step's peak stays inside a budget.

    room_nbytes    the most that forward and backward may take; None: as plain torch.compile does
    counts_inputs  whether parameters, buffers and inputs of the region belong to that
    exact          True: what changes no bit; None: that first, then codes; False: the fastest
    codes          the setting of a codec (`setting_name`) for all that it may hold, whatever the
                   room; "": exact codes alone; None: only what the room needs
    min_nbytes     values below are not coded, where `codes` are given
    held_nbytes    the most that may be held between forward and backward, if that can be; None: all
    noise          the most that codes may add to the gradient's variance, as a share of that of
                   mini-batches; None: as much as the room needs
    offloads       whether saved values may leave the device's memory
    menu           the names of codes to choose from (`codable.ladder`); None: all
    fills          whether codes hold as much besides as the simulation says that there is room for
    standing_nbytes  of outputs of the forward before, which stand until the next one has ended
    sizes          those that are symbols, in the call that is compiled. Inductor's cache finds a
                   graph with symbols for calls of any size, but its plan is for these
    apart          the names of what ends rows in two ways in plain torch.compile (`tails.py`);
                   follows from all else
    """

    room_nbytes: int | None = None
    counts_inputs: bool = False
    exact: bool | None = True
    codes: str | None = None
    min_nbytes: int = 32768
    held_nbytes: int | None = None
    noise: float | None = None
    offloads: bool = False
    menu: tuple[str, ...] | None = None
    fills: bool = False
    standing_nbytes: int = 0
    sizes: tuple[int, ...] = ()
    apart: tuple[str, ...] = ()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> _Graphs:
        """Returns the forward and the backward graph."""
        answer = _Answer(self, kwargs["num_fwd_outputs"])
        if self.room_nbytes is not None:
            fuse(gm.graph)
        with _patching, mock.patch.object(partitioners, "choose_saved_values_set", answer):
            graphs = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        for graph in graphs:
            expand(graph)
        return graphs

    def uuid(self) -> object:
        """Identifies these settings and this code, for Inductor's cache."""
        used = [*ladder(self.menu), *([setting_named(self.codes)] if self.codes else [])]
        return (
            _hash_of_code(),
            astuple(replace(self, apart=())),
            [(setting_name(c), _source_of(c)) for c in used],
        )


@cache
def _hash_of_code() -> str:
    """A hash of all files that affect a compiled graph."""
    digest = hashlib.sha256()
    own = Path(__file__).parent
    for folder in (own, own.parent / "codecs", own.parent / "kernels"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _source_of(codec: Codec) -> str:
    """The source of a codec's class, which may be another package's."""
    try:
        return inspect.getsource(type(codec))
    except (OSError, TypeError):  # it was not read from a file
        return ""


class _Answer:
    """Replacement of `choose_saved_values_set` while a graph is partitioned."""

    def __init__(self, settings: Partitioner, n_forward_outputs: int) -> None:
        self._settings = settings
        self._n_forward_outputs = n_forward_outputs
        self._choose = partitioners.choose_saved_values_set

    def __call__(
        self, joint_graph: fx.Graph, node_info: Any, memory_budget: float = 1
    ) -> list[fx.Node]:
        required = node_info.required_fw_nodes
        standing = self._settings.standing_nbytes
        joint = Joint(joint_graph, required, node_info.inputs, self._n_forward_outputs, standing)
        inputs_nbytes = sum(nbytes_of(node) for node in joint.inputs)
        room = self._settings.room_nbytes
        if room is not None and self._settings.counts_inputs:
            room -= inputs_nbytes

        def min_cut(budget: float) -> list[fx.Node]:
            return list(self._choose(joint_graph, node_info, memory_budget=budget))

        def added(made: list[fx.Node]) -> None:
            node_info.required_bw_nodes.update(made)
            node_info.tangents_closure.update(made)
            for node in made:
                node.dist_from_bw = 0  # as the partitioner has marked all of backward

        def without_sums() -> bool:
            made = split(joint_graph, node_info.required_bw_nodes)
            added(made)
            if made:
                joint.refresh()
            return bool(made)

        def reordered(loops: bool) -> bool:
            copies = own_functions(joint)
            added(copies)
            made = gradients_first(joint, loops=loops)
            added(made or [])
            return bool(copies) or made is not None

        def as_plain(plain: Step) -> bool:
            made = plain_loops(joint, plain, self._settings.apart)
            added(made)
            return bool(made)

        def consistent() -> bool:
            made = from_inputs(joint)
            added(made)
            return bool(made)

        late: dict[fx.Node, fx.Node] = {}

        def delayed() -> bool:
            late.update(late_operands(joint))
            added(list(late))
            return bool(late)

        def undone() -> None:
            node_info.required_bw_nodes.difference_update(late)
            node_info.tangents_closure.difference_update(late)
            undo(late, joint)

        changes = _Changes(as_plain, without_sums, reordered, consistent, delayed, undone)
        with _remembered_cuts(), _uncollected():
            searched = partial(Search, joint, min_cut, memory_budget)
            step, plain, search, noise = self._decided(
                joint, searched, changes, room, inputs_nbytes
            )
        if self._settings.exact is True and step is not plain:
            mark_layouts(joint, plain)
        rounds = bool(search.rounded)
        is_tailed = self._settings.exact is True and step is not plain and may_end_in_few(joint)
        _report_decision(
            joint,
            step,
            plain,
            inputs_nbytes,
            noise=noise,
            fuses_alike=rounds,
            is_tailed=is_tailed,
        )
        return list(step.saved)

    def _decided(
        self,
        joint: Joint,
        searched: Callable[..., Search],
        changes: "_Changes",
        room: int | None,
        inputs_nbytes: int,
    ) -> tuple[Step, Step, Search, float]:
        """Decides about a graph, and puts codes into it.

        Returns the chosen step, the one of plain torch.compile, the search that found it, and the
        variance that its codes are predicted to add.

        searched: makes a search in the graph as it is
        """
        exact = self._settings.exact
        if self._settings.codes is not None:
            search = searched(same_bits=False)
            plain = search.plain
            if self._settings.codes and changes.consistent():
                search = searched(same_bits=False)
            step, noise = self._all_coded(search, self._settings.codes)
            return step, plain, search, noise
        search = searched(same_bits=exact is not False)
        plain = search.plain
        if room is None or plain.peak_nbytes <= room:
            return _holding(search, plain, room, self._settings.held_nbytes), plain, search, 0.0
        if exact is False:
            return self._fastest(joint, searched, changes, plain, room, inputs_nbytes)
        is_moved, kept = False, search.kept
        if not search.rounded:
            is_moved = any([changes.as_plain(plain), changes.reordered(False)])
        if is_moved:
            search = searched(same_bits=False, is_moved=True, kept=kept)
        held = self._settings.held_nbytes
        step = _holding(search, choose(search, room), room, held)
        if step.peak_nbytes > room and exact is True and is_moved and changes.delayed():
            later = searched(same_bits=False, is_moved=True, kept=kept)
            step, search = _lower((step, search), later, room, held, changes.undone)
        if step.peak_nbytes <= room:
            return step, plain, search, 0.0
        if self._settings.offloads and not search.rounded and exact is None:
            limit = inf if held is None else held  # before roundings change
            moved, *_ = code(search, step, room, exact=True, held_nbytes=limit, offloads=True)
            if moved is not None:
                return moved, plain, search, 0.0
        if exact is None:  # other roundings
            changed = [changes.without_sums(), changes.consistent(), changes.reordered(True)]
            if any(changed) or search.rounded or kept:
                search = searched(same_bits=False, is_moved=changed[-1] or is_moved)
                step = choose(search, room)
                if step.peak_nbytes <= room:
                    return step, plain, search, 0.0
        coded, least, noise = self._coded(search, step, room)
        if coded is None:
            raise _too_small(least, inputs_nbytes, self._settings)
        return coded, plain, search, noise

    def _fastest(
        self,
        joint: Joint,
        searched: Callable[..., Search],
        changes: "_Changes",
        plain: Step,
        room: int,
        inputs_nbytes: int,
    ) -> tuple[Step, Step, Search, float]:
        """Decides where codes may add errors from the start.

        The lowest peak without codes, whose search takes the longest, is looked for only where no
        minimum cut fits with them.
        """
        changes.without_sums()
        changes.consistent()
        search = searched(same_bits=False, is_moved=changes.reordered(True))
        step = choose(search, room, lowers=False)
        coded, least, noise = self._coded(search, step, room)
        if coded is None and step.peak_nbytes > room:
            step = choose(search, room)
            coded, lower, noise = self._coded(search, step, room)
            least = min(least, lower, key=lambda one: one.nbytes)
        if coded is None and step.peak_nbytes > room:
            raise _too_small(least, inputs_nbytes, self._settings)
        return step if coded is None else coded, plain, search, noise

    def _coded(self, search: Search, step: Step, room: int) -> tuple[Step | None, Least, float]:
        """Puts codes into the graph, so that the step fits; see `lossy.code`."""
        given = self._settings
        return code(
            search,
            step,
            room,
            exact=given.exact,
            noise=given.noise,
            held_nbytes=inf if given.held_nbytes is None else given.held_nbytes,
            offloads=given.offloads and not search.rounded,
            menu=given.menu,
            fills=given.fills,
        )

    def _all_coded(self, search: Search, codes: str) -> tuple[Step, float]:
        """Codes all that the setting of this name may hold; "": exact codes alone."""
        codec = setting_named(codes) if codes else None
        return code_all(search, codec, self._settings.min_nbytes)


@dataclass(frozen=True)
class _Changes:
    """Changes of a joint graph that may lower its peak; they return whether it is another one.

    as_plain      gradients compute the loops that they read as in plain backward (`layouts.py`)
    without_sums  sums of products that Inductor would join are split, which may change a rounding
    reordered     gradients of weights come first, and slow functions are computed for them again;
                  with True, which may change a rounding, loops of backward come before calls, too
    consistent    gradients of attention are computed from q, k and v alone
    delayed       operands of sums at the end of backward are computed there again
    undone        that is taken back
    """

    as_plain: Callable[[Step], bool]
    without_sums: Callable[[], bool]
    reordered: Callable[[bool], bool]
    consistent: Callable[[], bool]
    delayed: Callable[[], bool]
    undone: Callable[[], None]


def _holding(search: Search, step: Step, room: int | None, held: int | None) -> Step:
    """Returns the fastest step found that holds at most so much until backward, if there is one.

    Else the one that holds least. A peak alone does not show what is alive while other regions run.
    """
    if room is None or held is None or step.saved_nbytes <= held or step.peak_nbytes > room:
        return step
    for share in _TIGHTER:
        choose(search, int(share * room))  # which judges steps that save less
        fitting = [one for one in search.steps if one.peak_nbytes <= room]
        small = [one for one in fitting if one.saved_nbytes <= held]
        if small:
            return min(small, key=lambda one: one.seconds)
    judge_all_cuts(search)  # so that a larger room never holds more
    fitting = [one for one in search.steps if one.peak_nbytes <= room]
    return min(fitting, key=lambda one: (one.saved_nbytes, one.peak_nbytes, one.seconds))


def _lower(
    before: tuple[Step, Search],
    search: Search,
    room: int,
    held: int | None,
    undone: Callable[[], None],
) -> tuple[Step, Search]:
    """Returns the step of a changed graph if its peak is lower; else undoes the change."""
    step = _holding(search, choose(search, room), room, held)
    if step.peak_nbytes < before[0].peak_nbytes:
        return step, search
    undone()
    return before


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keeps Python's garbage collector from running: a plan makes many objects, and few cycles.

    Each full collection looks at all that torch has made until then, half a second of it.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


@contextmanager
def _remembered_cuts() -> Iterator[None]:
    """Solves each minimum cut, and estimates the time of each op, only once inside this context.

    The first cut is plain torch.compile's, and is left to torch. All others are found by `cut.py`.
    """
    solve, estimate = partitioners.solve_min_cut, partitioners.estimate_runtime
    known: dict[Any, Any] = {}

    def solve_once(graph: fx.Graph, info: Any, options: Any, dont_ban: Any = None) -> Any:
        marks = tuple(n for n in graph.nodes if "recompute" in n.meta)
        key = repr(options), frozenset(dont_ban or ()), marks, len(graph.nodes)
        if not known:
            known[key] = solve(graph, info, options, dont_ban)
        elif key not in known:
            with mock.patch.object(networkx, "minimum_cut", minimum_cut):
                known[key] = solve(graph, info, options, dont_ban)
        saved, banned = known[key]
        return list(saved), banned

    with (
        mock.patch.object(partitioners, "solve_min_cut", solve_once),
        mock.patch.object(partitioners, "estimate_runtime", cache(estimate)),
    ):
        yield


def _report_decision(
    joint: Joint,
    step: Step,
    plain: Step,
    inputs_nbytes: int,
    *,
    noise: float,
    fuses_alike: bool,
    is_tailed: bool,
) -> None:
    decision = Decision(
        peak_nbytes=step.peak_nbytes,
        saved_nbytes=step.saved_nbytes,
        forward_nbytes=step.forward_nbytes,
        plain_nbytes=plain.peak_nbytes,
        inputs_nbytes=inputs_nbytes,
        recomputed=len(step.again),
        plain_saved_nbytes=plain.saved_nbytes,
        is_lossy=any(n.target is DRAW for n in joint.graph.nodes),
        is_plain=step is plain,
        fuses_alike=fuses_alike,
        is_uncertain=step is not plain and (sums_up_groups(joint) or sums_up_transforms(joint)),
        is_tailed=is_tailed,
        noise=noise,
        away_nbytes=sum(nbytes_of(n) for n in joint.graph.nodes if is_away(n)),
        held=_held(joint, step),
    )
    for listener in _thread.listeners:
        listener(decision)


def _held(joint: Joint, step: Step) -> HeldAtBackward:
    """Returns what is in memory as backward begins, apart from parameters and inputs."""
    facts = joint.facts
    fixed = {facts[n].storage for n in (*joint.forward_outputs, *joint.tangents)} - joint.outside
    saved = {n.name: facts[n].storage for n in step.saved}
    return HeldAtBackward(
        sum(facts[s].nbytes for s in fixed),
        {
            name: (storage.name, facts[storage].nbytes)
            for name, storage in saved.items()
            if storage not in fixed | joint.outside
        },
    )


def _too_small(least: Least, inputs_nbytes: int, settings: Partitioner) -> BudgetTooSmall:
    """Returns the error for a budget below what was found, with what the lowest peak holds."""
    assert settings.room_nbytes is not None
    nbytes, parts = least.nbytes, dict(least.parts)
    if settings.counts_inputs:
        nbytes += inputs_nbytes
        parts["parameters and inputs"] = inputs_nbytes
    noise = None if settings.exact else settings.noise
    return too_small(settings.room_nbytes, nbytes, parts, noise)


def check_torch() -> None:
    """Raises PlanError where this version of torch lacks what a compiled plan needs."""
    from torch._inductor import config

    from elbowroom.errors import PlanError

    lacking = [
        name
        for name, is_there in {
            "torch._inductor.config.custom_partitioner_fn": hasattr(
                config, "custom_partitioner_fn"
            ),
            "torch._functorch.partitioners.choose_saved_values_set": hasattr(
                partitioners, "choose_saved_values_set"
            ),
        }.items()
        if not is_there
    ]
    if lacking:
        raise PlanError(
            f"torch {torch.__version__} has no {lacking[0]}, which budgets inside torch.compile "
            "need; torch 2.11 to 2.14 have it. Use one of these, or fit the model without "
            "torch.compile."
        )
