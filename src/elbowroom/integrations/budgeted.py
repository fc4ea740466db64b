"""Base of all integrations: fits a model when training begins, logs figures, and releases it."""

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

import elbowroom as er
from elbowroom.errors import PlanError
from elbowroom.fitting import Fitting, Summary
from elbowroom.runtime.attach import opener_of
from elbowroom.tools.logging_targets import Log, figures, numbers
from elbowroom.units import show_nbytes

_log = logging.getLogger("elbowroom")
_EAGER = frozenset({"codecs", "loss", "offload", "plan", "solver", "worst"})  # may need it


class Budgeted:
    """One training inside a budget.

    settings  what `er.fit` takes beside the model
    summary   what became of it; None before it began
    """

    def __init__(self, budget: float | str, settings: dict[str, Any]) -> None:
        self.budget, self.settings = budget, settings
        self.summary: Summary | None = None
        self._model: nn.Module | None = None
        self._fitting: Fitting | None = None
        self._log: Log | None = None

    def begin(
        self, model: nn.Module, optimizers: Iterable[Optimizer], *, compiled: bool = False
    ) -> None:
        """Fits the model as the training begins, and counts the optimizers' states.

        compiled: the library calls the model through torch.compile, so the plan is made inside the
        compiled graph, unless there is a setting that may need eager mode.

        If an earlier training of the same model was ended by an error or an interrupt, it is ended
        first, because not all libraries call their callbacks then.

        Raises the errors of `er.fit`, and PlanError if another model is in training.
        """
        if self._model is model:
            er.release(model)
            self._model = self._fitting = self._log = None
        if self._model is not None:
            raise PlanError(
                "this Budget is in use by a training that has not ended; give each Trainer one of "
                "its own"
            )
        in_graphs = compiled and not _EAGER.intersection(self.settings)
        er.fit(model, budget=self.budget, **{"compile": in_graphs, **self.settings})
        given = [unwrapped(optimizer) for optimizer in optimizers]
        own = [optimizer for optimizer in given if _trains(optimizer, model)]
        for optimizer in own or given:  # none of its own: its parameters may be wrapped
            er.add_optimizer(model, optimizer)
        fitting = opener_of(model)
        self._model = model
        self._fitting = fitting if isinstance(fitting, Fitting) else None  # else it is compiled
        self.look()

    def figures(self) -> dict[str, float]:
        """Returns what loggers get: numbers, by names that begin with "memory/".

        Those that are not known yet are left out. The slowdown and the peak of plain training are
        estimates, and so is all that is known of a compiled model.
        """
        self.look()
        return {} if self.summary is None else numbers(figures(self.summary))

    def log_to(self, targets: Iterable[Any], step: int) -> None:
        """Gives the figures to loggers, as `er.log_to` does."""
        if self._log is None:
            self._log = Log(*targets)
        self.look()
        if self.summary is not None:
            self._log.write(figures(self.summary), step)

    @property
    def is_called(self) -> bool:
        """True if a forward of the model recorded gradients, or if forwards are not counted."""
        self.look()
        return self.summary is None or self.summary.steps > 0

    def note_warned(self) -> None:
        """Notes that a warning has said that nothing calls the model, so that `fit` does not."""
        if self._fitting is not None:
            self._fitting.is_called = True

    def end(self, warns: bool = True) -> None:
        """Ends the training: releases the model, and logs whether the budget was kept.

        warns: False if it is no mistake that the training has not called the model
        """
        if self._model is None:
            return
        self.release()
        if self.summary is None:
            return
        is_above = (self.summary.last_nbytes or 0) > self.summary.budget_nbytes
        is_idle = warns and not self.summary.steps
        _log.log(logging.WARNING if is_above or is_idle else logging.INFO, verdict(self.summary))

    def release(self) -> None:
        """Ends the training, and releases the model."""
        if self._model is None:
            return
        self.finish()
        er.release(self._model)
        self._model = self._fitting = self._log = None

    def finish(self) -> None:
        """Ends the last step. Models that share steps all finish before one of them ends."""
        if self._fitting is not None:
            self._fitting.finish()
            self.look()
            self._fitting = None

    def look(self) -> None:
        """Reads the figures of the training so far."""
        if self._model is not None and opener_of(self._model) is not None:
            self.summary = er.summary(self._model)


def verdict(summary: Summary) -> str:
    """Returns in a line whether the budget was kept, and by what."""
    budget = show_nbytes(summary.budget_nbytes)
    if not summary.steps:
        return f"budget {budget} had no effect: the training did not call {summary.model}"
    how = "exact" if summary.exact else "lossy"
    if summary.setting == "compiled" and summary.predicted_nbytes is not None:
        peak = show_nbytes(summary.predicted_nbytes)
        return f"budget {budget}: planned inside torch.compile for {peak} (estimated, {how})"
    if summary.last_nbytes is None:
        return f"budget {budget}: no step was measured"
    last, highest = summary.last_nbytes, summary.highest_nbytes or summary.last_nbytes
    if last > summary.budget_nbytes:
        return (
            f"budget {budget} was NOT kept: the last measured step took {show_nbytes(last)} ({how})"
        )
    peak = f"steps take up to {show_nbytes(highest)}"  # the last one may have a smaller batch
    if highest > summary.budget_nbytes:
        peak = f"the last step took {show_nbytes(last)}, an earlier one {show_nbytes(highest)}"
    plain = (
        ""
        if summary.plain_nbytes is None
        else f", plain training {show_nbytes(summary.plain_nbytes)}"
    )
    return f"budget {budget} was kept: {peak} ({how}){plain}"


def _trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Returns whether the optimizer has a parameter of the model."""
    of_model = {id(parameter) for parameter in model.parameters()}
    groups = optimizer.param_groups
    return any(id(parameter) in of_model for group in groups for parameter in group["params"])


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that holds the states, inside of a wrapper of Accelerate's, say."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer
