"""Finds how backward uses a saved value, and so whether it tolerates an error.

From a saved value all its readers in backward are followed, through what is computed again from it,
up to the ops that combine it with a gradient. These readers decide about the value:

    LINEAR      products, sums, reshapes: the gradient has the value's error times a gradient
    CURVED      exp, erf, tanh, powers and the like: the error passes through a function; products
                of the value with itself, as in the gradient of x * x * x: errors of one code are
                not independent, so their square does not average out;
                a softmax's results, which its gradient has twice;
                attention's output, from which its backward computes the term that it subtracts;
                its q, k and v, where backward computes all else from these (`attention.py`)
                log-probabilities, in place of logits that only they are computed from, the
                arguments of sigmoid and tanh, and slopes of steep functions (`steep.py`)
    compared    a comparison decides where a gradient passes: it is saved as one bit, of the exact
                value
    else        what enters an exponential by way of a difference (`exponents.py`);
                results of a ReLU in a product of batches, whose zeros may keep a gradient finite,
                and a product that is multiplied with these;
                attention's q, k and v beside a saved logsumexp, which belongs to the exact q and k;
                divisions, logarithms, and every op that is not listed: the value stays exact
"""

import operator
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import fx

from elbowroom.compiled.attention import INPUTS, RESULTS, arguments_of, is_consistent
from elbowroom.compiled.collect import is_view, ops_named, packet_of, reached
from elbowroom.compiled.exponents import (
    COMPARISONS,
    compared_of,
    exponents_of,
    is_difference,
    is_enough,
    is_exponential,
    is_log_probability,
    is_probability,
)
from elbowroom.compiled.ops import ATTENTION_BACKWARD
from elbowroom.compiled.steep import (
    is_bent_steeply,
    is_left_over,
    is_masked,
    is_narrow,
    is_saturated_steeply,
    is_taken_apart,
    saturated_of,
    saturates,
    slope_of,
)

_MAX_INSTEAD = 2  # codes of a byte an element that may take the place of a float
_CONVERT = frozenset((torch.ops.prims.convert_element_type,))
_ATTENTIONS = ops_named(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)
_OF_BATCHES = ops_named("bmm baddbmm")
_RELUS = ops_named("relu")
_COPIES = ops_named("clone _to_copy expand cat mul constant_pad_nd") | _CONVERT
_LINEAR = _CONVERT.union(
    ops_named(
        "mm addmm bmm baddbmm convolution convolution_backward mul add sub neg sum mean div where "
        "relu clone _to_copy cat expand maximum minimum hardtanh index gather full_like"
    )
)
_PRODUCTS = ops_named("mul mm addmm bmm baddbmm")
_ELEMENTWISE = ops_named("mul add sub neg div where clone _to_copy cat expand") | _CONVERT


class Extent(IntEnum):
    """Extent to which backward needs a value; the larger counts where there are several readers."""

    LINEAR = 0
    CURVED = 1
    EXACT = 2


@dataclass(frozen=True)
class ValueReading:
    """Readings of one value: the strictest use, and the comparisons on the way.

    log_probabilities  what may be coded in its place, from `exponents.FLOOR` up: backward needs
                       the value for exponentials of these alone
    saturated          likewise, from -`steep.LIMIT` to `LIMIT`: it needs the value for
                       sigmoids and tanhs of this one, and for `compared`
    slope              likewise, of any size: what it multiplies with a gradient
    is_probability     it is a result of a log-softmax, raised
    """

    use: Extent
    compared: tuple[fx.Node, ...] = ()
    why: str = ""
    log_probabilities: tuple[fx.Node, ...] = ()
    saturated: tuple[fx.Node, ...] = ()
    slope: tuple[fx.Node, ...] = ()
    is_probability: bool = False


def reading_of(
    value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> ValueReading:
    """Follow a saved value through backward.

    after      what backward computes
    gradients  the nodes among these that depend on a gradient
    """
    if _is_divided_out(value):
        return ValueReading(Extent.EXACT, why="a product that is multiplied with zeros of a ReLU")
    if is_saturated_steeply(value):
        return ValueReading(
            Extent.EXACT, why="where it is saturated, its argument may have any slope"
        )
    if is_taken_apart(value, gradients):
        return ValueReading(Extent.EXACT, why="an inverse or a decomposition of its product")
    exponents = exponents_of(value, after, gradients)
    probable = tuple(filter(is_log_probability, exponents))
    may_stand_in = 0 < len(probable) <= _MAX_INSTEAD
    if may_stand_in and is_enough(value, probable, after, gradients, is_exponential):
        return ValueReading(Extent.CURVED, log_probabilities=probable)
    if probable or any(map(is_difference, exponents)):
        return ValueReading(Extent.EXACT, why="an exponential of what is left of it")
    bent = tuple(saturated_of(value, after, gradients))
    held = tuple(compared_of(value, after, gradients))
    if len(bent) == 1 and is_enough(value, bent, after, gradients, saturates, held):
        return ValueReading(Extent.CURVED, held, saturated=bent)
    if is_narrow(value, gradients):
        return ValueReading(Extent.EXACT, why="an exponential or an inverse of a square")
    if is_left_over(value, after, gradients):
        return ValueReading(Extent.EXACT, why="a difference of two functions of it")
    if is_bent_steeply(value, after, gradients) and not is_masked(value, after, gradients):
        slope = slope_of(value, after, gradients)
        if slope is None:
            return ValueReading(Extent.EXACT, why="a steep function of it")
        return ValueReading(Extent.CURVED, tuple(slope[1]), slope=(slope[0],))
    use, compared = Extent.LINEAR, []
    pending, seen = [(value, _has_zeros(value))], {value}
    own: dict[fx.Node, None] = {}
    while pending:
        node, has_zeros = pending.pop()
        own[node] = None
        for reader in node.users:
            if reader not in after or reader in seen:
                continue
            seen.add(reader)
            packet = packet_of(reader)
            if has_zeros and packet in _OF_BATCHES:
                return ValueReading(Extent.EXACT, why=f"zeros of a ReLU, read by {packet}")
            if packet in COMPARISONS:
                compared.append(reader)
                continue
            if packet is torch.ops.aten.div and reader.args[0] is not node:
                return ValueReading(Extent.EXACT, why=f"divides by it ({reader.name})")
            found = _use_of_attention(reader, node, after)
            found = _use(reader, packet) if found is None else found
            if found is Extent.EXACT:
                return ValueReading(Extent.EXACT, why=f"read by {packet}")
            use = max(use, found)
            if reader not in gradients:
                keeps = is_view(reader) or packet in _COPIES
                pending.append((reader, packet in _RELUS or (has_zeros and keeps)))
    is_raised = is_probability(value)
    if use is Extent.LINEAR and (is_raised or _is_squared(own, after, gradients)):
        use = Extent.CURVED
    return ValueReading(use, tuple(compared), is_probability=is_raised)


def _is_squared(
    own: Collection[fx.Node], after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> bool:
    """Returns whether a product has a value twice: at once, or through a product with a gradient.

    own: the value, and what is computed from it without a gradient. Sums between two products are
    not passed, nor other calls: of the many terms that they mix, few share an error.
    """
    for node in own:
        for reader in node.users:
            packet = packet_of(reader)
            if reader not in after or packet not in _PRODUCTS:
                continue
            if sum(one in own for one in reader.args) > 1:
                return True
            if reader in gradients and _meets(reader, packet, own, after):
                return True
    return False


def _meets(
    product: fx.Node, packet: Any, own: Collection[fx.Node], after: Collection[fx.Node]
) -> bool:
    """Returns whether a product is multiplied in the same way with one of `own` later."""
    loops, pending, seen = packet is torch.ops.aten.mul, [product], {product}
    while pending:
        for reader in pending.pop().users:
            if reader in seen or reader not in after:
                continue
            seen.add(reader)
            other = packet_of(reader)
            alike = other in _PRODUCTS and (other is torch.ops.aten.mul) is loops
            if alike and any(one in own for one in reader.args):
                return True
            if is_view(reader) or other in _ELEMENTWISE:
                pending.append(reader)
    return False


def _has_zeros(node: fx.Node) -> bool:
    """Returns whether a value is a ReLU's result, or copies and multiples of one.

    Attention without a softmax divides by a product with these, and only their zeros keep the
    gradient finite where the divisor is zero.
    """

    def copied(one: fx.Node) -> list[fx.Node]:
        return one.all_input_nodes if is_view(one) or packet_of(one) in _COPIES else []

    return any(packet_of(one) in _RELUS for one in reached([node], copied))


def _is_divided_out(value: fx.Node) -> bool:
    """Returns whether a value is a product of batches that is multiplied with a ReLU's results.

    Attention without a softmax divides one part of that by another: see `runtime/consumers.py`.
    """
    made = value
    while is_view(made) or packet_of(made) in _COPIES:
        made = made.all_input_nodes[0]
    if packet_of(made) not in _OF_BATCHES:
        return False
    pending, seen = [made], {made}
    while pending:
        node = pending.pop()
        for reader in node.users:
            if packet_of(reader) in _OF_BATCHES:
                if any(_has_zeros(one) for one in reader.all_input_nodes if one is not node):
                    return True
            elif reader not in seen and (is_view(reader) or packet_of(reader) in _COPIES):
                seen.add(reader)
                pending.append(reader)
    return False


def _use_of_attention(reader: fx.Node, value: fx.Node, after: Collection[fx.Node]) -> Extent | None:
    """Returns how an attention reads a value; None: the reader is none.

    Of the output alone, backward takes the product of each row with its gradient, which it
    subtracts. A mask stays exact, as it may hold infinities.
    """
    is_own = reader.target is ATTENTION_BACKWARD
    if is_own or packet_of(reader) in _ATTENTIONS:
        places = {at for at, one in enumerate(reader.args) if one is value}
        tolerates = bool(places) and places <= {int(is_own) + at for at in range(len(INPUTS))}
        return Extent.CURVED if tolerates else Extent.EXACT
    given = arguments_of(reader)
    if given is None:
        return None
    roles = {name for name, one in given.items() if one is value}
    tolerates = roles == {"out"} or (roles <= {*INPUTS, *RESULTS} and is_consistent(reader, after))
    return Extent.CURVED if tolerates else Extent.EXACT


def _use(reader: fx.Node, packet: Any) -> Extent:
    if is_view(reader) or packet in _LINEAR or packet is operator.getitem:
        return Extent.LINEAR
    return Extent.CURVED if packet in _curved() else Extent.EXACT


@cache
def _curved() -> frozenset[Any]:
    found = ops_named("exp erf tanh sigmoid gelu silu var_mean square pow gelu_backward")
    # Of torch 2.13: y (g - sum(g y)), as Inductor writes the gradient of a softmax y.
    return found | {getattr(torch.ops.prims, "fma", None)}
