"""Sums that Inductor computes together with a product, and when that holds memory.

    add(mm(a, b), c)   -->   addmm(c, a, b)         Inductor's form of it after partitioning
                       -->   sub(c, neg(mm(a, b)))  unchanged by Inductor: the same sum

Inductor writes every such pair as one library call, which runs at the position of the sum. The
gradient of a weight that is tied to an embedding is such a sum: its product is known at the
beginning of backward, the embedding's part at the end, and between the two the operands of the
product are alive, which are the gradient of all logits and the last hidden state.

`fuse` rewrites a joint graph as it will run, so that it is judged correctly. `split` takes the
products of backward apart where it may change a rounding: a library accumulates block by block, and
may round differently from a sum after the product.
"""

from collections.abc import Collection

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
_MARK = "elbowroom_sum"  # in the meta of a node: PyTorch copies graphs between `fuse` and `split`


def fuse(graph: fx.Graph) -> None:
    """Writes each sum of a product and something else as Inductor will."""
    for node in reversed(list(graph.nodes)):
        if node.target is not _aten.add.Tensor or node.kwargs or _prefers_loops(node):
            continue
        for product, other in (
            node.args[1::-1],
            node.args[:2],
        ):  # of two, Inductor joins the second
            if _is_taken(node, product, other):
                with graph.inserting_before(node):
                    one = graph.call_function(_aten.addmm.default, (other, *product.args))
                one.meta = {**node.meta, _MARK: True}
                node.replace_all_uses_with(one)
                graph.erase_node(node)
                graph.erase_node(product)
                break


def joined(graph: fx.Graph, among: Collection[fx.Node]) -> list[fx.Node]:
    """Returns the calls that `fuse` wrote, of these nodes."""
    return [n for n in graph.nodes if n in among and n.meta.get(_MARK)]


def split(graph: fx.Graph, among: Collection[fx.Node]) -> list[fx.Node]:
    """Split the calls that `fuse` wrote, so that Inductor does not join them; return the new nodes.

    among  only these. Each product is placed where both of its operands are known.
    """
    made: list[fx.Node] = []
    place = {one: at for at, one in enumerate(graph.nodes)}
    for node in joined(graph, among):
        other, *operands = node.args
        latest = max((n for n in operands if isinstance(n, fx.Node)), key=place.__getitem__)
        meta = {key: value for key, value in node.meta.items() if key != _MARK}
        if latest.op == "placeholder":
            latest = next(iter(reversed(graph.find_nodes(op="placeholder"))))
        with graph.inserting_after(latest):
            product = graph.call_function(_aten.mm.default, tuple(operands))
        with graph.inserting_before(node):
            negative = graph.call_function(_aten.neg.default, (product,))
            total = graph.call_function(_aten.sub.Tensor, (other, negative))
        for one in (product, negative, total):
            one.meta = dict(meta)
            made.append(one)
        place[total] = place[node]  # an operand of a later one, where backward walks through time
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    return made


def _is_taken(total: fx.Node, product: object, other: object) -> bool:
    """Returns whether Inductor joins a sum and a product (its `is_valid_addmm_fusion`)."""
    if not isinstance(product, fx.Node) or not isinstance(other, fx.Node):
        return False
    if product.target is not _aten.mm.default or len(product.users) != 1 or product is other:
        return False
    added, value = other.meta.get("val"), product.meta["val"]
    if not isinstance(added, Tensor) or added.dtype != value.dtype:
        return False
    if product.meta.get("recompute") != total.meta.get("recompute"):
        return False
    return bool(torch._prims_common.is_expandable_to(added.shape, value.shape))


def _prefers_loops(total: fx.Node) -> bool:
    """Returns whether a sum is fused with its readers, as on a GPU where all of them are loops."""
    from torch._inductor.utils import is_gpu, is_pointwise_use

    device = total.meta["val"].device.type
    return is_gpu(device) and all(is_pointwise_use(use) for use in total.users)
