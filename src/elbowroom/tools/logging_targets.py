"""Logs the figures of a fitted model: to a dict, a function, or the loggers of other libraries.

    TensorBoard         a writer with `add_scalar(name, value, step)` and `add_text`
    trackio, wandb      the module, or a run: `log(figures, step=step)`; Accelerate's likewise
    Lightning           a logger with `log_metrics(figures, step)`
    a dict, a list      gets the last figures, or one more entry a step
    a function          is called with (figures, step)

None of these libraries is imported here. A logger that raises an exception is named once in a
warning and then left out, because logging must not end a training.
"""

import logging
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import nn

from elbowroom._checks import check_model
from elbowroom.errors import PlanError
from elbowroom.fitting import Fitting, Summary, summary
from elbowroom.runtime.attach import attached

_log = logging.getLogger("elbowroom")
_MIB = 2**20
SETTING = "memory/setting"
Figures = dict[str, float | str]
_Write = Callable[[Figures, int], object]


class Log:
    """Logger that `log_to` gives.

    Call it with the model and the step's number, as often as you like.
    """

    def __init__(self, *targets: Any) -> None:
        self._writers: list[tuple[str, _Write]] = [_writer(target) for target in targets]

    def __call__(self, model: nn.Module, step: int) -> Figures:
        """Logs the figures that are known now, and returns them.

        Those of a model that is not fitted, or whose fit is compiled, are none: {}. Raises
        PlanError for what is no model.
        """
        check_model(model, "log")
        summary = summary_of(model)
        found = {} if summary is None else figures(summary)
        if found:
            self.write(found, step)
        return found

    def write(self, found: Figures, step: int) -> None:
        """Gives figures to every logger."""
        for name, write in list(self._writers):
            try:
                write(found, step)
            except Exception as error:
                self._writers.remove((name, write))
                _log.warning(
                    "%s raised %s: %s. It gets no more figures; the training goes on",
                    *(name, type(error).__name__, error),
                )


def summary_of(model: nn.Module) -> Summary | None:
    """Returns the summary of what is fitted in a model: it, or a part of it, if it was wrapped."""
    parts = {id(part) for part in model.modules()}
    for one, around in attached():
        if id(one) in parts and isinstance(around, Fitting):
            return summary(around, type(one).__name__, of_last=True)
    return None


def figures(summary: Summary) -> Figures:
    """Returns what loggers get, by names that begin with "memory/": numbers, and the setting.

    Those that are not known yet are left out. The slowdown and the peak of plain training are
    estimates.
    """
    found = {
        "budget_mib": summary.budget_nbytes / _MIB,
        "peak_mib": _mib(summary.last_nbytes),
        "highest_peak_mib": _mib(summary.highest_nbytes),
        "planned_peak_mib": _mib(summary.predicted_nbytes),
        "plain_peak_mib": _mib(summary.plain_nbytes),
        "slowdown": summary.slowdown,
        "exact": float(summary.exact),
        "added_noise": summary.noise,
    }
    numbers: Figures = {f"memory/{name}": n for name, n in found.items() if n is not None}
    return {**numbers, SETTING: summary.setting}


def numbers(found: Figures) -> dict[str, float]:
    """Returns the figures that are numbers."""
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _writer(target: Any) -> tuple[str, _Write]:
    name = getattr(target, "__name__", None) or type(target).__name__
    if isinstance(target, MutableMapping):
        return name, lambda found, step: target.update(found)
    if isinstance(target, list):
        return name, lambda found, step: target.append({"step": step, **found})
    if callable(getattr(target, "add_scalar", None)):
        return name, _tensorboard(target)
    if callable(getattr(target, "log_metrics", None)):
        return name, lambda found, step: target.log_metrics(numbers(found), step)
    if callable(getattr(target, "log", None)):
        return name, lambda found, step: target.log(dict(found), step=step)
    if callable(target):
        return name, target
    raise PlanError(
        "log_to takes a SummaryWriter of TensorBoard, the module or a run of wandb or trackio, a "
        f"logger of Lightning, a dict, a list, or a function of (figures, step); got {target!r}. "
        "Pass the object itself, as in er.log_to(wandb) after wandb.init(...)"
    )


def _tensorboard(writer: Any) -> _Write:
    last = ""

    def write(found: Figures, step: int) -> None:
        nonlocal last
        for name, value in numbers(found).items():
            writer.add_scalar(name, value, step)
        setting = str(found.get(SETTING, ""))
        if setting != last:  # a text a step would bury the one that says something
            writer.add_text(SETTING, setting, step)
            last = setting

    return write


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / _MIB
