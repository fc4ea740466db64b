"""Finds integers whose range the graph tells: indices, which fit into fewer bytes.

    made by    argmax, argmin, sort, topk, max, min... over a dimension of size n    0 to n - 1
    read by    index, gather, scatter, embeddings, over a dimension of size n        -n to n - 1

An index out of that range is an error of the program in forward. Where other ops read it in
backward, or compute it, nothing is known, and it stays as it is.
"""

import operator
from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import fx

from elbowroom.codecs import Facts
from elbowroom.compiled.collect import is_view, ops_named, packet_of

_aten = torch.ops.aten


def range_of(node: fx.Node, after: Collection[fx.Node]) -> Facts | None:
    """Returns the range of the elements of an integer value, where it is known.

    after: what backward computes
    """
    size = _made_over(node)
    if size is not None:
        return Facts(smallest=0, largest=max(size - 1, 0))
    size = _read_over(node, after)
    return None if size is None else Facts(smallest=-size, largest=max(size - 1, 0))


def _made_over(node: fx.Node) -> int | None:
    """The size of the dimension whose places an op has returned, seen through views and copies."""
    while is_view(node) or packet_of(node) in (_aten.clone, _aten.expand):
        node = node.all_input_nodes[0]
    source, is_place = node, packet_of(node) in (_aten.argmax, _aten.argmin, _aten.argsort)
    if node.target is operator.getitem and node.args[1] == 1:
        source = node.all_input_nodes[0]
        is_place = packet_of(source) in _pairs()
    over = source.args[1] if is_place and len(source.args) > 1 else None
    if not is_place or (over is None and source is node):  # of all elements, as if in one row
        return None
    return _largest(source.all_input_nodes[0].meta.get("val"))


def _read_over(node: fx.Node, after: Collection[fx.Node]) -> int | None:
    """The largest dimension that backward indexes by a value, if it does nothing else with it."""
    largest, pending, seen = None, [node], {node}
    while pending:
        one = pending.pop()
        for reader in one.users:
            if reader not in after or reader in seen:
                continue
            seen.add(reader)
            if is_view(reader) or packet_of(reader) is _aten.clone:
                pending.append(reader)
                continue
            size = _indexed(reader, one)
            if size is None:
                return None
            largest = max(size, largest or 0)
    return largest


def _indexed(reader: fx.Node, index: fx.Node) -> int | None:
    """The size of what a reader indexes; None: it reads the value in another way, too."""
    packet, args = packet_of(reader), reader.args
    if packet is _aten.embedding_dense_backward:
        is_alone = args[1] is index and args[0] is not index
        return args[2] if is_alone and isinstance(args[2], int) else None
    if packet in (_aten.index, _aten.index_put, _aten._unsafe_index, _aten._unsafe_index_put):
        given: Any = args[1]
        others = [a for at, a in enumerate(args) if at != 1]
    elif packet in (_aten.gather, _aten.scatter, _aten.scatter_add, _aten.index_select):
        given, others = [args[2]], [args[0], *args[3:]]
    else:
        return None
    if index not in given or index in others or not isinstance(args[0], fx.Node):
        return None
    return _largest(args[0].meta.get("val"))


def _largest(value: Any) -> int | None:
    """The largest size of a tensor, if all of them are known: whatever dimension is meant."""
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return None
    return max([value.numel() if value.dim() == 0 else 0, *map(int, value.shape)])


@cache
def _pairs() -> frozenset[Any]:
    return ops_named("sort topk max min kthvalue mode median nanmedian cummax cummin")
