"""Search for the node of the graph that reads a saved tensor, and how, once the call has ended.

A pack hook does not get the saving node. But a node exposes its saved tensors as hooks have packed
them (`node._raw_saved_self.data`). So the nodes that a call has created are walked from its outputs
down, and their saved tensors are looked up in the table of derivative formulas.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from elbowroom.plan.site import Formula
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.formulas import FORMULAS, OURS, formula_of
from elbowroom.runtime.kept import Deferred

_MOST_NODES = 64  # nodes of one call: torch's own attention with dropout has 15
_SAVED = "_raw_saved_"


class Reader(NamedTuple):
    """Derivative formula by which a node uses a tensor that it has saved.

    node, number: the node's name, or that of torch's own that it stands for, and autograd's number
    of: the node itself
    """

    formula: Formula = Formula.UNKNOWN
    node: str = ""
    number: int = -1
    of: Node | None = None


def readers_of(call: Call, out: Any, wanted: Iterable[Deferred]) -> dict[int, Reader]:
    """Returns, by id, how the nodes that `call` has made read each of the wanted tensors.

    A tensor is left out if no reader is found: its node is the user's, or lies too deep.
    """
    waiting, found = {id(one) for one in wanted}, dict[int, Reader]()
    for node in _nodes_of(call, out):
        if not waiting:
            break
        name = node.name()
        for field in _fields(node, name):
            for packed in _packed(node, field):
                if id(packed) in waiting:
                    waiting.remove(id(packed))
                    known, _ = OURS.get(name, (name, field))
                    formula = formula_of(node, name, field)
                    found[id(packed)] = Reader(formula, known, node._sequence_nr(), node)
    return found


def _nodes_of(call: Call, out: Any) -> Iterator[Node]:
    """The nodes that a call has made, from its outputs down, the nearest first."""
    before = {id(x.grad_fn) for x in _tensors((*call.args, *call.kwargs.values()))}
    first = [x.grad_fn for x in _tensors((out,)) if x.grad_fn is not None]
    waiting, seen = list(dict.fromkeys(first)), set(map(id, first))
    kept: list[Node] = []  # a node that is not held passes its address on to the next one
    while waiting and len(kept) < _MOST_NODES:
        node = waiting.pop(0)
        kept.append(node)
        yield node
        for below, _ in node.next_functions:
            if below is not None and id(below) not in seen and id(below) not in before:
                seen.add(id(below))
                waiting.append(below)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from (x for x in tree_leaves(value) if isinstance(x, Tensor))


def _fields(node: Node, name: str) -> Iterable[str]:
    """The names under which a node may have saved tensors; by its attributes if no table has it."""
    if name in FORMULAS:
        return FORMULAS[name]
    return [each.removeprefix(_SAVED) for each in dir(node) if each.startswith(_SAVED)]


def held_by(node: Any) -> Iterator[Any]:
    """Yields what a node holds for backward, as hooks have packed it; nothing is unpacked."""
    for name in dir(node):
        if not name.startswith(_SAVED):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:  # backward has been there, and freed it
            continue
        for one in saved if isinstance(saved, list | tuple) else (saved,):
            if (held := getattr(one, "data", None)) is not None:
                yield held


def _packed(node: Node, field: str) -> list[Any]:
    """Returns what hooks have packed for the tensors that a node has saved under one name."""
    saved = getattr(node, _SAVED + field, None)
    each = saved if isinstance(saved, list | tuple) else [saved]
    return [getattr(one, "data", None) for one in each]
