"""Peaks of a compiled model's steps, measured until a settled one has kept to the budget.

What a plan predicts is read off the code that Inductor has written. Library calls may take more,
and code outside of the compiled regions is in no plan. So steps are measured as eager ones are,
from one forward to the next, until one has kept to the budget in which nothing was compiled. The
same plans take no more for smaller calls, which are not measured then.
"""

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elbowroom.fitting.model_state import ModelState, storage_nbytes
from elbowroom.fitting.twin import Twin
from elbowroom.measure.interval import Interval

_MAX_TRIES = 16  # steps of one plan that could not be measured, after which none is any more


@dataclass
class MeasuredStep:
    """A step that was measured, by the plans of a twin.

    numel       elements of the inputs of its forward
    is_settled  nothing was compiled in it, and no state of an optimizer was created
    """

    peak_nbytes: int
    twin: Twin
    numel: int
    is_settled: bool


class CompiledSteps:
    """Measurements of the steps of one compiled model.

    last_nbytes     peak of the last step that was measured
    highest_nbytes  the highest of all
    """

    def __init__(self, model_state: ModelState) -> None:
        self.last_nbytes: int | None = None
        self.highest_nbytes: int | None = None
        self._model_state = model_state
        self._kept: weakref.WeakKeyDictionary[Twin, int] = weakref.WeakKeyDictionary()
        self._peaks: weakref.WeakKeyDictionary[Twin, int] = weakref.WeakKeyDictionary()
        self._tries: weakref.WeakKeyDictionary[Twin, int] = weakref.WeakKeyDictionary()
        self._running: Interval | None = None
        self._twin: weakref.ref[Twin] | None = None
        self._numel = 0
        self._is_settled = self._ran_backward = False

    def wants(self, twin: Twin | None, numel: int) -> bool:
        """Returns whether a step of so many elements is to be measured. None: of new plans."""
        if self._running is not None:
            return False
        if twin is None:
            return True
        return numel > self._kept.get(twin, -1) and self._tries.get(twin, 0) < _MAX_TRIES

    def begin(self, outputs: list[Tensor]) -> None:
        """Begins to measure a step, if that is possible now.

        outputs: those of earlier forwards that are held still
        """
        state = self._model_state
        self._is_settled = not state.unallocated_state_nbytes()
        self._ran_backward, self._twin = False, None
        stands = storage_nbytes([*state.tensors(), *outputs])
        self._running = Interval.start(stands, state.device, [*state.gradients(), *outputs])
        if self._running is not None:
            self._running.until_updated(state.is_trained_by)

    def ran(self, twin: Twin, numel: int, node: Any, *, compiled: bool) -> None:
        """Notes a forward. node: that of its backward; compiled: whether something was."""
        if self._running is None:
            self._tries[twin] = self._tries.get(twin, 0) + 1
            return
        self._is_settled = self._is_settled and not compiled
        self._twin, self._numel = weakref.ref(twin), max(numel, self._numel)
        if node is not None:
            node.register_prehook(self._note_backward)

    def _note_backward(self, _: object) -> None:
        self._ran_backward = True

    def end(self) -> MeasuredStep | None:
        """Ends the step that was measured; None: there was none, or it had no backward."""
        running, self._running = self._running, None
        if running is None:
            return None
        peak = running.stop()
        twin = None if self._twin is None else self._twin()
        numel, self._numel = self._numel, 0
        if peak is None or twin is None or not self._ran_backward:
            if twin is not None:
                self._tries[twin] = self._tries.get(twin, 0) + 1
            return None
        self.last_nbytes = peak
        self.highest_nbytes = max(peak, self.highest_nbytes or 0)
        return MeasuredStep(peak, twin, numel, self._is_settled)

    def settle(self, seen: MeasuredStep) -> None:
        """Measures no more steps of these plans that are as large."""
        self._kept[seen.twin] = max(seen.numel, self._kept.get(seen.twin, -1))
        self._peaks[seen.twin] = max(seen.peak_nbytes, self._peaks.get(seen.twin, 0))

    def settled_nbytes(self, twin: Twin, numel: int) -> int | None:
        """Returns the peak of settled steps by these plans; None: not known, or one is measured.

        numel: elements of the inputs of a call; None, too, if it is larger than these were
        """
        if self._running is not None or numel > self._kept.get(twin, -1):
            return None
        return self._peaks[twin]

    def close(self) -> None:
        """Drops a measurement that runs."""
        if self._running is not None:
            self._running.close()
            self._running = None
