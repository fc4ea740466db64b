"""The modes in which one forward of a fitted model runs.

    _forward    examined; if it would hold more than is allowed, it climbs the ladder of presets
    _kept       examined, and discarded as soon as it would hold too much: it is planned instead
    _replayed   by a script, or with no hook open where that does nothing and much memory is free
    _fail       examined, after a rehearsal of it has raised

Which of them a forward is, and to which step it belongs, is decided in `session.py`.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elbowroom.errors import BudgetTooSmall, NothingHeld
from elbowroom.fitting.forward import FittedSaving
from elbowroom.fitting.messages import warn_unplanned
from elbowroom.fitting.options import MemoryState
from elbowroom.fitting.planner import Planner
from elbowroom.fitting.replayed import ReplayedForward, ReplayedSaving
from elbowroom.fitting.steps import MeasuredSteps
from elbowroom.measure.graph import graph_of
from elbowroom.measure.in_use import in_use_nbytes
from elbowroom.measure.interval import may_measure
from elbowroom.plan.backward import run
from elbowroom.runtime.replay.script import Script
from elbowroom.runtime.undo import Undo

_innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class ForwardModes(MeasuredSteps):
    """Runs single forwards of one fitted model, and notes what they hold."""

    def _forward(self, forward: Callable[[], Any], after: FittedSaving | None = None) -> Any:
        cut_short = False
        with self._context(after=after) as saving:
            try:
                out = forward()
            except NothingHeld:
                if not saving.impossible:
                    raise
                cut_short = True
        if cut_short:
            _refuse_part(self.planner, saving)
        if saving.impossible and not cut_short:
            saving.gradients_nbytes = gradients_peak(_with_graph(out))
        self._ended(saving)
        return out

    def _kept(
        self,
        forward: Callable[[], Any],
        after: FittedSaving | None = None,
        undo: Undo | None = None,
        *,
        leaves_room: bool = False,
    ) -> tuple[Any] | None:
        """Runs a forward and returns its output in a tuple; None if what it holds does not fit.

        undo: copies of what the forward may change; those it leaves unchanged are dropped
        leaves_room: others of the same step follow, of which nothing is known
        """
        since = torch._C._autograd._get_sequence_nr() if self._neighbors.is_inside else 0
        with self._context(may_climb=False, after=after) as saving:
            saving.copied_nbytes = 0 if undo is None else undo.copied_nbytes
            saving.leaves_room = leaves_room
            try:
                out = forward()
            except NothingHeld:
                return None
        if undo is not None:
            undo.let_go()
        if saving.too_much or (after is None and self._will_be_too_much(out, saving, since)):
            return None
        self._ended(saving)
        return (out,)

    def _will_be_too_much(self, out: Any, saving: FittedSaving, since: int) -> bool:
        """Returns whether backward would exceed the budget, and a plan could prevent this.

        since: autograd's number of the first node of this model
        """
        if not may_measure(self.model_state.device) and self._step is None:
            return False
        highest = peak_of_backward(_with_graph(out), saving, self.planner.memory, since)
        return highest > self.options.budget_nbytes

    def _fail(
        self,
        forward: Callable[[], Any],
        error: BaseException,
        undo: Undo,
        after: FittedSaving | None = None,
    ) -> Any:
        """Runs a forward whose rehearsal has raised and was undone: what it does first has to stay.

        Plain training, too, keeps the counts of a batch norm, and the random numbers, that a
        forward took before it raised. If this one does not raise, the fault is not the model's.
        """
        try:
            out = self._forward(forward, after)
        except BudgetTooSmall:
            undo.back()
            raise error from None
        if self._is_first(f"{type(error).__name__}: {error}"):
            warn_unplanned(self.options, error)
        return out

    def _replayed(
        self, forward: Callable[[], Any], script: Script, after: ReplayedForward | None = None
    ) -> Any:
        """Runs a forward by its script; if it differs from the script, examines the rest."""
        known = ReplayedForward(self.planner, script, after)
        self._opened = known
        if script.does_nothing and self._has_ample_room and _innermost_hooks(True) is None:
            since = torch._C._autograd._get_sequence_nr()
            out = forward()
            self.planner.has_run(torch._C._autograd._get_sequence_nr() - since)
            self._note_in_use(in_use_nbytes(self.model_state.device))
        else:
            with ReplayedSaving(self.planner, script, after) as saving:
                out = forward()
            if saving.diverged:
                self.planner.diverged_from(script)
            if saving.rest is not None and saving.entry is not None:
                known.ledger.follow(out)
                known.ledger.when_over(saving.entry.close)
                self._neighbors.opened(saving.rest.ledger)
                self._ended(saving.rest)
                return out
        known.ledger.follow(out)
        self._neighbors.opened(known.ledger)
        self._last = known
        self._note_setting(known)
        return out


def _with_graph(out: Any) -> list[Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]


def _refuse_part(planner: Planner, saving: FittedSaving) -> None:
    """Refuses a forward that could not continue where it ran a backward inside it."""
    try:
        planner.forward_ended(saving)
    except BudgetTooSmall as error:
        raise BudgetTooSmall(
            f"{error} That is what was counted up to a backward inside of forward; the rest of "
            "the step may need more.",
            least_nbytes=error.least_nbytes,
            parts=error.parts,
        ) from None


def peak_of_backward(
    outputs: Iterable[Tensor], saving: FittedSaving, memory: MemoryState, since: int = 0
) -> int:
    """Returns the bytes of backward's highest moment; 0 where the outputs have no graph.

        level(t) = resident bytes + gradients, by the graph (`plan/backward.py`)
                 + bytes that are still held + bytes that the current node has restored

    A tensor is released once the node that saved it first has run, because backward goes from the
    last node to the first. Workspaces inside libraries are not known, so this is a lower bound,
    usually by a few percent. `Fitting` uses it after a first forward, whose reserve for backward
    was a guess, to decide whether the held tensors leave enough memory for backward.

    saving: the ended context of the forward that made the outputs
    since: autograd's number of the first node that counts
    """
    restored: dict[int, int] = defaultdict(int)
    held: list[tuple[int, int]] = []  # the first node that saves it, and its bytes
    for slot, nodes in saving.saved_by.items():
        held.append((min(nodes), slot.entry.after_nbytes))
        whole = max(slot.entry.before_nbytes - slot.entry.after_nbytes, 0)
        for node in set(nodes):
            restored[node] += whole
    held.sort()
    firsts = [node for node, _ in held]
    below = [0, *accumulate(nbytes for _, nbytes in held)]
    highest, node = 0, firsts[-1] if firsts else 0
    for moment in run(graph_of(outputs, since=since, is_whole=not since)):
        node = node if moment.is_leaf else moment.nth
        still = below[bisect_right(firsts, node)] + restored.get(node, 0)
        stay = min(moment.stay, memory.unallocated_gradient_nbytes)
        highest = max(highest, moment.nbytes + moment.hidden + stay + still)
    return highest and memory.static_nbytes + highest


def gradients_peak(outputs: Iterable[Tensor]) -> int:
    """Returns the most bytes of gradients that stand at once in backward, by the graph alone.

    Those of parameters do not count. 0 where the outputs have no graph.
    """
    moments = run(graph_of(outputs))
    return max((moment.nbytes + moment.hidden for moment in moments), default=0)
