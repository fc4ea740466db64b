"""Reads a joint graph: the bytes that each of its ops computes, and its kind of work.

AOTAutograd gives one graph of forward and backward together, whose nodes carry fake tensors. They
contain everything that a decision needs: the storage of a node's value (a view has that of its
source), its bytes, and how Inductor treats the op:

    given      an input of the graph
    view       no memory, no work
    pointwise  fused into its readers where that is cheap, else stored
    reduction  stored; fused with readers that run over the same elements
    extern     a call into a library (matmul, convolution, attention): reads and writes memory

Sizes that depend on symbols are counted at the sizes of the call that is compiled.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from elbowroom.kernels import attention

_UNKNOWN = 4096  # assumed elements of a size that is unknown before the program runs
_aten = torch.ops.aten
_prims = torch.ops.prims
_NHWC = [0, 2, 3, 1]  # the dimensions of a map with channels last, outermost first
_FEW = 64  # nodes behind a value
_STEP = 16  # of channels in weights that convolutions reorder
_SCRATCH = 8192  # bytes that a convolution takes besides
# By op, how many copies it makes of which argument.
_COPIES_OF = {_aten.convolution: (1, 1), _aten.convolution_backward: (2, 2)}


class Kind(Enum):
    """Way in which the compiler treats an op."""

    GIVEN = auto()
    VIEW = auto()
    POINTWISE = auto()
    REDUCTION = auto()
    EXTERN = auto()


@dataclass(frozen=True)
class NodeFacts:
    """Facts about a node.

    storage    the node whose memory its value lies in: itself, but for a view
    inputs     the nodes that it reads
    nbytes     size of that memory, if the node is the one that makes it; else 0
    elements   number that the op loops over: of its output, or of what a reduction reads
    blocks     whether readers over the same elements cannot be fused with it
    is_heavy   whether it costs more than the memory that it moves: exp and the like
    workspace  bytes that a library call takes while it runs
    """

    kind: Kind
    storage: fx.Node
    nbytes: int
    elements: int
    blocks: bool = False
    is_heavy: bool = False
    workspace: int = 0
    inputs: tuple[fx.Node, ...] = ()


def facts_of(
    graph: fx.Graph, before: Mapping[fx.Node, NodeFacts] | None = None
) -> dict[fx.Node, NodeFacts]:
    """The facts of all nodes of a graph that compute or hold a tensor.

    before: facts of nodes that have the same value still; only where it lies is looked up again
    """
    found: dict[fx.Node, NodeFacts] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        fact = before.get(node) if before is not None else None
        fact = _facts(node, found) if fact is None else fact
        inputs = tuple(node.all_input_nodes)
        storage = fact.storage
        if fact.kind is Kind.VIEW:
            storage = next(found[n].storage for n in inputs if n in found)
        if inputs != fact.inputs or storage is not fact.storage:
            fact = replace(fact, inputs=inputs, storage=storage)
        found[node] = fact
    return found


def _facts(node: fx.Node, known: dict[fx.Node, NodeFacts]) -> NodeFacts:
    nbytes, elements = nbytes_of(node), elements_of(node)
    if node.op != "call_function":
        return NodeFacts(Kind.GIVEN, node, nbytes, elements)
    if node.target is operator.getitem:
        source = node.args[0]
        made = known.get(source) if isinstance(source, fx.Node) else None
        if made is None or made.kind is Kind.EXTERN:
            return NodeFacts(Kind.EXTERN, node, nbytes, elements)
        if made.kind is Kind.VIEW:
            return NodeFacts(Kind.VIEW, made.storage, 0, elements)
        return NodeFacts(made.kind, node, nbytes, made.elements, made.blocks)
    if is_view(node):
        source = next((n for n in node.all_input_nodes if n in known), None)
        if source is not None:
            return NodeFacts(Kind.VIEW, known[source].storage, 0, elements)
    kind = _kind(node)
    if is_away(node):
        return NodeFacts(kind, node, 0, elements)
    if kind is Kind.REDUCTION:
        read = max((elements_of(n) for n in node.all_input_nodes), default=elements)
        return NodeFacts(kind, node, nbytes, read, not _reduces_rows(node))
    return NodeFacts(
        kind,
        node,
        nbytes,
        elements,
        is_heavy=packet_of(node) in _HEAVY,
        workspace=workspace_of(node) if kind is Kind.EXTERN else 0,
    )


def _kind(node: fx.Node) -> Kind:
    packet = packet_of(node)
    if packet in _reductions():
        return Kind.REDUCTION
    tags: Iterable[Any] = getattr(node.target, "tags", ())
    if torch.Tag.pointwise in tags or packet in _fused():
        return Kind.POINTWISE
    return Kind.POINTWISE if not isinstance(_value(node), Tensor | tuple | list) else Kind.EXTERN


def packet_of(node: fx.Node) -> Any:
    """The op that a node calls, whichever of its overloads; for other nodes their target."""
    return getattr(node.target, "overloadpacket", node.target)


def reached(
    starts: Iterable[fx.Node],
    beyond: Callable[[fx.Node], Iterable[fx.Node]],
    most: int | None = None,
) -> dict[fx.Node, None]:
    """Walks a graph: returns the nodes where it starts, and all that are found from these.

    beyond  the nodes that are found from a node
    most    the walk ends once it has found more than this; None: at the end
    """
    found = dict.fromkeys(starts)
    pending = list(found)
    while pending and (most is None or len(found) <= most):
        for node in beyond(pending.pop()):
            if node not in found:
                found[node] = None
                pending.append(node)
    return found


def ops_named(names: str) -> frozenset[Any]:
    """The ops of aten with these names, which spaces separate, as far as this torch has them."""
    return frozenset(getattr(_aten, name) for name in names.split() if hasattr(_aten, name))


# Ops so slow on a CPU that Inductor stores results with several readers.
_HEAVY = ops_named("exp expm1 log log10 log1p log2 sigmoid tanh silu gelu softplus logit")


def is_reduction(node: fx.Node) -> bool:
    """Returns whether the op combines many elements into one."""
    return packet_of(node) in _reductions()


def is_away(node: fx.Node) -> bool:
    """Returns whether the op's result lies in a memory that no peak counts."""
    return str(node.target) == "elbowroom_graph.offload.default"


def is_view(node: fx.Node) -> bool:
    """Returns whether the op returns a view of its input, without work."""
    packet = packet_of(node)
    if packet in (_aten._unsafe_view, _aten.reshape, _aten.lift_fresh):
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return False
    return all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _reduces_rows(node: fx.Node) -> bool:
    """Returns whether the last dimensions are reduced, so that readers fit into the same loop."""
    if node.target is operator.getitem:
        return False
    source = _value(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    dims = node.args[1] if len(node.args) > 1 else None
    if not isinstance(source, Tensor) or dims is None:
        return False
    given = dims if isinstance(dims, (list, tuple)) else [dims]
    if not all(isinstance(d, int) for d in given) or not given or source.dim() == 0:
        return False
    reduced = {d % source.dim() for d in given if isinstance(d, int)}
    return reduced == set(range(source.dim() - len(reduced), source.dim()))


def workspace_of(node: fx.Node) -> int:
    """Returns the bytes that a library call takes on a CPU beside what it returns.

    The figures were read off the allocator.

    A convolution takes a reordered weight in forward, and two of its size in backward, with its
    channels in steps of 16, and a page or two besides. Flash
    attention takes, for each thread, its tiles of scores: one in forward, two in backward.
    """
    packet = packet_of(node)
    if any(t.device.type != "cpu" for t in tensors_of(node)):
        return 0
    times, at = _COPIES_OF.get(packet, (0, 0))
    source = node.args[at] if times else None
    if isinstance(source, fx.Node):
        rows, columns, *_ = map(known_size, source.meta["val"].shape)
        each = nbytes_of(source) / max(rows, 1)
        padded = int(each * _in_steps(rows))
        if times == 1:
            return padded + _SCRATCH
        turned = int(nbytes_of(source) / max(columns, 1) * _in_steps(columns))
        return max(times * padded, turned + _SCRATCH)
    if str(packet) == "elbowroom_graph.encode":
        encoded, order, *_ = node.args
        assert isinstance(encoded, fx.Node)
        assert isinstance(order, Sequence)
        lies = _lies_in_order(encoded, order) or (list(order) == _NHWC and _is_map(encoded))
        return 0 if lies else nbytes_of(encoded)  # a copy
    if str(packet) == "elbowroom_graph.attention_backward":
        values = [one.meta["val"] for one in node.args[2:4]]  # type: ignore[union-attr]
        k, v = ([known_size(size) for size in x.shape] for x in values)
        return attention.workspace_nbytes(k, v)
    tiles, at = _tiles_of().get(packet, (0, 0))
    query, key = node.args[at : at + 2] if tiles else (None, None)
    if not isinstance(query, fx.Node) or not isinstance(key, fx.Node):
        return 0
    rows, columns = (known_size(n.meta["val"].shape[2]) for n in (query, key))
    rows = min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32)
    return 4 * tiles * rows * min(columns, 512) * torch.get_num_threads()


def _in_steps(channels: int) -> int:
    """Returns the number of channels for which a convolution reorders its weight."""
    return -(-channels // _STEP) * _STEP


def _is_map(node: fx.Node) -> bool:
    """Returns whether loops make a value of maps, which convolutions give with channels last."""
    return any(
        packet_of(n) in _COPIES_OF
        for n in reached([node], lambda n: [] if is_view(n) else n.all_input_nodes, _FEW)
    )


def _lies_in_order(x: fx.Node, order: Sequence[Any]) -> bool:
    """Returns whether the elements of a value, in the order of these dimensions, are a run."""
    value, step = x.meta["val"], 1
    for dim in reversed(order):
        if value.shape[dim] != 1 and known_size(value.stride(dim)) != step:
            return False
        step *= known_size(value.shape[dim])
    return True


@cache
def _tiles_of() -> dict[Any, tuple[int, int]]:
    """Returns, by op, how many tiles of scores it makes, and the index of its query.

    The key comes after the query.
    """
    name = "_scaled_dot_product_flash_attention_for_cpu"
    found = (
        (getattr(_aten, name, None), (1, 0)),
        (getattr(_aten, name + "_backward", None), (2, 1)),
    )
    return {op: given for op, given in found if op is not None}


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The (fake) tensors of a node's value."""
    return [leaf for leaf in pytree.tree_leaves(_value(node)) if isinstance(leaf, Tensor)]


def elements_of(node: fx.Node) -> int:
    """Returns the number of elements of the node's largest tensor."""
    return max((known_size(x.numel()) for x in tensors_of(node)), default=1)


def nbytes_of(node: fx.Node) -> int:
    """The bytes of the tensors of a node's value."""
    return sum(known_size(x.numel()) * x.dtype.itemsize for x in tensors_of(node))


def known_size(size: Any) -> int:
    """A number of elements as an int: a symbol counts with its value in the compiled call."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else _UNKNOWN


@cache
def _reductions() -> frozenset[Any]:
    names = "sum mean amax amin max min var var_mean std any all prod argmax argmin _softmax"
    names += " _log_softmax cumsum logsumexp linalg_vector_norm"
    prims = "var sum prepare_softmax_online xor_sum"
    return ops_named(names).union(getattr(_prims, n) for n in prims.split() if hasattr(_prims, n))


@cache
def _fused() -> frozenset[Any]:
    from torch._functorch.partitioners import get_default_op_list

    own = [_aten.embedding, _aten.slice_scatter, _aten.select_scatter, _aten.constant_pad_nd]
    own += [_aten.cat, _aten.rand, _aten.randn, _aten.slice, _aten.copy, _aten.copy_]
    own += [
        getattr(_prims, n)
        for n in ("inductor_random", "inductor_lookup_seed")
        if hasattr(_prims, n)
    ]
    return frozenset([*get_default_op_list().fusible_ops, *own])
