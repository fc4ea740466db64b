"""Profiles one step of the user's program, and does not change it.

    forward 1       is not recorded: the optimizer creates its states, caches fill
    forward 2       starts the record, which includes backward and the optimizer
    forward 3       ends it

If no backward runs between two forwards (evaluation with gradients on, a model that is called twice
in a step), the later one is recorded instead. With gradient accumulation, the last forward before a
step of the optimizer is recorded. It needs the most memory, because it begins with gradients and,
from the second step on, with states. All tensors are kept, so the profile is that of a plain step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from elbowroom.fitting.model_state import ModelState
from elbowroom.measure.recording import Recording
from elbowroom.plan import KeepAll
from elbowroom.plan.profile import Profile
from elbowroom.runtime.attach import Given
from elbowroom.runtime.context import Context
from elbowroom.runtime.saving import Saving

_MAX_TRIES = 64  # records, before the last one is taken


class Profiling:
    """Runner of the forwards of a model that is profiled (`runtime/attach.py`).

    done     called when a step was written down, or when it was given up; it may raise
    profile  the profile of that step
    steps    number of forwards so far
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        done: Callable[[], None],
        *,
        min_nbytes: int = 65536,
        warm_up: int = 1,
    ) -> None:
        self.model_state = ModelState(model, None)
        for optimizer in optimizers:
            self.model_state.add(optimizer)
        self.profile: Profile | None = None
        self.steps = 0
        self._done = done
        self._min_nbytes, self._warm_up = min_nbytes, warm_up
        self._tries = 0
        self._updates = self._updates_before = 0  # steps of optimizers; before the record began
        self._waits = bool(optimizers) and warm_up > 0
        self._is_whole = False  # the profile is that of a step that is like the next ones
        self._hook = register_optimizer_step_post_hook(self._updated) if self._waits else None
        self._recording: Recording | None = None

    def passes(self, forward: Callable[[], Any]) -> Any:
        """Runs a forward without gradients: it is part of the step that is recorded."""
        return forward()

    def run(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        """Runs one forward of the model."""
        self.finish()
        if self._is_whole or self._tries >= _MAX_TRIES:
            self._done()
            return forward()
        self.steps += 1
        if self.steps > self._warm_up:
            self._tries += 1
            self._updates_before = self._updates
            self._recording = Recording.start(self.model_state.tensors(), self.model_state.device)
        if self._recording is None:
            return forward()
        with self._context():
            return forward()

    def _context(self) -> Saving:
        recorder = None if self._recording is None else self._recording.recorder
        context = Context(learns=False)
        return Saving(KeepAll(), min_nbytes=self._min_nbytes, context=context, recorder=recorder)

    def finish(self) -> None:
        """Ends the step that is recorded, if one is."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        try:
            found = recording.finish(moves=True) if recording.has_backward else None
            if found is not None:
                self.profile = replace(found, standing=self.model_state.resident_bytes())
                self._is_whole = not self._waits or 0 < self._updates_before < self._updates
        finally:
            recording.close()

    def close(self) -> None:
        """Stops counting the steps of optimizers."""
        if self._hook is not None:
            self._hook.remove()

    def _updated(self, optimizer: Optimizer, *_: object) -> None:
        if not torch.compiler.is_compiling() and optimizer in self.model_state.optimizers():
            self._updates += 1
