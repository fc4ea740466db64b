"""Facts of a save that are known without looking at a value, which a policy decides by."""

from dataclasses import replace
from math import gcd, prod

import torch
from torch import Tensor

from elbowroom.plan import Need, Rebuildable, Site, SiteName
from elbowroom.plan.precision_floor import MOST_LEVELS
from elbowroom.plan.rows import LEAST_WIDTH, Rows
from elbowroom.plan.site import Reads
from elbowroom.runtime.consumers import Call, Reading, is_argument, is_running_copy
from elbowroom.runtime.facts import facts_of, sequence_of
from elbowroom.runtime.identity import Origin, is_made_of_parameters, is_parameter
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.recipes import Ready
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.statistics import layout_of

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
    sequence = sequence_of(x, slot.base, name.consumer)
    if sequence is not None:
        facts = replace(facts, sequence=sequence)
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
        rows=rows_of(slot, x, reading.width),
        by_size=reading.by_size,
    )


def rows_of(slot: Slot, x: Tensor, width: int) -> Rows | None:
    """The rows of x as they lie in the memory of its slot; None: there are none, or in no order.

    Of a slice of longer rows: shorter rows, of which those of x have several whole ones.
    """
    numel = prod(slot.base.shape)
    if not width or not numel:
        return None
    inside, left = 1, x.dim()
    while left and inside < width and x.stride(left - 1) == inside:
        left -= 1
        inside *= x.shape[left]
    if inside == width:
        outer = (step for n, step in zip(x.shape[:left], x.stride(), strict=False) if n > 1)
        width = gcd(width, numel, x.storage_offset() - slot.base.offset, *outer)
        return Rows((numel // width, width), (width, 1)) if width >= LEAST_WIDTH else None
    if x.numel() == numel and width == x.shape[-1] and layout_of(x, (*x.shape[:-1], 1)):
        return Rows(tuple(x.shape), x.stride())
    return None


def left_alone(
    slot: Slot,
    x: Tensor,
    call: Call | None,
    need: Need,
    min_nbytes: int,
    origin: Origin | None,
) -> str:
    """Returns why this storage is kept whatever the policy says, or "".

    origin  the op that made x, if one was seen
    """
    if slot.entry.before_nbytes < max(min_nbytes, _HARD_MIN_NBYTES):
        return "small"
    if slot.is_window:
        return "a window onto a larger storage"
    if is_running_copy(x, call):
        return "a copy of running statistics, which its op changes"
    if is_made_of_parameters(x):
        return MADE_OF_PARAMETERS
    if x.grad_fn is not None or x.dtype is torch.bool:
        return ""
    if origin is None and (need is Need.LOSSY or is_argument(x, call)):
        return "an input: its owner holds it"
    if need is Need.LOSSY and not _ends_in_parameters(x, call):
        return "data that the gradient of an activation is multiplied with"
    return ""


def _ends_in_parameters(x: Tensor, call: Call | None) -> bool:
    """Returns whether the call reads x for gradients of parameters alone.

    A weight that wants no gradient is data, too: its error would go on to all that lies below.
    """
    if call is None:
        return False
    given = tensors_in((call.args, call.kwargs))
    others = [one for one in given if one.requires_grad]
    return all(is_parameter(one) or is_made_of_parameters(one) for one in others)
