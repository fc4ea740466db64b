"""Budget of what a program compiles by itself: a loss, a step, a method.

A module that is called is fitted (`compiled.py`). A compiled function has no call that could be
seen, so here all that Inductor is asked to compile is planned (`inside.py`):

    room = budget - (weights, gradients and states of the optimizers that are known)
                  - what fitted models hold between forward and backward

Where no optimizer has been made yet, what the compiled code is handed counts in their place.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

from torch import Tensor, fx, nn
from torch.optim import Optimizer

from elbowroom.compiled import Decision, Regions, Settings
from elbowroom.fitting.inside import (
    Region,
    add_region_planner,
    compile_in_room,
    remove_region_planner,
)
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.region_steps import RegionSteps
from elbowroom.fitting.summary import Summary, summary_of_regions


class CompiledProgram:
    """Context that keeps what is compiled with Inductor inside it to the budget.

    optimizers  gives those that are known
    held        gives the bytes that fitted models hold when this code runs
    """

    def __init__(
        self,
        options: FitOptions,
        optimizers: Callable[[], list[Optimizer]],
        held: Callable[[], int],
    ) -> None:
        self.options = options
        self._optimizers, self._held = optimizers, held
        self._regions = Regions(Settings(exact=options.exact, noise=options.noise))
        self._steps = RegionSteps(options.budget_nbytes, self._resident)
        self._resident_nbytes = 0
        self.compiled = 0  # regions, also those from a cache

    def __enter__(self) -> Self:
        add_region_planner(self._compile, first=True)
        return self

    def __exit__(self, *_: object) -> None:
        remove_region_planner(self._compile)

    @property
    def regions(self) -> Sequence[Decision]:
        """Decisions that were made for the compiled regions, in order."""
        return self._regions.decisions

    def summary(self) -> Summary:
        """Returns a summary of what was planned and measured, for the end of a training."""
        model_state, _holder = self._model_state()
        name = "compiled code"
        given = self.options, self._resident_nbytes, self.regions, self.compiled
        summary = summary_of_regions(name, model_state, *given)
        return replace(summary, last_nbytes=self._steps.last_nbytes)

    def _model_state(self) -> tuple[ModelState, nn.ParameterList]:
        """Returns the optimizers' parameters and states, and the holder that keeps them alive."""
        optimizers = self._optimizers()
        found = {
            id(p): p for one in optimizers for group in one.param_groups for p in group["params"]
        }
        holder = nn.ParameterList(found.values())
        model_state = ModelState(holder, None)
        for one in optimizers:
            model_state.add(one)
        return model_state, holder

    def _compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]
    ) -> Region:
        model_state, holder = self._model_state()
        resident = model_state.resident_nbytes() + self._held()
        self._resident_nbytes = self._resident_nbytes or resident
        self.compiled += 1
        region = compile_in_room(
            gm,
            example_inputs,
            self._regions,
            options,
            self.options,
            resident,
            counts_inputs=not len(holder),
        )
        return self._steps.watch(region)

    def _resident(self) -> list[Tensor]:
        model_state, _holder = self._model_state()
        return model_state.tensors()
