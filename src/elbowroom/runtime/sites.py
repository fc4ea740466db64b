"""What is known of a save without looking at a value: the facts that a policy decides by."""

from dataclasses import replace

import torch
from torch import Tensor

from elbowroom.plan import Need, Rebuildable, Site, SiteName
from elbowroom.plan.gentle import MOST_LEVELS
from elbowroom.plan.site import Reads
from elbowroom.runtime.consumers import Call, Reading, is_argument, is_running_copy
from elbowroom.runtime.facts import facts_of
from elbowroom.runtime.identity import Origin, is_made_of_parameters
from elbowroom.runtime.recipes import Ready
from elbowroom.runtime.slot import Slot

MADE_OF_PARAMETERS = "made of parameters only"
_HARD_MIN_NBYTES = 16  # scalars gain nothing


def site_of(
    slot: Slot,
    x: Tensor,
    call: Call | None,
    reading: Reading,
    ready: Ready | None,
    name: SiteName,
    origin: Origin | None,
) -> Site:
    """The site at which `call` saves x.

    reading how its backward reads x
    ready   how x could be made again now
    origin  the op that made x
    """
    facts = facts_of(x, call)
    if origin is not None and origin.has_zeros and x.is_floating_point():
        facts = replace(facts, has_zeros=True)
    rebuildable = (
        Rebuildable.NO if ready is None else Rebuildable.EXACT if ready.exact else Rebuildable.LOSSY
    )
    return Site(
        module=name.module,
        consumer=name.consumer,
        producer="" if origin is None else origin.op,
        shape=slot.base.shape,
        dtype=x.dtype,
        nbytes=slot.entry.before_nbytes,
        need=reading.need,
        rebuildable=rebuildable,
        facts=facts,
        why=reading.why,
        nth=name.nth,
        reads=Reads.RESTORED if call is None else call.reads,
        formula=reading.formula,
        least_levels=16 if call is None else call.levels or MOST_LEVELS,
    )


def left_alone(slot: Slot, x: Tensor, call: Call | None, need: Need, min_nbytes: int) -> str:
    """Why this storage is kept whatever the policy says, or ""."""
    if slot.entry.before_nbytes < max(min_nbytes, _HARD_MIN_NBYTES):
        return "small"
    if slot.is_window:
        return "a window onto a larger storage"
    if is_running_copy(x, call):
        return "a copy of running statistics, which its op changes"
    if is_made_of_parameters(x):
        return MADE_OF_PARAMETERS
    if (
        x.grad_fn is None
        and x.dtype is not torch.bool
        and (need is Need.LOSSY or is_argument(x, call))
    ):
        return "an input: its owner holds it"
    return ""
