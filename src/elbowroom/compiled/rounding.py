"""Tests whether a choice of saved values keeps the bits of plain torch.compile in 16-bit floats.

A fused kernel computes in float32. A bfloat16 or float16 value is rounded where it is stored, and
is not where its reader is in the same kernel. So in a graph with such values the bits depend on
what is stored, and on which loops compute a value. Two steps read the same bits if for each value
that loops compute

    in forward   it is stored in both or in neither; a library call that reads it stores it anyway
    in backward  it is recomputed in both or in neither, or library calls alone read it

Library calls may be run again freely: they read what is stored. Measured: a GPT under autocast
whose plan ignored this had other bits in 75 of 126 tensors, by up to 0.5 %; in float32, where there
is no rounding to lose, plans that ignore it have had none.
"""

from collections.abc import Collection

import torch
from torch import fx

from elbowroom.compiled.collect import Kind, NodeFacts, tensors_of
from elbowroom.compiled.joint import Joint, Step

_SHORT = (torch.bfloat16, torch.float16)


def rounded_values(joint: Joint) -> frozenset[fx.Node]:
    """All values that loops compute in forward, if some of them are 16-bit floats; else none."""
    loops = [n for n in joint.required if joint.facts[n].kind in (Kind.POINTWISE, Kind.REDUCTION)]
    short = any(x.dtype in _SHORT for node in loops for x in tensors_of(node))
    return frozenset(loops) if short else frozenset()


def is_tied(joint: Joint, node: fx.Node, after: Collection[fx.Node]) -> bool:
    """Returns whether a node's bits depend on whether it is saved.

    after: what backward computes.
    """
    return not (
        is_read(node, joint.facts, joint.required, by_loops=False)
        and not is_read(node, joint.facts, after, by_loops=True)
    )


def rounds_alike(joint: Joint, plain: Step, step: Step, rounded: Collection[fx.Node]) -> bool:
    """Returns whether forward and backward of both steps read the same bits of these values."""
    stored = [{joint.facts[n].storage for n in one.saved} & set(rounded) for one in (plain, step)]
    again = [set(one.again) & set(rounded) for one in (plain, step)]
    other = (stored[0] ^ stored[1]) | (again[0] ^ again[1])
    if not other:
        return True
    backward = joint.parts(step.saved)[1] | joint.parts(plain.saved)[1]
    return not any(is_tied(joint, node, backward) for node in other)


def is_read(
    node: fx.Node, facts: dict[fx.Node, NodeFacts], readers: Collection[fx.Node], *, by_loops: bool
) -> bool:
    """Returns whether one of the readers, seen through views, is a loop, or else a library call.

    by_loops: it is to be a loop.
    """
    pending = [node]
    while pending:
        for reader in pending.pop().users:
            if reader not in readers or reader not in facts:
                continue
            kind = facts[reader].kind
            if kind is Kind.VIEW:
                pending.append(reader)
            elif (kind is not Kind.EXTERN) == by_loops:
                return True
    return False
