"""The arms of `accuracy.py --compiled`: a model inside torch.compile, plainly and by our plans.

    plain           torch.compile
    planned-exact   backend "elbowroom" at 0.6 of plain's estimated peak (ResNet-18: 0.7), exact
    planned-codes   the same, exact=False, at 1.02 times the least that can be reached
    ours-dither     er.saving("dither", levels=6) around plain torch.compile

A plan covers the compiled graph alone: the loss is outside. Each arm has one backend, so that
Dynamo compiles it for the first seed, and finds it again for the others.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch._dynamo
from _ways import Arm, Way, saving
from torch import nn
from torch._functorch import config as functorch_config

from elbowroom.compiled import elbowroom
from elbowroom.compiled.decision import Decision
from elbowroom.compiled.ops import draws
from elbowroom.compiled.partition import listening
from elbowroom.demo.tasks import Task
from elbowroom.errors import BudgetTooSmall

_EXACT = {"resnet18": 0.7, "gpt": 0.6}  # at 0.6 the ResNet would need codes
_ABOVE = 1.02
Backend = Callable[..., Any] | str


def uncompiled(way: Way) -> Arm:
    """A way that is the same for any model."""
    return Arm(way.name, lambda model: way)


def compiled_arms(task: Task) -> dict[str, Arm]:
    """The arms, by label; plans are for a training step of the task."""
    torch._dynamo.config.recompile_limit = 64
    plain = _decided(task)
    peak, inputs = plain.plain_nbytes, plain.inputs_nbytes
    part = _EXACT[task.name]
    exact = {"budget": int(part * peak) + inputs, "exact": True}
    codes = {"budget": int(_ABOVE * _least_nbytes(task)), "exact": False}
    share = (codes["budget"] - inputs) / peak
    dither = saving("dither", levels=6)
    return {
        "plain": _arm("torch.compile", "inductor"),
        "planned-exact": _planned(f'backend "elbowroom" at {part:.2f} of the peak, exact', exact),
        "planned-codes": _planned(f'backend "elbowroom" at {share:.2f}, with codes', codes),
        "ours-dither": _arm(f"torch.compile, {dither.name}", "inductor", dither.context),
    }


def _arm(
    name: str,
    backend: Backend,
    around: Callable[[int], AbstractContextManager[Any]] = lambda seed: nullcontext(),
) -> Arm:
    """The compiled model, inside a context."""

    def of(model: nn.Module) -> Way:
        @contextmanager
        def context(seed: int) -> Iterator[Any]:
            model.compile(backend=backend)
            try:
                with around(seed) as given:
                    yield given
            finally:
                model._compiled_call_impl = None  # evaluation is not compiled

        return Way(name, context, exact=False)

    return Arm(name, of)


def _planned(name: str, options: dict[str, Any]) -> Arm:
    return _arm(name, _backend(options), draws.started_at)


def _backend(options: dict[str, Any]) -> Backend:
    return lambda gm, given: elbowroom(gm, given, options=options)


class _Known(Exception):
    """What was wanted is known before Inductor writes code."""


def _decided(task: Task) -> Decision:
    """What is known of a training step of the task without a plan."""
    found: list[Decision] = []

    def tell_and_stop(decision: Decision) -> None:
        found.append(decision)
        raise _Known

    with listening(tell_and_stop), suppress(Exception):
        _begin(task, {"budget": 2**40})
    return found[0]


def _least_nbytes(task: Task) -> int:
    """The least budget of a plan with codes."""
    try:
        _begin(task, {"budget": 1, "exact": False})
    except BudgetTooSmall as error:
        return error.least_nbytes
    raise AssertionError("a plan for one byte")


def _begin(task: Task, options: dict[str, Any]) -> None:
    """Runs a compiled forward of a fresh model of the task; the cache is not asked."""
    model, (inputs, _) = task.model(), next(task.batches(0))
    with (
        functorch_config.patch(enable_autograd_cache=False),
        _planned("", options).of(model).context(0),
    ):
        model(inputs)
