"""Gradients of attention from q, k and v alone, so that these may be codes.

    as autograd has it   out, l = attention(q, k, v)   ...   backward(g, q, k, v, out, l)
    here, on a CPU       out, _ = attention(q, k, v)   ...   attention_backward(g, q, k, v)
    here, elsewhere      the same, and    out', l' = attention(q, k, v);  backward(g, ..., out', l')

The logsumexp l belongs to the q and k of forward. With codes of these, backward's weights
exp(q k^T - l) do not add up to 1, by a factor that grows with exp(error of a logit), and gradients
were wrong by a factor of 44 at sharp logits (docs/log.md, "attention"). Here weights, output and
gradient belong to one attention, of what backward reads, and the only error left is that of a logit
itself.

On a CPU, a kernel of ours takes 0.7 to 1.6 times backward alone, and reads neither out nor l
(`kernels/attention.py`). Elsewhere, and for other floats than float32, forward's call runs again.
"""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from elbowroom.compiled.collect import packet_of
from elbowroom.compiled.joint import Joint, is_random
from elbowroom.compiled.ops import ATTENTION_BACKWARD
from elbowroom.kernels.attention import AttentionArguments

INPUTS, RESULTS = ("query", "key", "value"), ("out", "logsumexp")


def from_inputs(joint: Joint) -> list[fx.Node]:
    """Rewrites the backward of each attention so that it needs q, k and v alone.

    Returns the nodes that were added, all of backward.
    """
    made: list[fx.Node] = []
    for node in list(joint.place):
        given = arguments_of(node)
        call = None if given is None else _forward_of(given)
        if given is None or call is None or not _is_same(given, call):
            continue
        if given.get("dropout_p") or is_random(call) or call not in joint.required:
            continue
        made += _in_one_pass(node, given) or _again(node, given, call)
    if made:
        joint.refresh()
    return made


def arguments_of(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of an attention's backward by name; None: the node is none, or of our own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    if "attention" not in target.__name__ or "backward" not in target.__name__:
        return None
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given if {*INPUTS, *RESULTS} <= given.keys() else None


def is_consistent(node: fx.Node, after: Collection[fx.Node]) -> bool:
    """Returns whether an attention's backward reads out and logsumexp that belong to q, k and v.

    They do where backward computes them from what it reads as q, k and v.

    after: what backward computes
    """
    given = arguments_of(node)
    call = None if given is None else _forward_of(given)
    if given is None or call is None or not _is_same(given, call):
        return False
    return call in after and all(given[name] in after for name in RESULTS)


def _forward_of(given: dict[str, Any]) -> fx.Node | None:
    """The call that made the output and logsumexp that an attention's backward reads."""
    items = [_itself(given[name]) for name in RESULTS]
    if any(one.target is not operator.getitem for one in items):
        return None
    calls = [one.args[0] for one in items]
    return calls[0] if isinstance(calls[0], fx.Node) and calls[0] is calls[1] else None


def _itself(one: fx.Node) -> fx.Node:
    """The node of which this one is another name: AOTAutograd has two for what it saves."""
    while packet_of(one) in (torch.ops.aten.alias, torch.ops.aten.detach):
        one = one.all_input_nodes[0]
    return one


def _is_same(given: dict[str, Any], call: fx.Node) -> bool:
    """Returns whether forward read the same q, k and v as backward does."""
    return tuple(call.args[: len(INPUTS)]) == tuple(given[name] for name in INPUTS)


def _in_one_pass(node: fx.Node, given: dict[str, Any]) -> list[fx.Node]:
    """Puts a call of ours in place of a backward; none where it does not serve."""
    mask = given.get("attn_mask")
    tensors = [given[name] for name in INPUTS]
    q, k, v = (one.meta["val"] for one in tensors)
    how = bool(given["is_causal"]), given.get("scale")
    of_mask = mask.meta["val"] if isinstance(mask, fx.Node) else None
    if "for_cpu" not in str(node.target) or not AttentionArguments(q, k, v, of_mask, *how).fits:
        return []
    graph = node.graph
    with graph.inserting_before(node):
        one = graph.call_function(ATTENTION_BACKWARD, (given["grad_out"], *tensors, mask, *how))
    one.meta = dict(node.meta)
    node.replace_all_uses_with(one)
    graph.erase_node(node)
    return [one]


def _again(node: fx.Node, given: dict[str, Any], call: fx.Node) -> list[fx.Node]:
    """Gives a backward its own call of forward."""
    graph = node.graph
    made: list[fx.Node] = []
    with graph.inserting_before(node):
        made.append(graph.node_copy(call))
        for name in RESULTS:
            one = _itself(given[name])
            item = graph.call_function(operator.getitem, (made[0], one.args[1]))
            item.meta = dict(one.meta)
            node.replace_input_with(given[name], item)
            made.append(item)
    return made
