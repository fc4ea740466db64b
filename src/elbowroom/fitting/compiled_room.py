"""Memory that the budget of a compiled model leaves to its regions, and what stands beside them.

    room = budget - (weights, buffers, states, existing gradients) - states still to be created
                  - what uncompiled code holds - what a measured step took beyond its plan

All but the first of these is learned as the model trains: from the forwards that wait for their
backward at the same time, from the outputs that the program still holds, from autograd's graph
between two regions (`uncompiled.py`), and from measured steps (`compiled_steps.py`).
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from elbowroom.compiled import place_of
from elbowroom.fitting.inside import RESIDENT
from elbowroom.fitting.model_state import ModelState, storage_nbytes
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.previous_outputs import PreviousOutputs
from elbowroom.fitting.uncompiled import UNCOMPILED, holds, tensors_in, uncompiled_nbytes

_MAX_WAITING = 64  # forwards that are counted
_UNPLANNED = "measured beside what was planned"  # name of these bytes in messages


class CompiledRoom:
    """Bytes that forward and backward of a compiled model may take.

    forwards         that wait for their backward at the same time
    reserved_nbytes  that a loss needs beside what the model holds
    standing_nbytes  of outputs of the forward before, which stand until the next one has ended: the
                     most that was seen
    unplanned_nbytes  that a measured step took beyond its plan
    held_nbytes      the most that a forward holds for backward
    """

    def __init__(self, model_state: ModelState, options: FitOptions) -> None:
        self.model_state, self.options = model_state, options
        self.forwards = 1
        self.reserved_nbytes = self.standing_nbytes = self.held_nbytes = 0
        self.unplanned_nbytes = 0
        self._uncompiled_nbytes = 0  # that one forward holds by code between the regions
        self._waiting: list[weakref.ref[Any]] = []  # nodes of forwards before their backward
        self._most_waiting = 0
        self._previous = PreviousOutputs()

    @property
    def nbytes(self) -> int:
        """The bytes that forward and backward may take."""
        return max(self.options.budget_nbytes - sum(self.outside().values()), 0)

    def outside(self) -> dict[str, int]:
        """Returns the bytes of the budget that are outside the room, by name."""
        return {
            RESIDENT: self.model_state.resident_nbytes(),
            UNCOMPILED: self.uncompiled_nbytes,
            _UNPLANNED: self.unplanned_nbytes,
        }

    @property
    def uncompiled_nbytes(self) -> int:
        """Bytes that code between compiled regions holds for backward."""
        return self.forwards * self._uncompiled_nbytes

    @property
    def offloads(self) -> bool:
        """True if saved tensors may leave the memory of the model's device."""
        offload = self.options.offload
        return offload is not None and offload == place_of(self.model_state.device)

    def note_uncompiled(self, nbytes: int) -> bool:
        """Counts bytes that uncompiled code holds; returns whether they are more than before."""
        before = self._uncompiled_nbytes
        self._uncompiled_nbytes = max(before, nbytes)
        return nbytes > before

    def note_graph(self, out: Any, resident: Iterable[Tensor]) -> bool:
        """Counts what code between compiled regions, as at graph breaks, holds for backward.

        Returns whether it is more than was counted before.
        """
        results = tensors_in(out)
        return self.note_uncompiled(uncompiled_nbytes(results, [*resident, *results]))

    def note_output(self, out: Any) -> Any:
        """Notes that a forward waits for its backward. Returns the node of that, if it is known."""
        self._previous.note(out)
        node = next((n for x in tensors_in(out) if (n := x.grad_fn) is not None), None)
        if isinstance(node, torch._C._FunctionBase):  # that of a compiled region
            self._waiting.append(weakref.ref(node))
            return node
        return None

    @property
    def last_waits(self) -> bool:
        """True while the last forward waits for its backward."""
        return bool(self._waiting) and holds(self._waiting[-1]())

    def count_waiting(self) -> bool:
        """Counts forwards that wait; returns whether any does."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting = [one for one in self._waiting if holds(one())]
        if self._waiting:
            self._most_waiting = len(self._waiting)
        return bool(self._waiting)

    def admit_waiting(self) -> bool:
        """Leaves room for as many forwards as have waited; returns whether these are more."""
        if self._most_waiting < self.forwards:
            return False
        self.forwards = self._most_waiting + 1
        return True

    def outputs(self) -> list[Tensor]:
        """Returns the outputs of earlier forwards that the program still holds."""
        return self._previous.alive()

    def admit_outputs(self, held: list[Tensor], resident: Iterable[Tensor]) -> bool:
        """Leaves room for outputs that stand beside a forward; returns whether they need more.

        resident: tensors that exist anyway
        """
        if storage_nbytes(held) <= self.standing_nbytes:
            return False
        known = list(resident)
        stands = storage_nbytes([*known, *held]) - storage_nbytes(known)
        if stands <= self.standing_nbytes:
            return False
        self.standing_nbytes = stands
        return True
