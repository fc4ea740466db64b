"""A budget for a loop that Accelerate has prepared.

model, optimizer, data = accelerator.prepare(model, optimizer, data)
fit(accelerator, model, optimizer, budget="6 GiB")

log = er.log_to(accelerator)    # to the trackers of `Accelerator(log_with=...)`
log(model, step)
"""

from typing import Any, TypeVar

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

import elbowroom as er
from elbowroom.integrations.budgeted import unwrapped

M = TypeVar("M", bound=nn.Module)


def fit(
    accelerator: Accelerator,
    model: M,
    optimizer: Optimizer | None = None,
    *,
    budget: float | str,
    **settings: Any,
) -> M:
    """Fits the model inside of what `accelerator.prepare` has returned; returns its argument.

    optimizer  the optimizer whose states are counted; Accelerate's wrapper is removed
    budget     as in `er.fit`
    settings   other settings of `er.fit`

    Raises the errors of `er.fit`.
    """
    inner = accelerator.unwrap_model(model)
    er.fit(
        inner,
        budget=budget,
        optimizer=None if optimizer is None else unwrapped(optimizer),
        **settings,
    )
    return model


def release(accelerator: Accelerator, model: M) -> M:
    """Undoes `fit`."""
    er.release(accelerator.unwrap_model(model))
    return model
