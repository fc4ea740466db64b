"""Request of an op to the slot of a tensor that it saves, and whether what is held suffices.

Nothing here changes what is held.
"""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from elbowroom.plan import Action, Encode, Need, Offload, Site, SiteName
from elbowroom.plan.precision_floor import (
    LEAST_LOG_PROBABILITY,
    MOST_LEVELS,
    keeps_rows_apart,
    suffices,
)
from elbowroom.plan.site import NORMS, Formula
from elbowroom.runtime.consumers import Call, Reading
from elbowroom.runtime.direct.attention import attention_reading
from elbowroom.runtime.handles import EncodeHandle
from elbowroom.runtime.masks import differ
from elbowroom.runtime.sites import rows_of
from elbowroom.runtime.slot import Slot


class Request(NamedTuple):
    """Request of the op `call`, which saves x in the storage of `slot`, and reads it like this.

    call  None: no function that Python has called saves it
    name  module, op, and how many the op of this module has saved before
    """

    slot: Slot
    x: Tensor
    call: Call | None
    reading: Reading
    name: SiteName

    @property
    def need(self) -> Need:
        """Need of the op for x."""
        return self.reading.need


def classify(
    slot: Slot, x: Tensor, call: Call | None, reading: Reading, name: SiteName, *, looks: bool
) -> Request:
    """Returns what the op asks: more than `reading`, where what the slot holds does not fit it.

    looks: whether attention's values may be looked at, on a CPU
    """
    if call is not None and call.would_rerun:
        reading = attention_reading(x, call, slot, reading, looks=looks)
    if reading.need is Need.MASK and differ(name.consumer, slot.bits_of):
        why = f"'{slot.bits_of}' holds another mask of it"
        reading = Reading(Need.EXACT, Formula.COMPARED, why)
    if slot.sites and reading.need is Need.LOSSY and _is_below(slot, reading):
        why = f"of log-probabilities a code has those from {LEAST_LOG_PROBABILITY:.0f} up"
        reading = Reading(Need.EXACT, Formula.DIFFERENCE, why)
    if reading.by_size and name.consumer not in NORMS and not rows_of(slot, x, reading.width):
        why = "its backward divides by the size of rows that lie in no order that is known"
        reading = Reading(Need.EXACT, Formula.SINGULAR, why)
    return Request(slot, x, call, reading, name)


def _is_below(slot: Slot, reading: Reading) -> bool:
    """Returns whether a code of log-probabilities would not do for what this reader makes."""
    formulas = slot.sites[0].formula, reading.formula
    return formulas[0] is Formula.LOG_PROBABILITY and formulas[1] is not formulas[0]


def is_served(request: Request) -> bool:
    """Returns whether what the slot holds is all that the op needs."""
    return request.slot.serves(request.need) and not _is_too_coarse(request)


def _is_too_coarse(request: Request) -> bool:
    """Returns whether the code that is held was chosen for a milder formula than this reader's."""
    slot, x, call, reading, name = request
    if reading.need is not Need.LOSSY or slot.exact or not slot.sites:
        return False
    levels = 0 if call is None else call.levels or MOST_LEVELS
    site = replace(
        slot.sites[-1],
        consumer=name.consumer,
        formula=reading.formula,
        least_levels=levels,
        rows=rows_of(slot, x, reading.width),
        by_size=reading.by_size,
    )
    below = getattr(slot.value, "ready", None)
    return any(is_too_coarse_for(one, site) for one in ([slot] if below is None else below.slots))


def is_too_coarse_for(slot: Slot, site: Site) -> bool:
    """Returns whether a slot holds a code of fewer levels than this site asks for.

    Or one that does not keep apart the rows of which this site asks for the size.
    """
    held = slot.value
    if slot.exact or not isinstance(held, EncodeHandle):
        return False
    normalized = site.rows is not None and held.normalizes(site.rows)
    apart = keeps_rows_apart(held.codec, site, normalized=normalized)
    return not apart or not suffices(held.codec, site)


def is_lossy(action: Action, need: Need) -> bool:
    """Returns whether the tensor may be, or may become, a lossy code."""
    at_once = isinstance(action, Offload) or (isinstance(action, Encode) and action.codec.lossless)
    return need is Need.LOSSY and not at_once
