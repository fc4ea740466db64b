"""Fitted models inside of what a program compiles by itself: a step, a loss with the model in it.

    model = er.fit(model, budget="6 GiB", optimizer=opt)

    @torch.compile
    def step(x, y):
        return F.cross_entropy(model(x), y)

Dynamo looks through the calls of the model, so none of them is seen. But the region that it hands
to Inductor is given the model's weights: it is planned as `backend="elbowroom"` does it, in

    room = budget - (weights, gradients and states) - states still to be created

A compiled program is asked first (`program.py`). Where Inductor itself is asked to compile, it is
asked through `call_planner`, which stands in its place as long as someone plans.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from elbowroom.compiled import (
    Decision,
    Regions,
    Settings,
    compile_region,
    device_of_inputs,
    in_whole,
    place_of,
    refusal,
)
from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.region_steps import RegionSteps
from elbowroom.fitting.session import Fitting

RESIDENT = "weights, buffers and optimizer states"  # the name of resident bytes in an error
Region = Callable[..., Any]
# Takes a region, its inputs and Inductor's options. Returns None for a region of others.
RegionPlanner = Callable[[fx.GraphModule, Sequence[Any], dict[str, Any]], Region | None]

_inductor: Any = torch._TorchCompileInductorWrapper  # the backend "inductor"
_region_planners: list[RegionPlanner] = []
_plain: Callable[..., Any] | None = None  # of Inductor, while someone plans


@dataclass
class _Inside:
    """Regions that contain a fitted model, and what stood beside them when they were planned.

    steps: the steps in which they run
    """

    regions: Regions
    steps: RegionSteps
    resident_nbytes: int = 0


_fitted: "weakref.WeakKeyDictionary[Fitting, _Inside]" = weakref.WeakKeyDictionary()


def add_region_planner(region_planner: RegionPlanner, *, first: bool = False) -> None:
    """Asks a planner for each region that Inductor is to compile from now on."""
    global _plain
    _region_planners.insert(0 if first else len(_region_planners), region_planner)
    if _plain is None:
        _plain, _inductor.__call__ = _inductor.__call__, _call_planner


def remove_region_planner(region_planner: RegionPlanner) -> None:
    """Undoes `add_region_planner`."""
    global _plain
    _region_planners.remove(region_planner)
    if (
        not _region_planners and _inductor.__call__ is _call_planner
    ):  # else other code has wrapped it
        _inductor.__call__, _plain = _plain, None


def _call_planner(
    inductor: Any, gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any
) -> Any:
    assert _plain is not None
    if torch.is_grad_enabled():
        options = {**inductor.config, **(given.get("config_patches") or {})}
        for region_planner in list(_region_planners):
            region = region_planner(gm, example_inputs, options)
            if region is not None:
                return region
    return _plain(inductor, gm, example_inputs, **given)


def settings_of(options: FitOptions) -> Settings:
    """Returns the settings of a fitted model's regions; its weights do not count in their room."""
    return Settings(
        counts_inputs=False, exact=options.exact, noise=options.noise, menu=options.menu
    )


def plan_inside(fitting: Fitting) -> None:
    """Plans the regions that contain this model from now on, until the fitting is closed."""
    weakref.finalize(fitting, _end).atexit = False  # younger finalizers are called first
    if not _fitted:
        add_region_planner(_compile_fitted)
    budget, tensors = fitting.options.budget_nbytes, fitting.model_state.tensors
    steps = RegionSteps(budget, tensors)
    _fitted[fitting] = _Inside(Regions(settings_of(fitting.options)), steps)


def leave_regions(fitting: Fitting) -> None:
    """Plans no more regions for this model."""
    _fitted.pop(fitting, None)
    _end()


def _end() -> None:
    if not _fitted and _compile_fitted in _region_planners:
        remove_region_planner(_compile_fitted)


def planned_inside(fitting: Fitting) -> tuple[Sequence[Decision], int]:
    """Returns the decisions for regions that contain this model, and the bytes beside them."""
    found = _fitted.get(fitting)
    return ((), 0) if found is None else (found.regions.decisions, found.resident_nbytes)


def _compile_fitted(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]
) -> Region | None:
    """Compiles a region that reads weights of fitted models, in the least of their budgets."""
    given = {id(x) for x in (*example_inputs, *gm.parameters())}
    inside = [one for one in _fitted if one.model_state.has_any(given)]
    if not inside:
        return None
    for one in inside:
        one.is_called = True
    fitting = min(inside, key=lambda one: one.options.budget_nbytes)
    found = _fitted[fitting]
    found.resident_nbytes = sum(one.model_state.resident_nbytes() for one in inside)
    resident = found.resident_nbytes
    return found.steps.watch(
        compile_in_room(gm, example_inputs, found.regions, options, fitting.options, resident)
    )


def compile_in_room(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    regions: Regions,
    inductor: Mapping[str, Any],
    options: FitOptions,
    resident_nbytes: int,
    *,
    counts_inputs: bool = False,
) -> Region:
    """Compiles a region in what a budget leaves beside resident bytes.

    One that cannot be planned raises BudgetTooSmall when it is called.

    inductor: Inductor's own options; counts_inputs: see `Settings`
    """
    room = max(options.budget_nbytes - resident_nbytes, 0)
    place = place_of(device_of_inputs(example_inputs))
    moves = options.offload is not None and options.offload == place
    regions.restrict(room, counts_inputs=counts_inputs, offloads=moves)
    try:
        return compile_region(gm, example_inputs, regions, inductor, True)
    except BudgetTooSmall as error:
        held, noise = {RESIDENT: resident_nbytes}, regions.settings.limit
        return refusal(in_whole(error, options.budget_nbytes, held, noise))
