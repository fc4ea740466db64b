"""Measures what lossy codes do to a gradient, by a step with codes beside the plain step.

Each run begins from the same RNG, buffers and gradients, which are put back after it, so that the
gradients differ by the codes alone. With n draws of the codes, g~_1 to g~_n, and the plain g,

    error    mean |g~_i - g|^2 / |g|^2                     ("gErr2")
    bias     (n |mean g~ - g|^2 - mean |g~_i - g|^2) / (n - 1) / |g|^2

The second is what further draws would not average out: its expectation is the square of the mean
error, and so 0 for unbiased codes. Sums are kept as NumPy arrays in host memory, where they do not
count as memory of the step.
"""

import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elbowroom.errors import PlanError
from elbowroom.fitting.session import Fitting
from elbowroom.runtime.attach import attach, opener_of
from elbowroom.runtime.undo import gradient_of
from elbowroom.tools.untouched import check_keeps_gradients, untouched

_NAME = "gradient_error"
_SHOWN = 10  # parameters


@dataclass(frozen=True)
class ParameterError:
    """The error of one parameter's gradient; squares are sums over its elements.

    norm2   |g|^2
    error2  mean |g~ - g|^2
    bias2   the part of it that does not average out, estimated; it may be below 0 by chance
    """

    name: str
    norm2: float
    error2: float
    bias2: float

    @property
    def error(self) -> float:
        """The relative squared error of this gradient."""
        return _share(self.error2, self.norm2)


@dataclass(frozen=True)
class GradientError:
    """The measured error of a gradient; `print` shows the parameters with most of it.

    parameters  those with a gradient, in the order of the model
    draws       runs with codes
    is_exact    each of them gave the bits of the plain run
    """

    parameters: tuple[ParameterError, ...]
    draws: int
    is_exact: bool

    @property
    def error(self) -> float:
        """mean |g~ - g|^2 / |g|^2 over all parameters, "gErr2"."""
        return _share(self._sum("error2"), self._sum("norm2"))

    @property
    def bias(self) -> float:
        """The part of `error` that does not average out over steps; 0 if it is below 0."""
        return _share(max(self._sum("bias2"), 0.0), self._sum("norm2"))

    def _sum(self, field: str) -> float:
        return float(sum(getattr(one, field) for one in self.parameters))

    def __str__(self) -> str:
        if self.is_exact:
            return f"each of {self.draws} draws has the bits of the plain gradient"
        from rich.console import Console  # most trainings draw no table
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for name in ("parameter", "gErr2", "of all errors"):
            table.add_column(name, justify="left" if name == "parameter" else "right")
        whole = self._sum("error2")
        for one in sorted(self.parameters, key=lambda one: -one.error2)[:_SHOWN]:
            share = f"{_share(one.error2, whole):.0%}"
            table.add_row(Text(one.name), f"{one.error:.2g}", share)
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(table)
        rest = len(self.parameters) - _SHOWN
        more = f"and {rest} parameters with less\n" if rest > 0 else ""
        text = f"gErr2 {self.error:.2g}, of which {self.bias:.2g} does not average out"
        return f"{text} ({self.draws} draws of the codes)\n{console.export_text()}{more}"


def measure_gradient_error(
    run: Callable[[], object],
    model: nn.Module,
    context: AbstractContextManager[Any] | None,
    draws: int,
) -> GradientError:
    """Measures it; see `er.gradient_error`."""
    check_keeps_gradients(model, _NAME)
    fitting = opener_of(model)
    if context is None:
        _check_settled(fitting)
    sums = _Sums({name: p for name, p in model.named_parameters() if p.requires_grad})
    with untouched(model, (), _NAME):
        _run(run, sums.of, "plain")
        sums.begin()
    for _ in range(draws):
        with untouched(model, (), _NAME):
            if context is None and fitting is not None:
                attach(model, fitting)
            with context or nullcontext():
                _run(run, sums.of, "coded")
            sums.add()
    if isinstance(fitting, Fitting):
        fitting.interrupt()
    return sums.result()


def _check_settled(fitting: object) -> None:
    if not isinstance(fitting, Fitting):
        raise PlanError(
            "gradient_error takes an eager model that er.fit has fitted, or a context, as in "
            'er.gradient_error(run, model, er.saving("dither")); this model is not fitted, or '
            "compiled"
        )
    if not fitting.planner.state.settled:
        raise PlanError(
            "gradient_error measures the settled plan of a fitted model, and this one has not "
            "settled yet; train some steps first"
        )


def _run(run: Callable[[], object], parameters: dict[str, nn.Parameter], which: str) -> None:
    run()
    if all(gradient_of(p) is None for p in parameters.values()):
        raise PlanError(
            f"run has left no gradient in the model ({which} run); gradient_error takes a function "
            "that runs forward and backward, and does not clear gradients afterwards"
        )


class _Sums:
    """Sums over draws, by parameter, in host memory."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.of = parameters
        self._plain: dict[str, np.ndarray[Any, Any]] = {}
        self._error: dict[str, np.ndarray[Any, Any]] = {}
        self._squares = dict.fromkeys(parameters, 0.0)
        self._draws, self._is_exact = 0, True

    def begin(self) -> None:
        """Takes the plain gradients."""
        self._plain = {name: _array(p) for name, p in self.of.items()}
        self._error = {name: np.zeros_like(plain) for name, plain in self._plain.items()}

    def add(self) -> None:
        """Takes those of a draw."""
        self._draws += 1
        for name, p in self.of.items():
            error = _array(p) - self._plain[name]
            self._is_exact = self._is_exact and not error.any()
            self._squares[name] += _norm2(error)
            self._error[name] += error

    def result(self) -> GradientError:
        n, rows = self._draws, []
        for name, plain in self._plain.items():
            error2 = self._squares[name] / n
            mean2 = _norm2(self._error[name]) / n**2
            bias2 = (n * mean2 - error2) / (n - 1)
            rows.append(ParameterError(name, _norm2(plain), error2, bias2))
        return GradientError(tuple(rows), n, self._is_exact)


@torch.no_grad()
def _array(p: nn.Parameter) -> "np.ndarray[Any, Any]":
    """Copies the gradient, or this rank's part of it, to host memory; zeros if there is none."""
    gradient = gradient_of(p)
    if gradient is None:
        gradient = torch.zeros_like(p)
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    dense = local.to_dense() if local.is_sparse else local
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    return np.array(dense.detach().double().cpu().numpy())


def _norm2(x: "np.ndarray[Any, Any]") -> float:
    return float(np.vdot(x, x))


def _share(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return float("inf") if part else 0.0
