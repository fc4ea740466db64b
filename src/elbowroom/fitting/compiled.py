"""A fitted model that is compiled: its budget is kept inside torch.compile, not by hooks.

    er.fit(torch.compile(model), budget=...)      its mode, options, dynamic and fullgraph stay
    er.fit(model, budget=..., compile=True)       torch.compile's defaults

The model's forwards run through a compiled twin, whose backend is `elbowroom.compiled`. What the
step may take is known before it is compiled, so nothing is learned or measured:

    room = budget - (weights, buffers, states, gradients that stand) - states to come

A budget that the graph cannot reach goes to the eager engine, unless `exact` is True: there, codes
may be coarser.
"""

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from elbowroom.compiled import Regions, Settings, compile_region
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.session import Fitting
from elbowroom.runtime.compiler import original
from elbowroom.runtime.undo import Undo


@dataclass(frozen=True)
class How:
    """How a model is compiled. options: of Inductor."""

    dynamic: bool | None = None
    fullgraph: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def how_compiled(model: nn.Module) -> How | None:
    """How torch.compile was asked to compile this model with Inductor; None if it was not."""
    context = getattr(model, "dynamo_ctx", None)
    if original(model) is model or context is None:
        return None
    backend = getattr(context, "callback", None)
    while backend is not None:
        if isinstance(backend, torch._TorchCompileInductorWrapper):
            dynamic = getattr(context, "_dynamic", None)
            return How(dynamic, bool(getattr(context, "fullgraph", False)), dict(backend.config))
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return None


class _Thread(threading.local):
    """Whether the twin runs on this thread."""

    runs = False


class CompiledFitting:
    """Runs the forwards of one model, compiled inside a budget.

    regions  what was decided for each compiled region
    eager    what runs the forwards instead, where no compiled plan fits
    """

    def __init__(
        self, model: nn.Module, terms: FitOptions, optimizer: Optimizer | None, how: How
    ) -> None:
        self.terms = terms
        self.owned = ModelState(original(model), optimizer)
        self.regions = Regions(Settings(counts_inputs=False, exact=terms.exact))
        self._how = how
        self._twin: Callable[..., Any] | None = None
        self.eager: Fitting | None = None
        self._has_run = False
        self._here = _Thread()

    def run(
        self,
        model: nn.Module,
        forward: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One forward of the model, through its compiled twin."""
        if self._here.runs:  # the twin runs eagerly, inside of a context
            return forward()
        self._here.runs = True
        try:
            return self._run(model, forward, args, kwargs)
        finally:
            self._here.runs = False

    def _run(
        self,
        model: nn.Module,
        forward: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.eager is not None:
            return self.eager.run(model, forward, args, kwargs)
        if self._has_run:
            assert self._twin is not None
            return self._twin(*args, **kwargs)
        undo = Undo(model, (), (args, kwargs))
        try:
            return self._first(model, args, kwargs)
        except BudgetTooSmall as error:
            if self.terms.exact or not undo.is_possible:
                raise
            undo.back()
            self._go_eager(model, error)
        finally:
            undo.close()
        assert self.eager is not None
        return self.eager.run(model, forward, args, kwargs)

    def _first(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        how = self._how
        self._twin = torch.compile(
            model, backend=self._compile, dynamic=how.dynamic, fullgraph=how.fullgraph
        )
        out = self._twin(*args, **kwargs)
        self._has_run = True
        return out

    def _compile(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """The backend of the twin: Dynamo calls it for each region and shape."""
        stock = self.owned.stock()
        room = self.terms.budget_nbytes - stock.static_nbytes - stock.unborn_state_nbytes
        self.regions.settings = replace(self.regions.settings, room_nbytes=max(room, 0))
        return compile_region(gm, example_inputs, self.regions, self._how.options)

    def _go_eager(self, model: nn.Module, error: BudgetTooSmall) -> None:
        warnings.warn(
            f"{type(model).__name__} runs eagerly: inside torch.compile the budget cannot be kept "
            f"({error}) The eager engine has coarser codes. exact=True raises instead.",
            stacklevel=3,
        )
        optimizers = self.owned.optimizers()
        self.eager = Fitting(model, self.terms, optimizers[0] if optimizers else None)
        for other in optimizers[1:]:
            self.eager.owned.add(other)
        self._twin = None

    def passes(self) -> None:
        """A forward without gradients: it runs as it was compiled by the user."""
        if self.eager is not None:
            self.eager.passes()

    def close(self) -> None:
        """The model is not fitted any more."""
        if self.eager is not None:
            self.eager.close()
        self._twin = None
