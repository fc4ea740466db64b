"""Computes values of backward a second time, where one use would hold memory until the other.

`own_functions`: slow functions (exp, tanh) that forward and a gradient read.

    as autograd has it   s = sigmoid(g);  y = g * s * u;  ...  g_u = g_y * g * s
    here                 the same, and    s' = sigmoid(g);     g_u = g_y * g * s'

Inductor computes s once, in one kernel with all that reads it. If y is recomputed, that kernel
gives y together with the gradients of g and u, so that six tensors of one size stand at once. With
s' y is computed first, and is free when the gradient of its weight is done; four are left.

`plain_loops`: loops that plain backward computes for gradients, in graphs where the bits of a sum
depend on what is computed in one kernel with it (`layouts.py`), and where rows end in another way
than in forward (`tails.py`). What is made again besides, for the next library call, is then
computed on its own.

`late_operands`: what `sums.py` has joined with a sum that backward makes at its end. The gradient
of a weight that is tied to an embedding is such a sum, and until it the gradient of all logits
would stand. It is computed again from the last hidden state, at the cost of one more product; as
this may not be worth it, it can be undone.

Each op has the same arguments as before, so no bit changes.
"""

from collections.abc import Callable, Collection, Iterable

import torch
from torch import fx

from elbowroom.compiled.collect import Kind, NodeFacts, reached
from elbowroom.compiled.decide import may_run_again
from elbowroom.compiled.joint import Joint, Step
from elbowroom.compiled.layouts import has_rest
from elbowroom.compiled.sums import joined
from elbowroom.compiled.tails import ends_as_forward, ends_as_gradients

_SMALL = 1 / 16  # of the bytes that would stand: what may stand in their place
_LOOPS = (Kind.POINTWISE, Kind.VIEW)


def own_functions(joint: Joint) -> list[fx.Node]:
    """Gives backward its own results of slow functions that forward reads, too; returns these."""
    facts, required = joint.facts, joint.required
    slow: dict[fx.Node, None] = {}  # forward's loops with a slow function that are not stored
    for node in joint.place:
        fact = facts.get(node)
        if node not in required or fact is None or fact.kind not in _LOOPS:
            continue
        inlined = any(n in slow and facts[n].elements == fact.elements for n in fact.inputs)
        if (fact.is_heavy or inlined) and not _is_stored(node, joint):
            slow[node] = None
    return _copied_for_gradients(slow, joint)


def plain_loops(joint: Joint, plain: Step, apart: Collection[str] = ()) -> list[fx.Node]:
    """Gives gradients their own results of the loops that plain backward computes; returns these.

    All in graphs in which a map leaves a rest of channels (`layouts.py`), else those with the nodes
    of these names, which end in another way there (`tails.py`): what they are computed from, too,
    since sin(x) of one element may depend on the others of its vector, and on what fills these.
    """
    again = [n for n in plain.again if joint.facts[n].kind in _LOOPS]
    maps = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    if joint.is_channels_last and any(has_rest(n.meta["val"]) for n in maps):
        return _copied_for_gradients(dict.fromkeys(again), joint)
    known, behind = set(again), set[fx.Node]()
    for node in sorted(again, key=joint.place.__getitem__):
        if node.name in apart or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    loops = reached(behind, lambda one: [n for n in one.all_input_nodes if n in known])
    return _copied_for_gradients(dict.fromkeys(loops), joint, views=True)


def _copied_for_gradients(
    loops: Collection[fx.Node], joint: Joint, *, views: bool = False
) -> list[fx.Node]:
    """Copies loops of forward that gradients read, and those that they are computed from.

    views: those of which gradients read views alone, too
    """
    facts, required = joint.facts, joint.required
    late = {n: [u for u in n.users if u not in required and u in facts] for n in loops}
    firsts = {n: min(map(joint.place.__getitem__, users)) for n, users in late.items() if users}
    nodes = list(joint.place)
    copies: dict[fx.Node, fx.Node] = {}
    for node in sorted(firsts, key=firsts.__getitem__):
        chain = _sources(node, facts, lambda n: n not in loops)
        if (views or facts[node].kind is not Kind.VIEW) and _may_run_late(chain, joint):
            _copy(chain, nodes[firsts[node]], joint, copies)
            for user in late[node]:
                user.replace_input_with(node, copies[node])
    for node in loops:
        if node in copies:
            ends_as_forward(node)
    if copies:
        joint.refresh()
    return list(copies.values())


def _is_stored(node: fx.Node, joint: Joint) -> bool:
    """Returns whether forward's loops end with a value: it is returned, or no other loop reads it.

    A reduction over it, or a library call, has it stored for backward as well.
    """
    if node in joint.forward_outputs:
        return True
    for user in node.users:
        fact = joint.facts.get(user)
        if user not in joint.required or fact is None:
            continue
        if fact.kind not in _LOOPS or (fact.kind is Kind.VIEW and _is_stored(user, joint)):
            return True
    return not any(user in joint.required for user in node.users)


def late_operands(joint: Joint) -> dict[fx.Node, fx.Node]:
    """Gives sums that backward joins with a product their own copies of its operands.

    Returns the nodes that were made, with what each is a copy of: none where that would take more
    than one library call.
    """
    facts, gradients = joint.facts, joint.gradients()
    copies: dict[fx.Node, fx.Node] = {}
    for node in joined(joint.graph, gradients):
        operands = [n for n in node.args[1:] if isinstance(n, fx.Node)]
        for operand in operands:
            source = facts[operand].storage
            stands = {facts[n].storage for n in operands if n is not operand}
            if source not in gradients or len(source.users) == 1:
                continue
            chain = _chain(operand, stands, gradients, joint)
            calls = sum(facts[n].kind is Kind.EXTERN for n in chain)
            if calls <= 1 and _may_run_late(chain, joint):
                made: dict[fx.Node, fx.Node] = {}
                _copy(chain, node, joint, made)
                node.replace_input_with(operand, made[operand])
                copies.update((copy, one) for one, copy in made.items())
    if copies:
        joint.refresh()
    return copies


def undo(copies: dict[fx.Node, fx.Node], joint: Joint) -> None:
    """Takes what `late_operands` has made out of the graph again."""
    for copy, one in reversed(copies.items()):
        copy.replace_all_uses_with(one)
        joint.graph.erase_node(copy)
    joint.refresh()


def _chain(
    operand: fx.Node, stands: set[fx.Node], gradients: set[fx.Node], joint: Joint
) -> set[fx.Node]:
    """Returns the nodes that give an operand from what may stand until the end of backward.

    That is: inputs, the storages in `stands`, and what is small. Small gradients are computed
    again, since Inductor would fuse the copy with the loops that made them, at their place.
    """
    facts = joint.facts
    limit = _SMALL * facts[facts[operand].storage].nbytes

    def stays(one: fx.Node) -> bool:
        fact = facts[one]
        if fact.kind is Kind.GIVEN or fact.storage in stands:
            return True
        return one not in gradients and facts[fact.storage].nbytes <= limit

    return _sources(operand, facts, stays)


def _sources(
    node: fx.Node, facts: dict[fx.Node, NodeFacts], stays: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Returns a node, and all that it is computed from but for what stays."""
    return set(reached([node], lambda one: [n for n in facts[one].inputs if not stays(n)]))


def _may_run_late(nodes: Iterable[fx.Node], joint: Joint) -> bool:
    """Returns whether nodes give the same values in backward: forward may change its inputs."""
    reads = {read for node in nodes for read in joint.facts[node].inputs}
    return all(map(may_run_again, nodes)) and not joint.saves_changed(reads)


def _copy(
    nodes: Iterable[fx.Node], before: fx.Node, joint: Joint, copies: dict[fx.Node, fx.Node]
) -> None:
    """Puts copies of nodes in front of another; they read each other, and earlier `copies`."""
    for node in sorted(nodes, key=joint.place.__getitem__):
        if node not in copies:
            with joint.graph.inserting_before(before):
                copies[node] = joint.graph.node_copy(node, lambda n: copies.get(n, n))
            ends_as_gradients(copies[node], node)
