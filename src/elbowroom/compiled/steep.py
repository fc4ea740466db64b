"""Functions whose slope is large in a small range, and which of what they read tolerates a code.

Sigmoid and tanh no longer change far from 0. Where backward needs nothing else of a value but
comparisons, the argument of these has the code in place of it, inside of `-LIMIT` and `LIMIT`: one
argument of 200 would leave few levels for those near 0, where the gradient passes.

All else that an exponential, a large power, or a function with a slope in a small range only is
computed from (`is_steep`) has no code, but what backward multiplies with a gradient has: the slope
itself, whose error nothing magnifies. If backward multiplies with two such values, the value stays
exact: of x * exp(-1000 x^2) the one is near 0 where the other is not. Products of a value and such
a function of it (`is_gated`: GELU, SiLU, gated units) keep a slope far from 0, so there a fine code
of the value will do, and so it does behind a mask, as of an ELU. What is left of two functions of
one value (`is_left_over`: tanh(x + 1) - tanh(x)) is computed again from exact values only, and so
are inverses and decompositions (`is_narrow`, `is_taken_apart`).
"""

import operator
from collections.abc import Callable, Collection

import torch
from torch import fx

from elbowroom.compiled.collect import (
    elements_of,
    is_view,
    ops_named,
    packet_of,
    reached,
    tensors_of,
)
from elbowroom.compiled.exponents import (
    COMPARISONS,
    EXPONENTIALS,
    LINEAR,
    MAX_NODES,
    PRODUCTS,
    SUMS,
    arguments_of,
    computed_from,
    is_exponential,
    source_of,
    varies,
)

LIMIT = 24.0  # of what sigmoid or tanh reads: sigmoid(-24) is 4e-11
_FLAT_POWERS = (0, 1, 2, 3, 4)  # others are steep
_aten = torch.ops.aten
_DECOMPOSITIONS = ops_named(
    "linalg_cholesky_ex linalg_eigh linalg_inv_ex linalg_lu linalg_lu_factor_ex linalg_lu_solve "
    "linalg_pinv linalg_qr linalg_lstsq linalg_ldl_factor_ex linalg_solve_triangular _linalg_det "
    "_linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky_solve cholesky_inverse "
    "triangular_solve"
)
_GATES = ops_named("sigmoid tanh erf")
_STEEP = _GATES | ops_named("exp2 expm1 erfc softplus")
_INVERSES = ops_named("reciprocal rsqrt")
_SINGULAR = ops_named(
    "reciprocal rsqrt sqrt log log2 log10 log1p logit xlogy cosh sinh tan atanh acos asin erfinv"
)
_BENDS = ops_named("square cosh sinh cos sin")
_REDUCTIONS = ops_named("sum mean")
_RELUS = ops_named("relu")


def saturated_of(
    value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> list[fx.Node]:
    """The arguments of sigmoids and tanhs that backward computes from a value, likewise."""
    return arguments_of(value, after, gradients, saturates)


def is_bent_steeply(
    value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> bool:
    """Returns whether backward computes a steep function of a value that gates nothing.

    What a product of matrices makes of the value may be gated where the value is not: a residual
    sum has the code that the argument of a SiLU has, which is computed again from it.
    """
    computed = computed_from([value], after, gradients)
    steep = ((n, r) for n in computed for r in n.users if r in after and is_steep(r, n))
    return not is_gated(value) and not all(_gates_own(n, r) for n, r in steep)


def _gates_own(node: fx.Node, reader: fx.Node) -> bool:
    """Returns whether a reader is a function of what it gates, as sigmoid is in x * sigmoid(x).

    Of x / (1 + exp(-x)), as a compiled SiLU is written, it is the exponential. The slope of a GELU
    has exp(-x * x / 2), too.
    """
    if packet_of(reader) is _aten.exp:
        adds = [user.args[1:] == (1,) and packet_of(user) is _aten.add for user in reader.users]
        if not all(adds) and not (packet_of(node) is _aten.mul and node.args[1] == -0.5):
            return False
    return is_gated(_origin(node))


def _origin(node: fx.Node) -> fx.Node:
    """Returns the one value that a node is computed from element by element, or the node itself."""

    def inputs(one: fx.Node) -> list[fx.Node]:
        is_loop = _is_elementwise(one) and packet_of(one) not in _REDUCTIONS
        return [n for n in one.all_input_nodes if varies(n)] if is_loop else []

    made = reached([node], inputs, MAX_NODES)
    begins = [one for one in made if not inputs(one)]
    return begins[0] if len(begins) == 1 and len(made) <= MAX_NODES else node


def slope_of(
    value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> tuple[fx.Node, list[fx.Node]] | None:
    """Returns what backward multiplies with a gradient, of all that it computes from a value.

    The comparisons that it needs besides are returned with it. None: that is not one node, or it
    is larger than the value.
    """
    found: set[fx.Node] = set()
    for node in computed_from([value], after, gradients):
        if packet_of(node) not in COMPARISONS and _is_read(node, after, gradients):
            found.add(source_of(node))
    if len(found) != 1 or value in found:
        return None
    slope = found.pop()
    if elements_of(slope) > elements_of(value):
        return None
    rest = computed_from([value], after, gradients, {slope})
    return slope, [n for n in rest if packet_of(n) in COMPARISONS]


def is_masked(value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]) -> bool:
    """Returns whether a mask hides a product of a gradient with what is computed from a value.

    What is behind a mask may be of any size where no gradient passes, and so may have no code.
    """
    return any(
        packet_of(user) is _aten.where
        for node in computed_from([value], after, gradients)
        for reader in node.users
        if reader in after and reader in gradients and packet_of(reader) is _aten.mul
        for user in reader.users
    )


def _is_read(node: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]) -> bool:
    return any(user in after and user in gradients for user in node.users)


def is_left_over(
    value: fx.Node, after: Collection[fx.Node], gradients: Collection[fx.Node]
) -> bool:
    """Returns whether backward subtracts two functions of one value, which may be nearly equal.

    Differences of a value and its mean or maximum do not count.
    """
    return any(
        reader in after and reader not in gradients and _subtracts_functions(reader)
        for node in computed_from([value], after, gradients)
        for reader in node.users
        if packet_of(reader) is _aten.sub
    )


def _subtracts_functions(difference: fx.Node) -> bool:
    operands = [one for one in difference.args[:2] if isinstance(one, fx.Node)]
    parts = [_made_elementwise(one) for one in operands]
    if len(parts) < 2:
        return False
    bends = any(packet_of(one) in _STEEP | _RELUS for part in parts for one in part)
    return bends and not parts[0].isdisjoint(parts[1])


def _made_elementwise(node: fx.Node) -> set[fx.Node]:
    """Returns a node, and what it is computed from element by element, with where that begins."""

    def inputs(one: fx.Node) -> list[fx.Node]:
        is_loop = packet_of(one) in LINEAR | SUMS | _STEEP | _RELUS
        return [n for n in one.all_input_nodes if varies(n)] if is_loop else []

    return set(reached([node], inputs, MAX_NODES))


def is_steep(reader: fx.Node, node: fx.Node) -> bool:
    """Returns whether a reader is a function whose slope is not about the same everywhere."""
    packet = packet_of(reader)
    if packet is _aten.pow and node is reader.args[0]:
        return reader.args[1] not in _FLAT_POWERS
    return is_exponential(reader, node) or packet in _STEEP


def is_gated(value: fx.Node) -> bool:
    """Returns whether a value, or a part of it, is multiplied with a sigmoid or the like of it."""
    plain = _grown({value}, lambda one: _is_elementwise(one) or one.target is operator.getitem)
    bent = {user for node in plain for user in node.users if packet_of(user) in _GATES}
    gates = _grown(bent, _is_elementwise)
    products = (user for node in gates for user in node.users if packet_of(user) is _aten.mul)
    return any(not plain.isdisjoint(product.all_input_nodes) for product in products)


def _grown(nodes: Collection[fx.Node], takes: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Returns nodes, and what certain ops compute from these alone."""
    found, pending = set(nodes), list(nodes)
    while pending and len(found) <= MAX_NODES:
        for user in pending.pop().users:
            read = filter(tensors_of, user.all_input_nodes)  # views may read sizes, too
            if user not in found and takes(user) and found.issuperset(read):
                found.add(user)
                pending.append(user)
    return found


def _is_elementwise(node: fx.Node) -> bool:
    """Returns whether an op views, adds or multiplies elements, also with themselves."""
    return is_view(node) or packet_of(node) in LINEAR | SUMS | {_aten.pow}


def is_saturated_steeply(value: fx.Node) -> bool:
    """Returns whether a value is a sigmoid, tanh or exponential of what may have any slope.

    Of tanh(1 / (d * d + 0.0001)), the slope of the quotient is huge where 1 - y * y is 0, and an
    error of y is not. Divisors of fewer elements, as the size of a row, do not count.
    """
    source = source_of(value)
    if packet_of(source) not in _GATES | EXPONENTIALS:
        return False
    size = elements_of(source)
    made = _made_of(source, lambda n: _is_alone(n) or packet_of(n) is _aten.abs)
    return any(_is_singular(n) and elements_of(n) >= size for n in made)


def _is_singular(node: fx.Node) -> bool:
    """Returns whether the slope of an op has no bound, for each element apart."""
    packet = packet_of(node)
    if packet is _aten.pow:
        return isinstance(node.args[1], int | float) and node.args[1] < 1
    if packet is _aten.div:
        divisor = node.args[1]
        is_large = isinstance(divisor, fx.Node) and elements_of(divisor) >= elements_of(node)
        return is_large and varies(divisor)
    return packet in _SINGULAR | EXPONENTIALS


def is_narrow(value: fx.Node, gradients: Collection[fx.Node]) -> bool:
    """Returns whether a value is part of a narrow peak: an exponential, or an inverse, of a square.

    Its gradient passes where what is squared is small, or the result is not 0, and the step of a
    code follows the range of all. So does an exponential of an exponential. The value may be the
    result, or what is squared on the way to it.
    """
    source = source_of(value)
    takes = _is_alone if _is_inverse(source) else _is_added_up
    large = {n for n in _made_of(source, takes) if elements_of(n) >= elements_of(source)}
    if _is_peak(source) and any(map(_is_bent, large)):
        return True
    if packet_of(source) in _GATES and any(packet_of(n) in EXPONENTIALS for n in large):
        return True
    own = _after({value}, _is_signed, gradients)
    bent = {user for node in own for user in _forward(node, gradients) if _is_bent(user)}
    squared = {node for node in bent if packet_of(node) not in EXPONENTIALS}
    if packet_of(source) in EXPONENTIALS:
        bent.add(source)
    if not is_gated(value) and any(
        packet_of(user) in _GATES
        for node in _after(bent, _is_alone, gradients)
        for user in _forward(node, gradients)
    ):
        return True
    alone = _after(squared, _is_alone, gradients)  # 1 / (1 + exp(x)) is a sigmoid
    return any(
        user not in squared and (_raises(user, node) or (node in alone and _divides(user, node)))
        for node in _after(bent, _is_added_up, gradients)
        for user in _forward(node, gradients)
    )


def is_taken_apart(value: fx.Node, gradients: Collection[fx.Node]) -> bool:
    """Returns whether a product of a value becomes a matrix that is inverted or decomposed.

    The gradient has the inverse: an error that is small beside the matrix may be large beside its
    least part. The value may be a result of that, too.
    """
    source = source_of(value)
    made = source.all_input_nodes[0] if packet_of(source) is operator.getitem else source
    if packet_of(made) in _DECOMPOSITIONS:
        return True
    own = _after({source}, _is_alone, gradients)
    read = (user for node in own for user in _forward(node, gradients))
    products = {user for user in read if packet_of(user) in PRODUCTS}
    return any(
        packet_of(user) in _DECOMPOSITIONS
        for node in _after(products, _is_alone, gradients)
        for user in _forward(node, gradients)
    )


def _forward(node: fx.Node, gradients: Collection[fx.Node]) -> list[fx.Node]:
    """Returns a node's readers, but for those of backward: a GELU's slope is not narrow."""
    return [
        user
        for user in node.users
        if user not in gradients and user.meta.get("partitioner_tag") != "is_backward"
    ]


def _is_peak(node: fx.Node) -> bool:
    return _is_inverse(node) or any(_raises(node, one) for one in node.all_input_nodes)


def _is_inverse(node: fx.Node) -> bool:
    packet = packet_of(node)
    if packet is _aten.pow:
        return isinstance(node.args[1], int | float) and node.args[1] < 0
    return packet in _INVERSES


def _raises(reader: fx.Node, node: fx.Node) -> bool:
    return packet_of(reader) in EXPONENTIALS or is_exponential(reader, node)


def _divides(reader: fx.Node, node: fx.Node) -> bool:
    return _is_inverse(reader) or (packet_of(reader) is _aten.div and node in reader.args[1:])


def _is_bent(node: fx.Node) -> bool:
    """Returns whether a node is a square, an exponential or the like."""
    packet = packet_of(node)
    if packet in (_aten.mul, _aten.addcmul):
        parts = [_factors(one) for one in node.args[-2:] if isinstance(one, fx.Node)]
        return len(parts) > 1 and not parts[0].isdisjoint(parts[1])
    if packet is _aten.pow:
        return isinstance(node.args[1], int | float) and node.args[1] not in (0, 1)
    return packet in EXPONENTIALS | _BENDS


def _factors(node: fx.Node) -> set[fx.Node]:
    """Returns what a value is a product of, but for what was given, and divisors."""
    found, pending = set[fx.Node](), [node]
    for _ in range(MAX_NODES):
        if not pending:
            break
        one = pending.pop()
        if is_view(one) or packet_of(one) in (_aten.mul, _aten.neg):
            pending += one.all_input_nodes
        elif packet_of(one) is _aten.div:
            pending += one.all_input_nodes[:1]
        elif varies(one):
            found.add(one)
    return found


def _made_of(node: fx.Node, takes: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Returns what a node's argument is computed from by certain ops, and where that begins."""

    def inputs(one: fx.Node) -> list[fx.Node]:
        return one.all_input_nodes if takes(one) else []

    return set(reached(node.all_input_nodes, inputs, MAX_NODES))


def _after(
    nodes: Collection[fx.Node], takes: Callable[[fx.Node], bool], gradients: Collection[fx.Node]
) -> set[fx.Node]:
    """Returns nodes, and what forward computes from them by certain ops."""
    return set(reached(nodes, lambda n: filter(takes, _forward(n, gradients)), MAX_NODES))


def _is_alone(node: fx.Node) -> bool:
    """Returns whether an op views, adds or multiplies element by element."""
    return _is_added_up(node) and packet_of(node) not in _REDUCTIONS


def _is_signed(node: fx.Node) -> bool:
    return _is_alone(node) or packet_of(node) is _aten.abs


def _is_added_up(node: fx.Node) -> bool:
    """Returns whether an op does so, or adds elements up."""
    return is_view(node) or packet_of(node) in LINEAR | SUMS


def saturates(reader: fx.Node, _: fx.Node) -> bool:
    """Returns whether a reader no longer changes where its argument is far from 0."""
    return packet_of(reader) in (_aten.sigmoid, _aten.tanh)
