"""A step that is not run, as a `Profile`: no memory, no data, only shapes.

    1. the model, its optimizer and a batch become fake tensors             (`fakes.py`)
    2. a step of these, in which optimizer states come into being
    3. another one under the recorder: bytes are counted, seconds estimated (`counting.py`)

Nothing is done to what is saved, so the peak is that of plain autograd. The ops are those that the
device would run, because fake tensors pass for its own; their workspaces are not seen. A step that
looks at a value (`loss.item()`, a boolean index) cannot run dry.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.optim import Optimizer

from elbowroom._checks import check_scalar
from elbowroom.errors import PlanError
from elbowroom.measure.counting import Counting
from elbowroom.measure.fakes import Fakes
from elbowroom.measure.rates import rates
from elbowroom.measure.record import check_saves, run_recorded
from elbowroom.measure.resident_bytes import resident_bytes_of
from elbowroom.measure.roofline import Speed, speed_of
from elbowroom.plan import KeepAll
from elbowroom.plan.profile import Profile
from elbowroom.runtime.storage import taken_for_plain

Loss = Callable[[nn.Module, Any], Tensor]
_NEED_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def dry_run(
    model: nn.Module,
    make_batch: Callable[[], Any],
    loss: Loss,
    optimizer: Optimizer | None,
    *,
    device: torch.device,
    min_nbytes: int,
    speed: Speed | None,
) -> Profile:
    """Records a dry run of a step.

    Raises PlanError for a step that looks at values, or saves nothing.
    """
    counting = Counting(speed or speed_of(device.type), device.type)
    with _pretending(), counting:
        step = _fake_step(model, make_batch, loss, optimizer, device)
        step()
        counting.start()
        static = counting.level
        recorder = run_recorded(step, counting, KeepAll(), min_nbytes, counting)
    check_saves(recorder)
    levels, floors = counting.levels()
    speeds = rates(device.type) if speed is None else None
    return Profile(
        level=tuple(levels),
        floor=tuple(floors),
        starts_s=tuple(counting.starts_s),
        backward=recorder.moments - 1 if recorder.backward is None else recorder.backward,
        seconds=counting.seconds,
        static=static,
        storages=recorder.storages(),
        modules=recorder.modules(),
        rates={} if speeds is None else speeds,
        fixed_s={} if speeds is None else speeds.fixed_s,
        unlisted_nbytes=recorder.unlisted_nbytes,
        device=(device.type, ""),
        measured=False,
        standing=resident_bytes_of(model, [] if optimizer is None else [optimizer]),
    )


@contextmanager
def _pretending() -> Iterator[None]:
    """Makes new tensors fake inside this context, and plain to the hooks; RNG stays as it is."""
    try:
        with (
            torch.random.fork_rng(devices=[]),
            taken_for_plain(FakeTensor),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            yield
    except _NEED_VALUES as error:
        raise PlanError(
            f"a dry run has shapes but no values, and this step needs values for {error.func}; "
            "leave it out of `loss` (or leave out the optimizer that needs it), or measure a real "
            "step with er.measure"
        ) from error


def _fake_step(
    model: nn.Module,
    make_batch: Callable[[], Any],
    loss: Loss,
    optimizer: Optimizer | None,
    device: torch.device,
) -> Callable[[], None]:
    """A training step of stand-ins."""
    fakes = Fakes(device)
    twin, update = fakes.copy((model, optimizer))
    batch = fakes.batch(make_batch())

    def step() -> None:
        check_scalar(loss(twin, batch)).backward()  # type: ignore[no-untyped-call]
        if update is not None:
            update.step()
        twin.zero_grad(set_to_none=True)

    twin.zero_grad(set_to_none=True)
    return step
