"""Says what a compiled step may hold in codes, and in which.

A bool that backward asks for takes a byte an element, and one bit says the same; an index takes
eight, and two say the same of a dimension of 30000 (`range_of`). Floats have 8, 4 or 2 bits: of
all registered codecs that have a form for graphs, the one of that width with the least error
(`ladder`): dither with 256, 16 and 4 levels, unless a codec of another package is better. What a
function bends (exp, GELU) keeps fine codes, and what backward cannot take with an error stays exact
(`readers.py`). Which of these a step gets is chosen in `lossy.py`.
"""

import operator
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import fx

from elbowroom.codecs import Codec, Facts, Narrow, codec_class, codecs
from elbowroom.codecs.facts import NOTHING
from elbowroom.codecs.names import setting_named
from elbowroom.codecs.quality import broken_promise, quality_of
from elbowroom.compiled.collect import (
    is_view,
    known_size,
    nbytes_of,
    ops_named,
    packet_of,
    tensors_of,
)
from elbowroom.compiled.decide import is_tensor
from elbowroom.compiled.exponents import FLOOR
from elbowroom.compiled.joint import Joint, Step
from elbowroom.compiled.layouts import has_both_layouts
from elbowroom.compiled.logits import LARGEST, LEAST, MOST, AsLogit
from elbowroom.compiled.readers import Extent, ValueReading, reading_of
from elbowroom.compiled.rewrite import CodedValue, error_of
from elbowroom.compiled.steep import LIMIT

MIN_NBYTES = 32768
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)
_PAIRS = ops_named("sort topk max min kthvalue mode median nanmedian cummax cummin")
_aten = torch.ops.aten
_WIDTHS = (8, 4, 2)  # bits of codes that are weighed, half a bit of metadata not counted
_FINE = 1e-3  # squared error that a bent value may have
_MIN_AWAY = 65536  # bytes: smaller values are not worth a file


def ladder(menu: Iterable[str] | None = None) -> tuple[Codec, ...]:
    """The codecs that plans weigh, from fine to coarse: of each width the one of least error.

    menu  names of settings to choose from; None: all that are registered, but unbiased ones alone:
          an error that does not average out cannot be counted as noise
    """
    if menu is None:
        known = [one for id in codecs() for one in codec_class(id).settings() if serves(one)]
        kept = [one for one in known if not broken_promise(one)]
        known = [one for one in kept if quality_of(one, maps=True).unbiased]
    else:
        known = list(filter(serves, map(setting_named, menu)))
    found: dict[Codec, None] = {}
    for width in _WIDTHS:
        fitting = [one for one in known if quality_of(one, maps=True).bits < width + 0.5]
        found |= dict.fromkeys(sorted(fitting, key=error_of)[:1])
    if not found and known:  # all of them are wide
        found[min(known, key=error_of)] = None
    return tuple(found)


def serves(codec: Codec) -> bool:
    """Returns whether a codec can hold floats of which nothing is known, in a graph."""
    return not codec.lossless and codec.graph_form(NOTHING) is not None


def fine(codec: Codec) -> Codec | None:
    """Returns the codec, or the finest setting of it, for values that a function bends.

    None: they stay as they are.
    """
    if error_of(codec) <= _FINE:
        return codec
    finest = min(filter(serves, type(codec).settings()), key=error_of, default=None)
    return None if finest is None or error_of(finest) > _FINE else finest


def codes_of(
    joint: Joint, step: Step, codec: Codec | None, leaves: bool = False
) -> Iterator[CodedValue]:
    """The codes of one choice. codec None: exact ones only; leaves: all else goes elsewhere."""
    after = backward_of(joint, step)
    outputs = {joint.facts[n].storage for n in joint.forward_outputs}
    masks = {n for n in step.saved if may_be_coded(joint, n, (torch.bool,), outputs)}
    away = {
        n: CodedValue(n, None) for n in step.saved if leaves and _may_leave(joint, step, n, outputs)
    }
    found = list(_coded_indices(joint, step, after, outputs))
    if codec is not None:
        for one, compared in _coded_floats(joint, step, codec, outputs):
            found.append(one)
            masks.update(compared)
    held = {one.replaced for one in found}
    yield from found
    yield from (one for n, one in away.items() if n not in masks | held)
    yield from (CodedValue.mask(n) for n in sorted(masks, key=joint.place.__getitem__))


def _coded_indices(
    joint: Joint, step: Step, after: set[fx.Node], outputs: set[fx.Node]
) -> Iterator[CodedValue]:
    """Integers in as few bytes as hold their range."""
    for node in step.saved:
        if not may_be_coded(joint, node, _INTEGERS, outputs):
            continue
        known, dtype = range_of(node, after), tensors_of(node)[0].dtype
        if known is not None and Narrow().encoded_nbytes((1,), dtype, known) < dtype.itemsize:
            yield CodedValue(node, Narrow(), known)


def _coded_floats(
    joint: Joint, step: Step, codec: Codec, outputs: set[fx.Node]
) -> Iterator[tuple[CodedValue, list[fx.Node]]]:
    """Floats whose readers tolerate an error, each with the comparisons of it, as bits.

    Parts of one storage, as q, k and v may be, have codes where all of them may: its memory is free
    then.
    """
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in step.saved:
        parts.setdefault(joint.facts[node].storage, []).append(node)
    for storage, nodes in parts.items():
        if len(nodes) > 1 and sum(map(nbytes_of, nodes)) > joint.facts[storage].nbytes:
            continue
        found = [_coded_float(joint, step, n, codec, outputs) for n in nodes]
        if all(found):
            yield from (one for coded in found for one in coded)


def _coded_float(
    joint: Joint, step: Step, node: fx.Node, codec: Codec, outputs: set[fx.Node]
) -> list[tuple[CodedValue, list[fx.Node]]]:
    """The codes of one value; none where it stays as it is."""
    if not may_be_coded(joint, node, FLOATS, outputs):
        return []
    reading = reading_in(joint, step, node)
    gradients = gradients_of(joint)
    bits = [n for n in reading.compared if n not in gradients]
    if reading.use is Extent.EXACT or len(bits) < len(reading.compared):
        return []
    if not all(may_be_coded(joint, n, (torch.bool,), outputs) for n in bits):
        return []
    if reading.log_probabilities or reading.saturated or reading.slope:
        instead = _coded_instead(joint, node, reading, codec, outputs)
        return [(one, bits) for one in instead]
    chosen = fine(codec) if reading.use is Extent.CURVED else codec
    if chosen is None or not takes(chosen, tensors_of(node)[0]):
        return []
    if reading.is_probability and tensors_of(node)[0].dtype is torch.float32:
        logit = AsLogit.PROBABILITY
        return [(CodedValue(node, chosen, floor=LEAST, ceiling=MOST, as_logit=logit), bits)]
    return [(CodedValue(node, chosen), bits)]


def _coded_instead(
    joint: Joint, value: fx.Node, reading: ValueReading, codec: Codec, outputs: set[fx.Node]
) -> list[CodedValue]:
    """Codes of what stands in for a value, as log-probabilities do for logits.

    None where one of them may have none.
    """
    chosen = fine(codec)
    nodes = reading.log_probabilities or reading.saturated or reading.slope
    floor = FLOOR if reading.log_probabilities else -LIMIT if reading.saturated else None
    ceiling = LIMIT if reading.saturated else None
    logit = None
    if reading.log_probabilities and all(tensors_of(n)[0].dtype is torch.float32 for n in nodes):
        logit, ceiling = AsLogit.LOGARITHM, LARGEST
    if chosen is None or not all(may_be_coded(joint, n, FLOATS, outputs) for n in nodes):
        return []
    if not all(takes(chosen, tensors_of(n)[0]) for n in nodes):
        return []
    return [
        CodedValue(n, chosen, floor=floor, ceiling=ceiling, source=value, as_logit=logit)
        for n in nodes
    ]


def backward_of(joint: Joint, step: Step) -> set[fx.Node]:
    """The nodes that backward of a step computes."""
    return joint.once(("backward", step.saved), lambda: joint.parts(step.saved)[1])


def gradients_of(joint: Joint) -> set[fx.Node]:
    """The nodes that depend on a gradient."""
    return joint.once("gradients", joint.gradients)


def reading_in(joint: Joint, step: Step, node: fx.Node) -> ValueReading:
    """This says what the backward of a step does with a value that it saves."""

    def find() -> ValueReading:
        return reading_of(node, backward_of(joint, step), gradients_of(joint))

    return joint.once(("reading", step.saved, node), find)


def takes(codec: Codec, value: torch.Tensor) -> bool:
    """Returns whether a codec holds values of this dtype and size in a graph, in fewer bytes."""
    form = codec.graph_form(NOTHING)
    if form is None or value.dtype not in codec.dtypes:
        return False
    if not form.any_size and any(isinstance(size, torch.SymInt) for size in value.shape):
        return False
    shape = tuple(map(known_size, value.shape))
    return _encoded_nbytes(codec, shape, value.dtype) < prod(shape) * value.dtype.itemsize


def may_be_coded(
    joint: Joint, node: fx.Node, dtypes: tuple[torch.dtype, ...], outputs: set[fx.Node]
) -> bool:
    """Returns whether a code of a saved value frees its memory; that of inputs is the caller's."""
    storage = joint.facts[node].storage
    if not is_tensor(node) or node.op != "call_function" or storage in outputs | joint.outside:
        return False
    value = tensors_of(node)[0]
    if value.dtype not in dtypes or any(map(_is_unknown, value.shape)):
        return False
    return known_size(value.numel()) * value.dtype.itemsize >= MIN_NBYTES // (
        1 if value.dtype.is_floating_point else 4
    )


def _may_leave(joint: Joint, step: Step, node: fx.Node, outputs: set[fx.Node]) -> bool:
    """Returns whether a saved value may go elsewhere, and its memory is free once it has gone."""
    storage = joint.facts[node].storage
    if not is_tensor(node) or node.op != "call_function" or storage in outputs | joint.outside:
        return False
    value = tensors_of(node)[0]
    if any(map(_is_unknown, value.shape)) or (joint.is_channels_last and has_both_layouts(value)):
        return False
    views = sum(joint.facts[n].storage is storage for n in step.saved)
    nbytes = known_size(value.numel()) * value.dtype.itemsize
    return views == 1 and _MIN_AWAY <= nbytes <= joint.facts[storage].nbytes


def _is_unknown(size: int | torch.SymInt) -> bool:
    """Returns whether a size is known only when the program runs, as after `nonzero`."""
    return isinstance(size, torch.SymInt) and getattr(size.node, "hint", None) is None


@lru_cache(maxsize=4096)
def _encoded_nbytes(
    codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, facts: Facts = NOTHING
) -> int:
    return codec.encoded_nbytes(shape, dtype, facts)


def held_nbytes_of(one: CodedValue) -> int:
    """Bytes of the buffers of a code."""
    if one.codec is None:
        return 0
    value = tensors_of(one.node)[0]
    return _encoded_nbytes(one.codec, tuple(map(known_size, value.shape)), value.dtype, one.facts)


def plain_nbytes_of(one: CodedValue) -> int:
    """The bytes that eager PyTorch would hold: a comparison counts as its operand."""
    value = tensors_of(one.node)[0]
    itemsize = 4 if value.dtype is torch.bool else value.dtype.itemsize
    return known_size(value.numel()) * itemsize


def range_of(node: fx.Node, after: Collection[fx.Node]) -> Facts | None:
    """Returns the range of the elements of an integer value, where it is known.

        made by    argmax, argmin, sort, topk, max, min... over a dimension of size n    0 to n - 1
        read by    index, gather, scatter, embeddings, over a dimension of size n        -n to n - 1

    An index out of that range is an error of the program in forward. Where other ops read it in
    backward, or compute it, nothing is known, and it stays as it is.

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
        is_place = packet_of(source) in _PAIRS
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
