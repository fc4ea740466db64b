"""Finds which arguments of exponentials tolerate a code, where backward computes these again.

The error of a code follows the range of the values around it, and exp makes a relative error of
it, which is of any size. Two kinds of arguments need more than a fine code:

    exp(u + v)    what is left of a difference, as the squared distance |x|^2 - 2 x y + |y|^2 in a
                  Gaussian: a gradient passes where it is small, however large u and v are. All
                  that it is computed again from stays exact
    exp(x - l)    the probabilities of a softmax, l = log(sum(exp(x))), whose largest x matter. The
                  log-probabilities themselves have the code, in place of x: they are never
                  above 0, and below `FLOOR` they are as good as there

So do scores of which softmax is computed again, less their maximum: the sum that it divides by is
that of the exact ones. Other functions that are steep are in `steep.py`.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx

from elbowroom.compiled.collect import is_view, ops_named, packet_of, reached, tensors_of

FLOOR = -24.0  # of log-probabilities: exp(-24) is 4e-11
COMPARISONS = ops_named("eq ne le lt ge gt sign isnan isinf")
MAX_NODES = 32  # of one walk along the ops around a value
_aten = torch.ops.aten
_ADDED_PRODUCTS = ops_named("addmm baddbmm")
PRODUCTS = _ADDED_PRODUCTS | ops_named("mm bmm convolution")  # of matrices or maps
EXPONENTIALS = ops_named("exp exp2 expm1")
SUMS = ops_named("add sub rsub")
# Of which each result is a multiple, a sum or a copy of what they read.
LINEAR = ops_named("mul div neg sum mean where relu clamp_min clone expand cat") | {
    torch.ops.prims.convert_element_type
}


def exponents_of(
    value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> list[fx.Node]:
    """The arguments of exponentials that backward computes from a value, without their views."""
    return arguments_of(value, after, gradients, is_exponential)


def compared_of(
    value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> list[fx.Node]:
    """The comparisons that backward reads of a value and of what it computes from it."""
    found = computed_from([value], after, gradients)
    return [n for n in found if packet_of(n) in COMPARISONS]


def arguments_of(
    value: fx.Node,
    after: Collection[fx.Node],
    gradients: Collection[fx.Node],
    takes: Callable[[fx.Node, fx.Node], bool],
) -> list[fx.Node]:
    """Returns what certain readers take, of all that backward computes from a value."""
    found: dict[fx.Node, None] = {}
    for node in computed_from([value], after, gradients):
        if any(user in after and takes(user, node) for user in node.users):
            found[source_of(node)] = None
    return list(found)


def is_enough(
    value: fx.Node,
    saved: Collection[fx.Node],
    after: Collection[fx.Node],
    gradients: Collection[fx.Node],
    takes: Callable[[fx.Node, fx.Node], bool],
    compared: Collection[fx.Node] = (),
) -> bool:
    """Returns whether all that backward computes from a value are functions of `saved`.

    takes     whether a reader of a node is such a function: `is_exponential`, `saturates`
    compared  comparisons of the value, which are held besides
    """
    stops = {*saved, *compared}
    for node in computed_from([value], after, gradients, stops):
        if node not in stops and any(n in after and n in gradients for n in node.users):
            return False
    for node in _viewed(saved):
        readers = [n for n in node.users if n in after and n not in stops and not is_view(n)]
        if not all(takes(reader, node) for reader in readers):
            return False
    return True


def is_difference(exponent: fx.Node) -> bool:
    """Returns whether the argument of an exponential is a sum of two values that may cancel.

    Parts that an input alone adds, as a bias, do not count.
    """
    pending, seen = [exponent], {exponent}
    while pending and len(seen) <= MAX_NODES:
        node = pending.pop()
        packet = packet_of(node)
        if packet in PRODUCTS:
            if packet in _ADDED_PRODUCTS and varies(node.args[0]):
                return True
            continue
        if packet in SUMS:
            terms = {source_of(n) for n in node.all_input_nodes if varies(n)}
            if len(terms) > 1:
                return True
        elif not (is_view(node) or packet in LINEAR):
            continue
        new = set(node.all_input_nodes) - seen
        seen |= new
        pending += new
    return False


def is_log_probability(exponent: fx.Node) -> bool:
    """Returns whether a value is x - log(sum(exp(x))), as log-softmax and log-sum-exp write it."""
    if packet_of(exponent) is not _aten.sub:
        return False
    left, right = (one if isinstance(one, fx.Node) else None for one in exponent.args[:2])
    if left is None or right is None:
        return False
    left, right = source_of(left), source_of(right)
    parts = right.all_input_nodes if packet_of(right) is _aten.add else [right]
    for log in map(source_of, parts):
        below = log
        for packet in (_aten.log, _aten.sum, _aten.exp):
            if packet_of(below) is not packet:
                break
            below = source_of(below.all_input_nodes[0])
        else:  # what is summed may have had its maximum subtracted, which is then added again
            is_shifted = right is not log and packet_of(below) is _aten.sub
            if left is (source_of(below.all_input_nodes[0]) if is_shifted else below):
                return True
    return False


def is_probability(value: fx.Node) -> bool:
    """Returns whether a value is exp of a log-probability: its gradient has it twice, in a sum."""
    source = source_of(value)
    is_raised = packet_of(source) in EXPONENTIALS
    return is_raised and any(is_log_probability(source_of(n)) for n in source.all_input_nodes)


def computed_from(
    values: Iterable[fx.Node],
    after: Collection[fx.Node],
    gradients: Collection[fx.Node],
    stops: Collection[fx.Node] = (),
) -> list[fx.Node]:
    """Returns the values, and what backward computes from them without a gradient."""

    def read(node: fx.Node) -> list[fx.Node]:
        if node in stops:
            return []
        return [reader for reader in node.users if reader in after and reader not in gradients]

    return list(reached(values, read))


def _viewed(values: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns the values and their views."""
    return list(reached(values, lambda node: filter(is_view, node.users)))


def source_of(node: fx.Node) -> fx.Node:
    """Returns the value that a view was made of, or the value itself."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_exponential(reader: fx.Node, node: fx.Node) -> bool:
    """Returns whether a reader raises something to the power of a node."""
    packet = packet_of(reader)
    return packet is _aten.exp or (packet is _aten.pow and node in reader.args[1:])


def varies(value: Any) -> bool:
    """Returns whether a value was computed from others, rather than given, constant or a size."""
    if not isinstance(value, fx.Node) or not tensors_of(value):
        return False
    source = source_of(value)
    return source.op == "call_function" and bool(source.all_input_nodes)
