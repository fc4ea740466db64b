"""Copies tensors that an op is about to change in place, if backward will read their old values.

Plain autograd never reads the changed memory: it holds results that we recompute from it. All
functions are called before the op runs, in a forward that is examined.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from elbowroom.runtime.changing import ParametersAsRead
from elbowroom.runtime.handles import KeepHandle
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.sources import Sources
from elbowroom.runtime.storage import clone_with_storage, is_touchable, note_changing

COPIED = "a source that has changed since"


def keep_parameters(
    changed: Iterable[Tensor], reading: Iterable[ParametersAsRead], sources: Sources
) -> None:
    """Copies the parameters among these tensors, if a module that runs again reads them.

    What is rebuilt from them is made at once, and kept. reading: the parameters of such modules
    """
    # Counters of batch norms are integers, and many.
    touchable = filter(is_touchable, changed)
    free = [x for x in touchable if x.is_floating_point() and (x._is_view() or x.is_leaf)]
    if not free:
        return
    storages = {x.untyped_storage()._cdata for x in free}
    for parameters in reading:
        parameters.keep(storages)
    for slot in sources.slots():
        ready = getattr(slot.value, "ready", None)
        fixed = () if ready is None else (x for one in ready.steps for x in one.op.fixed)
        read = [x for x in fixed if x.untyped_storage()._cdata in storages]
        if read:
            why = "a parameter that it could be rebuilt from is changed"
            with torch.no_grad(), torch._C.DisableTorchFunction():
                slot.hold(KeepHandle(slot.restore_value(), why))
                note_changing(read[0])


def copy_sources(changed: Iterable[Tensor], sources: Sources) -> bool:
    """Copies those of these tensors that others are rebuilt from; returns whether there are any.

    The op that saved it may not contribute to the loss: then plain autograd would allow the change.
    """
    slots = [slot for slot in sources.slots_of(changed) if slot.is_source]
    return bool([slot for slot in slots if _copy(slot)])


def _copy(slot: Slot) -> bool:
    """Copies what a source holds, if nobody else was handed it; returns whether it is a source."""
    kept = slot.value
    if slot.is_lent or not isinstance(kept, KeepHandle):
        return False
    if not kept.was_changed:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            copy = clone_with_storage(kept.restore())
        slot.hold(KeepHandle(copy, COPIED))
    return True


def lend(changed: Iterable[Tensor], sources: Sources) -> bool:
    """Notes that the memory of these tensors is handed out: no version will show its changes.

    So what is rebuilt from them is made at once, and kept, and nothing is from now on. The ops that
    have saved them read what is there in backward, as in plain autograd. Rows that are gathered
    from them as they are read come of a copy. Returns whether anything was made of them.
    """
    changed = list(changed)
    gathered = [slot for slot in sources.slots_of(changed) if slot.is_gathered and _copy(slot)]
    for x in changed:
        if is_touchable(x):
            sources.lend(x)
    found = [slot for slot in sources.slots() if _reads_lent(slot)]
    for slot in found:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            slot.hold(KeepHandle(slot.restore_value(), "its source may change without a version"))
    return bool(found or gathered)


def _reads_lent(slot: Slot) -> bool:
    ready = getattr(slot.value, "ready", None)
    return ready is not None and any(one.is_lent for one in ready.slots)
