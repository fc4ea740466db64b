"""Exponentials that backward computes again, and what of their arguments tolerates a code.

The error of a code follows the range of the values around it, and exp makes a relative error of
it, which is of any size. Two kinds of arguments need more than a fine code:

    exp(u + v)    what is left of a difference, as the squared distance |x|^2 - 2 x y + |y|^2 in a
                  Gaussian: a gradient passes where it is small, however large u and v are. All
                  that it is computed again from stays exact
    exp(x - l)    the probabilities of a softmax, l = log(sum(exp(x))), whose largest x matter. The
                  log-probabilities themselves have the code, in place of x: they are never
                  above 0, and below `FLOOR` they are as good as there

So do scores of which softmax is computed again, less their maximum: the sum that it divides by is
that of the exact ones. An exponential of one product, or of a square, is computed again from a fine
code.

Sigmoid and tanh no longer change far from 0. Where backward needs nothing else of a value but
comparisons, the argument of these has the code in place of it, inside of `-LIMIT` and `LIMIT`: one
argument of 200 would leave few levels for those near 0, where the gradient passes.
"""

from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

from elbowroom.compiled.collect import is_view, ops_named, packet_of

FLOOR = -24.0  # of log-probabilities: exp(-24) is 4e-11
LIMIT = 24.0  # of what sigmoid or tanh reads: sigmoid(-24) is 4e-11
COMPARISONS = ops_named("eq ne le lt ge gt sign isnan isinf")
_MOST_NODES = 32
_aten = torch.ops.aten


def exponents_of(
    value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> list[fx.Node]:
    """The arguments of exponentials that backward computes from a value, without their views."""
    return _arguments_of(value, after, gradients, is_exponential)


def compared_of(
    value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> list[fx.Node]:
    """The comparisons that backward reads of a value and of what it computes from it."""
    found = _computed_from([value], after, gradients)
    return [n for n in found if packet_of(n) in COMPARISONS]


def saturated_of(
    value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> list[fx.Node]:
    """The arguments of sigmoids and tanhs that backward computes from a value, likewise."""
    return _arguments_of(value, after, gradients, saturates)


def _arguments_of(
    value: fx.Node,
    after: Collection[fx.Node],
    gradients: Collection[fx.Node],
    takes: Callable[[fx.Node, fx.Node], bool],
) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    for node in _computed_from([value], after, gradients):
        if any(user in after and takes(user, node) for user in node.users):
            found[_source(node)] = None
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
    for node in _computed_from([value], after, gradients, stops):
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
    while pending and len(seen) <= _MOST_NODES:
        node = pending.pop()
        packet = packet_of(node)
        if packet in _products():
            if packet in _added_products() and _varies(node.args[0]):
                return True
            continue
        if packet in _sums():
            terms = {_source(n) for n in node.all_input_nodes if _varies(n)}
            if len(terms) > 1:
                return True
        elif not (is_view(node) or packet in _linear()):
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
    left, right = _source(left), _source(right)
    parts = right.all_input_nodes if packet_of(right) is _aten.add else [right]
    for log in map(_source, parts):
        below = log
        for packet in (_aten.log, _aten.sum, _aten.exp):
            if packet_of(below) is not packet:
                break
            below = _source(below.all_input_nodes[0])
        else:  # what is summed may have had its maximum subtracted, which is then added again
            is_shifted = right is not log and packet_of(below) is _aten.sub
            if left is (_source(below.all_input_nodes[0]) if is_shifted else below):
                return True
    return False


def _computed_from(
    values: Iterable[fx.Node],
    after: Collection[fx.Node],
    gradients: Collection[fx.Node],
    stops: Collection[fx.Node] = (),
) -> list[fx.Node]:
    """These values, and what backward computes from them without a gradient."""
    found = dict.fromkeys(values)
    pending = [n for n in found if n not in stops]
    while pending:
        for reader in pending.pop().users:
            if reader in after and reader not in gradients and reader not in found:
                found[reader] = None
                if reader not in stops:
                    pending.append(reader)
    return list(found)


def _viewed(values: Iterable[fx.Node]) -> list[fx.Node]:
    """These values and their views."""
    found = dict.fromkeys(values)
    pending = list(found)
    while pending:
        new = [n for n in pending.pop().users if is_view(n) and n not in found]
        found |= dict.fromkeys(new)
        pending += new
    return list(found)


def _source(node: fx.Node) -> fx.Node:
    """Returns the value that a view was made of, or the value itself."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_exponential(reader: fx.Node, node: fx.Node) -> bool:
    """Returns whether a reader raises something to the power of a node."""
    packet = packet_of(reader)
    return packet is _aten.exp or (packet is _aten.pow and node in reader.args[1:])


def saturates(reader: fx.Node, _: fx.Node) -> bool:
    """Returns whether a reader no longer changes where its argument is far from 0."""
    return packet_of(reader) in (_aten.sigmoid, _aten.tanh)


def _varies(value: Any) -> bool:
    """Returns whether a value was computed from others, rather than given or constant."""
    if not isinstance(value, fx.Node):
        return False
    source = _source(value)
    return source.op == "call_function" and bool(source.all_input_nodes)


@cache
def _products() -> frozenset[Any]:
    return _added_products() | ops_named("mm bmm convolution")


@cache
def _added_products() -> frozenset[Any]:
    return ops_named("addmm baddbmm")


@cache
def _sums() -> frozenset[Any]:
    return ops_named("add sub rsub")


@cache
def _linear() -> frozenset[Any]:
    convert = torch.ops.prims.convert_element_type
    return ops_named("mul div neg sum mean where relu clamp_min clone expand cat") | {convert}
