"""A training step that runs out of memory is undone, planned with less, and run again.

    try         the step: forward, backward, and the optimizer if it likes
    no memory   its graph is freed; RNG, buffers, gradients and new optimizer states are restored;
                the models that ran in it have a smaller budget from now on
    again       up to _MAX_TRIES times; then it is aborted, with everything restored

An update that has begun cannot be undone; the error says so.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Self, TypeVar

import torch
from torch import nn

from elbowroom.errors import BudgetTooSmall, OutOfMemory
from elbowroom.fitting.session import Fitting
from elbowroom.runtime.exhaustion import is_out_of_memory
from elbowroom.runtime.undo import Undo
from elbowroom.units import show_nbytes

T = TypeVar("T")
_MAX_TRIES = 6


def repeat(step: Callable[[], T], models: list[nn.Module], fittings: list[Fitting]) -> T:
    """Runs `step` until it has enough memory, and returns its result.

    Raises OutOfMemory when the step is aborted, or cannot be undone.

    models, fittings: the fitted models that may run in it and their fittings, in the same order.
    """
    asked = [fitting.options.budget_nbytes for fitting in fittings]
    why = ""
    for _ in range(_MAX_TRIES):
        attempt = _GuardedRun(models, fittings)
        try:
            with attempt:
                return step()
        except BudgetTooSmall as error:
            if not why:
                raise
            attempt.back()
            raise _given_up(asked, fittings, f"{error}") from None
        why = attempt.why
        _free()
        attempt.back()
    raise _given_up(asked, fittings, why)


class _GuardedRun:
    """Context around one run of the step, which suppresses an out-of-memory error.

    why: the first line of that error
    """

    def __init__(self, models: list[nn.Module], fittings: list[Fitting]) -> None:
        self.why = ""
        self._fittings = fittings
        self._began = [fitting.context.step for fitting in fittings]
        self._undos = [
            Undo(model, fitting.model_state.optimizers())
            for model, fitting in zip(models, fittings, strict=True)
        ]
        for fitting, undo in zip(fittings, self._undos, strict=True):
            fitting.model_state.states.around = undo.states_change

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        for fitting, undo in zip(self._fittings, self._undos, strict=True):
            fitting.model_state.states.around = nullcontext
            undo.close()
        ran = [
            fitting
            for fitting, began in zip(self._fittings, self._began, strict=True)
            if fitting.context.step > began
        ]
        if not ran or not is_out_of_memory(error):
            return False
        self.why = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        for fitting in ran:
            fitting.exhausted()
        return True  # and with the error its frames go, and with them the graph

    def back(self) -> None:
        """Restores everything to its state before the run."""
        changed = [undo.changed for undo in self._undos if undo.changed is not None]
        if changed:
            raise OutOfMemory(
                "the step ran out of memory when "
                f"{' and '.join(changed)} had been changed, and cannot be run again ({self.why}). "
                "In the optimizer's update, give the optimizer foreach=False or fused=True, or "
                "halve the batch. In backward, where gradients are released: the next step keeps "
                "to less memory; without release_gradients() this one could have been repeated."
            )
        for undo in self._undos:
            undo.back()


def _given_up(asked: list[int], fittings: list[Fitting], why: str) -> OutOfMemory:
    budgets = ", ".join(show_nbytes(nbytes) for nbytes in asked)
    now = ", ".join(show_nbytes(fitting.options.budget_nbytes) for fitting in fittings)
    return OutOfMemory(
        f"the step ran out of memory again and again within the budget of {budgets}, and last with "
        f"plans for {now} ({why}). Nothing of it is left. Halve the batch, free what else holds "
        "memory, or give fit offload='file'."
    )


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
