"""Gives small parameters that a recipe reads their old values, where they have changed since.

A recipe runs its op on the parameters that forward has read. Of one that may be changed until
backward, for example by an optimizer in backward, an examined forward makes a copy; of a large one
it notes a sample.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from elbowroom.runtime.changed_parameters import sample_of
from elbowroom.runtime.changing import has_same_values
from elbowroom.runtime.fingerprints import changed_unseen
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.storage import check_parameters, is_small, note_changing, version_of

if TYPE_CHECKING:
    from elbowroom.runtime.handles.rebuild import Ready


def with_copies(ready: "Ready") -> "Ready":
    """Returns the recipe with copies of the small parameters that its ops read."""
    source, others = (_with_copies(ready.source), tuple(map(_with_copies, ready.others)))
    copies = tuple(x.clone() if is_small(x) else None for x in ready.op.fixed)
    pairs = zip(ready.op.fixed, copies, strict=True)
    samples = tuple(sample_of(x) if copy is None else 0 for x, copy in pairs)
    if not copies and source is ready.source and others == ready.others:
        return ready
    return replace(ready, source=source, others=others, copies=copies, samples=samples)


def _with_copies(source: "Slot | Ready") -> "Slot | Ready":
    return source if isinstance(source, Slot) else with_copies(source)


def lend(ready: "Ready") -> list[tuple[Tensor, Tensor]]:
    """Puts copies in place of parameters that have changed; returns these, and what they are.

    They are objects of this recipe's op, which share their memory with the parameters. Raises
    RestoreError if one has changed that has no copy.
    """
    lent = []
    known = zip(ready.op.fixed, ready.versions, ready.copies, ready.samples, strict=True)
    for x, version, copy, sample in known:
        has_changed = version_of(x) != version
        if copy is None or not (has_changed or not has_same_values(x, copy)):
            if has_changed:
                note_changing(x)
            check_parameters((x,), (version,))
            if copy is None and sample_of(x) != sample:  # through `x.data`
                note_changing(x)
                raise changed_unseen(x, "backward makes a tensor again from it")
            continue
        note_changing(x)
        lent.append((x, x.detach(), copy))
    for x, _, copy in lent:  # once none has raised
        x.data = copy
    return [(x, now) for x, now, _ in lent]
