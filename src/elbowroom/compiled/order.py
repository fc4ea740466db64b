"""Computes gradients of weights as early as possible, so that their inputs are freed earlier.

    as autograd has it   g_x = g W    then  g_W = g^T x      x, g and g_x stand together
    here                 g_W = g^T x  then  g_x = g W        x is free before g_x is made

A gradient of a weight is alive until backward ends whenever it is computed, so this order never
holds more. It also lets Inductor overwrite inputs at their last use: where x is the output of a
recomputed GELU, four tensors of its size were alive at once, and now two. A convolution's backward
gives both gradients in one call, and is split into two, which give the same bits.

Nothing is moved but calls of a library whose results go to the end of backward without another
call, and the views between: fused loops stay in their order.

Where bits may change, sums that go to the end of backward (the gradients of a norm's weight and
bias) come first, right behind what they read. Inductor does not fuse them with the norm's other
loops, so behind a call they would hold the norm's input, and the gradient of its result, until
that call has run.
"""

from collections.abc import Collection, Iterable

import torch
from torch import fx

from elbowroom.compiled.collect import Kind, NodeFacts, is_view, reached
from elbowroom.compiled.joint import Joint, is_random

_aten = torch.ops.aten
_BACKWARD = _aten.convolution_backward.default
_MASK = 10  # the index of the argument that selects the gradients


def gradients_first(joint: Joint, *, loops: bool = False) -> list[fx.Node] | None:
    """Reorder a joint graph. Returns nodes that were added; None where nothing changes.

    loops: those whose gradients are known come first, too, and so do sums that end backward
    """
    original = list(joint.graph.nodes)
    gradients = joint.gradients()
    made = split_convolutions(joint.graph, gradients)
    if made:
        joint.refresh()
        gradients = joint.gradients()
    if loops:
        _loops_first(joint, gradients)
        _sums_first(joint, gradients)
        joint.refresh()
    first = min((joint.place[u] for t in joint.tangents for u in t.users), default=None)
    if first is None:
        return None
    starts = list(joint.place)[first].prev
    behind: dict[fx.Node, list[fx.Node]] = {}  # nodes that will follow a node
    bases: dict[fx.Node, fx.Node] = {}
    for node in ends_of(joint, gradients):
        for one in (*_views(node, joint.place), node):
            if joint.place[one] >= first and one not in bases:
                bases[one] = _base(one, joint.place)
                at = bases[one] if joint.place[bases[one]] >= first else starts
                behind.setdefault(at, []).append(one)
    before = list(joint.graph.nodes)
    for place, nodes in behind.items():
        for one in nodes:
            place.append(one)
            place = one
    after = list(joint.graph.nodes)
    if after != before:
        joint.refresh()
    return made if after != original else None


def split_convolutions(graph: fx.Graph, among: Collection[fx.Node]) -> list[fx.Node]:
    """Compute the gradient of a convolution's input after that of its weight; return new nodes."""
    made: list[fx.Node] = []
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        mask = list(node.args[_MASK])
        parts = {user.args[1]: user for user in node.users}
        if node not in among or not mask[0] or not any(mask[1:]) or 0 not in parts:
            continue
        with graph.inserting_after(node):
            other = graph.call_function(_BACKWARD, (*node.args[:_MASK], [True, False, False]))
        other.meta = dict(node.meta)
        values = node.meta["val"]
        other.meta["val"] = (values[0], None, None)
        node.meta["val"] = (None, *values[1:])
        node.args = (*node.args[:_MASK], [False, *mask[1:]])
        parts[0].replace_input_with(node, other)
        other.append(parts[0])
        made.append(other)
    return made


def _loops_first(joint: Joint, gradients: Collection[fx.Node]) -> None:
    """Moves loops of backward to where their gradients are known, in front of library calls.

    Other loops that backward needs for these move with them.
    """
    facts = joint.facts
    begin = min((joint.place[u] for t in joint.tangents for u in t.users), default=len(joint.place))
    calls = [n for n in joint.place if n.op == "call_function" and n not in joint.required]
    old = [n for n in calls if joint.place[n] >= begin]
    backward, done = set(old), set[fx.Node]()
    new: list[fx.Node] = []

    def is_ready(node: fx.Node) -> bool:
        fact = facts.get(node)
        if node in done or node not in backward or node not in gradients or fact is None:
            return False
        if fact.kind is not Kind.VIEW and fact.kind is not Kind.POINTWISE:
            return False
        read = [n for n in fact.inputs if n in gradients]
        known = [n for n in read if n in done or n not in backward]
        return len(known) == len(read) and facts[node].nbytes <= sum(
            facts[facts[n].storage].nbytes for n in read
        )

    for first in old:
        pending = [first]
        while pending:
            node = pending[-1]
            missing = [n for n in node.all_input_nodes if n in backward and n not in done]
            if missing:
                pending += missing[:1]
                continue
            pending.pop()
            if node not in done:
                done.add(node)
                new.append(node)
                pending += [user for user in reversed(list(node.users)) if is_ready(user)]
    place = old[0].prev if old else None
    for node in new:
        assert place is not None
        place.append(node)
        place = node


def _sums_first(joint: Joint, gradients: Collection[fx.Node]) -> None:
    """Moves sums that end backward, with the loops that only they read, behind what these read."""
    place, facts = joint.place, joint.facts
    for node in reversed(list(place)):  # so that those behind the same value keep their order
        is_sum = node in gradients and node in facts and facts[node].kind is Kind.REDUCTION
        if not is_sum or not _ends_backward(node):
            continue
        moved, pending = {node}, [node]
        while pending:
            for one in pending.pop().all_input_nodes:
                is_loop = one in gradients and facts[one].kind in (Kind.POINTWISE, Kind.VIEW)
                if is_loop and one not in moved and moved.issuperset(one.users):
                    moved.add(one)
                    pending.append(one)
        read = [n for one in moved for n in one.all_input_nodes if n not in moved]
        last = max(read, key=place.__getitem__)
        if last.op == "call_function":
            for one in sorted(moved, key=place.__getitem__):
                last.append(one)
                last = one


def _ends_backward(node: fx.Node) -> bool:
    """Returns whether nothing but views reads a value before it is returned."""
    return all(
        user.op == "output" or (is_view(user) and _ends_backward(user)) for user in node.users
    )


def ends_of(joint: Joint, gradients: Collection[fx.Node]) -> Iterable[fx.Node]:
    """Returns the calls of backward after which no other call follows, in the graph's order."""
    calls: set[fx.Node] = set()  # nodes from which a call can be reached
    for node in reversed(joint.place):
        if any(u in calls or _is_call(u, joint.facts) for u in node.users):
            calls.add(node)
    return [
        node
        for node in joint.place
        if node in gradients
        and node not in calls
        and _is_call(node, joint.facts)
        and getattr(node.target, "namespace", "") == "aten"
        and not node.target._schema.is_mutable  # type: ignore[union-attr]
        and not is_random(node)
    ]


def _is_call(node: fx.Node, facts: dict[fx.Node, NodeFacts]) -> bool:
    """Returns whether a node calls a library, and is not an item of such a call's result."""
    fact = facts.get(node)
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return fact is not None and fact.kind is Kind.EXTERN and is_op


def _views(node: fx.Node, place: dict[fx.Node, int]) -> list[fx.Node]:
    """Returns the views that a call reads through, in the graph's order."""
    found = reached([node], lambda one: filter(is_view, one.all_input_nodes))
    del found[node]
    return sorted(found, key=place.__getitem__)


def _base(node: fx.Node, place: dict[fx.Node, int]) -> fx.Node:
    """Returns the last node that this one waits for, seen through views."""
    read = [n for one in (node, *_views(node, place)) for n in one.all_input_nodes]
    return max((n for n in read if not is_view(n)), key=place.__getitem__)
