"""The noise that codes of a compiled model add to its gradients, measured in one settled step.

When a graph is compiled, neither values nor gradients are known, so its noise is estimated from
sizes (`compiled/noise.py`). Once a settled step has kept to the budget, the next one draws its
codes twice (`compiled/redrawn.py`), and the logger says what they were found to add. That needs a
model of one graph, and room for the copies that it makes in what the measured step has left of the
budget.
"""

import logging
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from elbowroom.compiled import Redraw, Rehearsal
from elbowroom.fitting.compiled_room import CompiledRoom
from elbowroom.fitting.compiled_steps import CompiledSteps
from elbowroom.fitting.twin import Twin
from elbowroom.units import show_nbytes, show_percent

_log = logging.getLogger("elbowroom")
_UNNOTICED = 0.02  # share of the squared gradient above which a warning says it


class CompiledNoise:
    """Measurements of the noise of one compiled model.

    error  of the plans that were measured last, as a share of the squared gradient; None: not known
    """

    def __init__(self, room: CompiledRoom, steps: CompiledSteps) -> None:
        self.error: float | None = None
        self._room, self._steps = room, steps
        self._rehearsed: weakref.WeakKeyDictionary[Twin, Rehearsal] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakSet[Twin] = weakref.WeakSet()
        self._running: tuple[Redraw, Twin] | None = None

    def watching(self, twin: Twin, numel: int) -> AbstractContextManager[Any]:
        """A context for the forward of a settled call, which may be measured."""
        if twin in self._seen:
            return nullcontext()
        peak = self._steps.settled_nbytes(twin, numel)
        if peak is None or not _may_be_measured(twin):
            return nullcontext()
        rehearsed = self._rehearsed.get(twin)
        if rehearsed is None:
            rehearsed = self._rehearsed[twin] = Rehearsal()
            return rehearsed
        self._seen.add(twin)
        if not rehearsed.is_steady:
            return nullcontext()
        left = max(self._room.options.budget_nbytes - peak, 0)
        beside = min(one.peak_nbytes - one.forward_nbytes for one in twin.regions.decisions)
        self._running = Redraw(left, left + beside), twin
        return self._running[0]

    def end(self) -> None:
        """Says what was found in the last step, if it was measured."""
        running, self._running = self._running, None
        if running is None or running[0].error is None:
            return
        self.error = running[0].error
        options = self._room.options
        estimate = max(one.noise for one in running[1].regions.decisions if one.is_lossy)
        is_above = options.noise is not None and self.error > options.noise
        _log.log(
            # An estimate that was a warning is taken back where it was seen.
            logging.INFO if max(self.error, estimate) <= _UNNOTICED else logging.WARNING,
            "budget %s: codes of the compiled model add %s to the square of the gradient (gErr2), "
            "measured in one step, where %s was estimated%s",
            show_nbytes(options.budget_nbytes),
            show_percent(self.error),
            show_percent(estimate),
            _remedy(options.noise, estimate / self.error) if is_above else "",
        )


def _remedy(noise: float | None, share: float) -> str:
    """Returns what to type where the noise is above its limit. share: of it, that was estimated."""
    assert noise is not None
    return (
        f". That is above noise={noise:g}, which holds for estimates: noise={noise * share:.2g} "
        "would have kept to it, and exact=True forbids codes"
    )


def _may_be_measured(twin: Twin) -> bool:
    """Returns whether a twin has codes, and is one graph whose backward autograd runs."""
    regions = twin.regions
    is_one = twin.is_one_graph and twin.leaves_alone and not regions.shares and regions.runs == 1
    is_lossy = any(one.is_lossy for one in regions.decisions)
    return is_one and is_lossy and torch.is_grad_enabled() and not _is_compiled_autograd()


def _is_compiled_autograd() -> bool:
    from torch._dynamo import compiled_autograd, config

    return bool(config.compiled_autograd or compiled_autograd.in_compiled_autograd_region)
