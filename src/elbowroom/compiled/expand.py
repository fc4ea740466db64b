"""Codes of compiled graphs in place of the ops of `ops.py`: written out, where Inductor fuses them.

Inductor cannot fuse across a call of our kernels: it stores their inputs and their results. On a
GPU its own loops are as fast, so `expand` puts what a codec declares as `written` into a graph
before it is compiled (`codecs/graph_form.py`, `kernels/aten.py`). On a CPU loops cost more than our
kernels, and the ops stay. So they do for sizes that are symbols, and for codecs without such a
form.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from elbowroom.codecs.graph_form import Written
from elbowroom.compiled import ops
from elbowroom.kernels import aten


def expand(gm: fx.GraphModule, device: str = "cuda") -> int:
    """Writes out all codes whose tensors are on such a device; returns how many ops.

    What many layers have is traced once: but for its seed, it is the same for all.
    """
    traced: dict[str, fx.GraphModule] = {}
    count = 0
    for node in list(gm.graph.nodes):
        if node.target not in _FORMS or _device_of(node) != device:
            continue
        found = _FORMS[node.target](node)
        if found is None:
            continue
        work, *settings = found
        given = [_mixed_later(node, a) for a in node.all_input_nodes]
        values = [a.meta["val"] for a in given]
        lies = [(v.shape, v.stride(), v.dtype) for v in values]
        key = str((node.target, settings, lies))
        if key not in traced:
            traced[key] = _traced(work, values)
        _inline(gm.graph, node, traced[key], given)
        count += 1
    if count:
        gm.graph.lint()
        gm.recompile()
    return count


def _traced(work: Callable[..., Any], values: list[Any]) -> fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with next(v.fake_mode for v in values if isinstance(v, FakeTensor)):
        found: fx.GraphModule = make_fx(work, decomposition_table=select_decomp_table())(*values)
    found.graph.eliminate_dead_code()
    return found


def _mixed_later(node: fx.Node, given: fx.Node) -> fx.Node:
    """Adds the number of a code to the seed, which a traced form then mixes."""
    seed, number = node.args[_SEED[node.target] : _SEED[node.target] + 2]
    if given is not seed:
        return given
    assert isinstance(number, int)
    graph, added = node.graph, aten.offset_of(number)
    with graph.inserting_before(node):
        own = graph.call_function(torch.ops.aten.add.Tensor, (seed, added))
    own.meta = {"val": given.meta["val"]}
    return own


def _encoding(node: fx.Node) -> tuple[Any, ...] | None:
    """Encoding as a function of a value and, where there is one, a seed; and its settings."""
    args: Any = node.args
    x, order, coding, _, _ = args
    written = _written(coding, x.meta["val"].shape, order)
    if written is None:
        return None

    def encode(x: Tensor, *seed: Tensor) -> list[Tensor]:
        return list(written[0](x.permute(list(order)).reshape(-1), _own(seed)))

    return encode, coding, order


def _decoding(node: fx.Node) -> tuple[Any, ...] | None:
    """Decode as a function of buffers and, where there is one, a seed; and its settings."""
    args: Any = node.args
    buffers, coding, _, _, size, order, dtype = args
    written = _written(coding, size, order)
    if written is None:
        return None
    back = [list(order).index(d) for d in range(len(order))]

    def decode(*given: Tensor) -> Tensor:
        seed = _own(given[len(buffers) :])
        flat = written[1](given[: len(buffers)], seed, prod(size), dtype)
        return flat.reshape([size[d] for d in order]).permute(back)

    return decode, coding, size, order, dtype


def _written(coding: str, size: Sequence[Any], order: Sequence[int]) -> Written | None:
    """The form of a coding in aten ops, for sizes that are known."""
    if not all(isinstance(length, int) for length in size):
        return None
    return ops.form_of(coding, size, order).written


def _own(seed: tuple[Tensor, ...]) -> Tensor:
    """The seed of one code; codes without noise have none, and read none."""
    return aten.mixed(seed[0]) if seed else torch.empty(0)


def _inline(graph: fx.Graph, node: fx.Node, traced: fx.GraphModule, given: list[fx.Node]) -> None:
    """Put the nodes of a traced form in the place of a call."""
    known: dict[fx.Node, Any] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), given, strict=True)
    )
    with graph.inserting_before(node):
        for one in traced.graph.nodes:
            if one.op == "call_function":
                known[one] = graph.node_copy(one, known.__getitem__)
    results = traced.graph.output_node().args[0]
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(known[results])
        graph.erase_node(node)
        return
    for part in list(node.users):
        part.replace_all_uses_with(known[results[part.args[1]]])  # type: ignore[index]
        graph.erase_node(part)
    graph.erase_node(node)


def _device_of(node: fx.Node) -> str:
    return str(node.all_input_nodes[0].meta["val"].device.type)


_FORMS: dict[Any, Callable[[fx.Node], tuple[Any, ...] | None]] = {
    ops.ENCODE: _encoding,
    ops.DECODE: _decoding,
}
_SEED = {ops.ENCODE: 3, ops.DECODE: 2}  # the index of the seed, before its number
